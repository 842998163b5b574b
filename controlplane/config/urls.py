"""Every address of the web process; each app brings its own pages and its own REST nouns."""

from importlib.util import find_spec

from django.urls import include, path

APPS = (
    "audit", "web", "tenants", "access", "alerts", "fleet", "contracts", "budgets", "jobs", "usage", "ledger", "policy",
    "flex", "live", "experiments", "operations",
)  # fmt: skip


def _brought(*files: str) -> list[str]:
    modules = (f"controlplane.{app}.{file}" for app in APPS for file in files)
    return [module for module in modules if find_spec(module)]


urlpatterns = [
    *(path("", include(module)) for module in _brought("urls")),
    *(path("api/v1/", include(module)) for module in _brought("api_urls", "rate_api_urls")),
    # Behind everything: `live` brings the page at "/"; until it does, a person begins where the role works.
    path("", include("controlplane.tenants.start_urls")),
]

handler400 = "controlplane.web.views.bad_request"
handler403 = "controlplane.web.views.permission_denied"
handler404 = "controlplane.web.views.page_not_found"
handler500 = "controlplane.web.views.server_error"
