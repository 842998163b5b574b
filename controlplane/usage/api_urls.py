"""REST addresses of usage, under /api/v1/."""

from django.urls import path

from controlplane.usage.api import UsageEvents
from controlplane.usage.record_api import UsageRecords

urlpatterns = [
    path("usage/events/", UsageEvents.as_view(), name="api-usage-events"),
    path("usage/records/", UsageRecords.as_view(), name="api-usage-records"),
]
