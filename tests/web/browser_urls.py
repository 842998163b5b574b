"""Addresses for the browser tests: the style guide and targets for the shortcuts."""

from django.http import HttpResponse
from django.urls import include, path


def plain(request):
    return HttpResponse("plain")


urlpatterns = [path("", plain, name="home"), path("", include("controlplane.web.urls"))]
