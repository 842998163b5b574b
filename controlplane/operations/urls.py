"""The address of the setup guide."""

from django.urls import path

from controlplane.operations import views

urlpatterns = [path("setup/", views.setup, name="setup-guide")]
