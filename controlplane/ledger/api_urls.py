"""REST addresses of finance reports, under /api/v1/."""

from django.urls import path

from controlplane.ledger.api import AttributionReport, ChargesReport

urlpatterns = [
    path("reports/attribution/", AttributionReport.as_view(), name="api-report-attribution"),
    path("reports/charges/", ChargesReport.as_view(), name="api-report-charges"),
]
