"""REST nouns of the live figures."""

from django.urls import path

from controlplane.live.api import Alerts, SloStatus

urlpatterns = [
    path("slo/status/", SloStatus.as_view(), name="api-slo-status"),
    path("alerts/", Alerts.as_view(), name="api-alerts"),
]
