"""REST addresses of usage, under /api/v1/."""

from django.urls import path

from controlplane.usage.api import UsageEvents

urlpatterns = [path("usage/events/", UsageEvents.as_view(), name="api-usage-events")]
