"""Addresses of the web app's own pages."""

from django.urls import path

from controlplane.web import views

urlpatterns = [path("styleguide/", views.styleguide, name="styleguide")]
