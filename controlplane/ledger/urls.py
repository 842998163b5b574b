"""Addresses of the finance pages."""

from django.urls import path

from controlplane.ledger import close_urls, rate_urls, views

urlpatterns = [
    path("finance/", views.finance_page, name="finance"),
    path("finance/costs.csv", views.costs_csv, name="finance-csv"),
    path("finance/intervals/<int:pk>/", views.interval_page, name="finance-interval"),
    path("finance/ledger/", views.ledger_page, name="finance-ledger"),
    path("finance/statements/", views.statements_page, name="statements"),
    path("finance/statements/<slug:slug>/", views.statement_page, name="statement"),
    *close_urls.urlpatterns,
    *rate_urls.urlpatterns,
]
