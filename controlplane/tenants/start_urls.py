"""The address behind all others: where a person begins."""

from django.urls import path

from controlplane.tenants.views import start

urlpatterns = [path("start/", start, name="start"), path("", start, name="start-root")]
