"""Addresses of budgets, and of the pages that show tenants with their money."""

from django.urls import path

from controlplane.budgets import tenant_views, usage_views, views

urlpatterns = [
    path("tenants/", tenant_views.tenants, name="tenants"),
    path("tenants/<slug:slug>/", tenant_views.tenant, name="tenant"),
    path("tenants/<slug:slug>/usage/", usage_views.tenant_usage, name="tenant-usage"),
    path("budgets/", views.budgets, name="budgets"),
    path("budgets/new/", views.budget_new, name="budget-new"),
    path("budgets/<int:budget_id>/", views.budget, name="budget"),
    path("budgets/<int:budget_id>/edit/", views.budget_edit, name="budget-edit"),
    path("budgets/<int:budget_id>/increase/", views.budget_increase, name="budget-increase"),
    path(
        "budgets/<int:budget_id>/increases/<int:increase_id>/end/",
        views.budget_increase_end,
        name="budget-increase-end",
    ),
    path("budgets/<int:budget_id>/archive/", views.budget_archive, name="budget-archive"),
]
