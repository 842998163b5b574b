"""Addresses of the flex band's pages and forms."""

from django.urls import path

from controlplane.flex import views

urlpatterns = [
    path("pools/<slug:slug>/flex/", views.pool_page, name="flex-pool"),
    path("pools/<slug:slug>/flex/freeze/", views.freeze, name="flex-freeze"),
    path("pools/<slug:slug>/flex/unfreeze/", views.unfreeze, name="flex-unfreeze"),
    path("flex/slots/<int:slot_id>/recall/", views.recall, name="flex-recall"),
    path("flex/decisions/<int:decision_id>/", views.decision_page, name="flex-decision"),
]
