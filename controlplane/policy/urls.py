"""Addresses of the policy pages."""

from django.urls import path

from controlplane.policy import configuration_views, views

urlpatterns = [
    path("policy/", views.overview, name="policy"),
    path("policy/review/", views.review_page, name="policy-review"),
    path("policy/configuration/", configuration_views.configuration, name="policy-configuration"),
    path("policy/configuration/export/", configuration_views.export, name="policy-configuration-export"),
    path("policy/unpushed/", views.unpushed, name="policy-unpushed"),
    path("policy/drift/", views.drift_page, name="policy-drift"),
    path("policy/revisions/<int:number>/", views.revision_page, name="policy-revision"),
    path("policy/revisions/<int:number>/triton/<slug:pool>/", views.triton_config, name="policy-triton"),
    path("policy/revisions/<int:number>/rollback/", views.rollback_page, name="policy-rollback"),
    path("policy/rollouts/<int:number>/", views.rollout_view, name="rollout"),
]
