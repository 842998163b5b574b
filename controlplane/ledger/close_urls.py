"""Pages of the month's end."""

from django.urls import path

from controlplane.ledger import analysis_views, close_views, invoice_views

urlpatterns = [
    path("finance/reconciliation/", close_views.bridge_page, name="finance-bridge"),
    path("finance/reconciliation/<str:period>/propose/", close_views.propose_variance, name="variance-propose"),
    path("finance/invoices/", invoice_views.invoices_page, name="invoices"),
    path("finance/invoices/<int:pk>/", invoice_views.invoice_page, name="invoice"),
    path("finance/invoices/uploads/<uuid:upload_id>/", invoice_views.upload_page, name="invoice-upload"),
    path("finance/skus/<slug:slug>/", close_views.pool_sku, name="pool-sku"),
    path("finance/planned-rates/", close_views.planned_rate, name="planned-rate"),
    path("finance/periods/", close_views.periods_page, name="periods"),
    path("finance/periods/<str:period>/", close_views.period_page, name="period"),
    path("finance/periods/<str:period>/export/<str:format>/", close_views.period_export, name="period-export"),
    path("finance/exports/", close_views.exports_page, name="exports"),
    path("finance/exports/<int:pk>/", close_views.export_job, name="export-job"),
    path("finance/compare/", analysis_views.compare_page, name="compare"),
    path("finance/what-if/", analysis_views.what_if_page, name="what-if"),
    path("finance/proposals/", close_views.proposals_page, name="proposals"),
    path("finance/proposals/<int:pk>/", close_views.decide, name="proposal-decide"),
]
