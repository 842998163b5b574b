"""Addresses of the web app's own pages."""

from django.urls import path

from controlplane.web import health, views

urlpatterns = [
    path("favicon.ico", views.favicon, name="favicon"),
    path("healthz", health.alive, name="healthz"),
    path("readyz", health.ready, name="readyz"),
    path("styleguide/", views.styleguide, name="styleguide"),
]
