"""REST addresses of finance reports, under /api/v1/."""

from django.urls import path

from controlplane.ledger import close_api, invoice_api
from controlplane.ledger.api import AttributionReport, ChargesReport
from controlplane.ledger.reconciliation_api import ReconciliationsView

urlpatterns = [
    path("reports/attribution/", AttributionReport.as_view(), name="api-report-attribution"),
    path("reports/charges/", ChargesReport.as_view(), name="api-report-charges"),
    path("invoices/", invoice_api.InvoicesView.as_view(), name="api-invoices"),
    path("invoices/<int:pk>/", invoice_api.InvoiceView.as_view(), name="api-invoice"),
    path("invoices/<int:pk>/withdraw/", invoice_api.WithdrawInvoiceView.as_view(), name="api-invoice-withdraw"),
    path("invoice-mappings/", invoice_api.InvoiceMappingsView.as_view(), name="api-invoice-mappings"),
    path("reconciliations/", ReconciliationsView.as_view(), name="api-reconciliations"),
    path("reconciliations/<str:period>/", close_api.ReconciliationView.as_view(), name="api-reconciliation"),
    path("periods/", close_api.PeriodsView.as_view(), name="api-periods"),
    path("periods/<str:period>/", close_api.PeriodView.as_view(), name="api-period"),
    path("periods/<str:period>/close/", close_api.ClosePeriodView.as_view(), name="api-period-close"),
    path("periods/<str:period>/reopen/", close_api.ReopenPeriodView.as_view(), name="api-period-reopen"),
    path(
        "periods/<str:period>/exports/<str:file_format>/",
        close_api.PeriodExportView.as_view(),
        name="api-period-export",
    ),
    path("proposals/", close_api.ProposalsView.as_view(), name="api-proposals"),
    path("proposals/<int:pk>/approve/", close_api.ApproveView.as_view(), name="api-proposal-approve"),
    path("proposals/<int:pk>/reject/", close_api.RejectView.as_view(), name="api-proposal-reject"),
]
