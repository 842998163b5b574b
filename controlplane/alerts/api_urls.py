"""REST addresses of alerts and silences, under /api/v1/."""

from django.urls import re_path
from rest_framework.routers import SimpleRouter

from controlplane.alerts.api import AlertAck, EventViewSet, SilenceViewSet

router = SimpleRouter()
router.trailing_slash = "/?"  # a program's POST must not be lost to a redirect
router.register("events", EventViewSet, basename="api-events")
router.register("silences", SilenceViewSet, basename="api-silences")

urlpatterns = [
    re_path(r"^alerts/(?P<alert_id>\d{1,18})/ack/?$", AlertAck.as_view(), name="api-alert-ack"),
    *router.urls,
]
