"""The REST description (OpenAPI 3.1) and its page, for everybody who may see settings."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from drf_spectacular.views import SpectacularAPIView

from controlplane.tenants.access import RolePermission, requires


class Description(SpectacularAPIView):
    """`/api/schema/`: YAML, or JSON with `?format=json`."""

    read_permission = "settings.read"
    permission_classes = [RolePermission]


schema = Description.as_view()


@requires("settings.read")
def docs(request: HttpRequest) -> HttpResponse:
    """The browsable page of the description."""
    return render(request, "tenants/api_docs.html", {"schema_url": reverse("api-schema") + "?format=json"})
