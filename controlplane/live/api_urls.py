"""REST nouns of the live figures."""

from django.urls import path

from controlplane.live.api import Alerts, RequestExplanation, SloStatus

urlpatterns = [
    path("slo/status/", SloStatus.as_view(), name="api-slo-status"),
    path("requests/<uuid:request_id>/", RequestExplanation.as_view(), name="api-request"),
    path("alerts/", Alerts.as_view(), name="api-alerts"),
]
