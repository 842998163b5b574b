"""Pages of classes and contracts."""

from django.urls import path

from controlplane.contracts import openslo_views, views

urlpatterns = [
    path("classes/", views.classes, name="classes"),
    path("classes/new/", views.class_new, name="class-new"),
    path("classes/<slug:slug>/", views.workload_class, name="class"),
    path("classes/<slug:slug>/edit/", views.class_edit, name="class-edit"),
    path("classes/<slug:slug>/suspend/", views.class_suspend, name="class-suspend"),
    path("classes/<slug:slug>/resume/", views.class_resume, name="class-resume"),
    path("classes/<slug:slug>/archive/", views.class_archive, name="class-archive"),
    path("contracts/", views.contracts, name="contracts"),
    path("contracts/new/", views.contract_new, name="contract-new"),
    path("contracts/reads/", views.contract_reads, name="contract-reads"),
    path("contracts/openslo/import/", openslo_views.take, name="openslo-import"),
    path("contracts/openslo/contracts.yaml", openslo_views.export, name="openslo-export"),
    path("contracts/<slug:slug>/", views.contract, name="contract"),
    path("contracts/<slug:slug>/edit/", views.contract_edit, name="contract-edit"),
    path("contracts/<slug:slug>/archive/", views.contract_archive, name="contract-archive"),
]
