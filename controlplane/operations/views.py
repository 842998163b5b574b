"""The page that leads through setting up."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from controlplane.operations.setup_guide import guide
from controlplane.tenants.access import may, requires
from controlplane.tenants.queries import SETTING_UP


@requires("settings.read")
def setup(request: HttpRequest) -> HttpResponse:
    """The whole page, or the steps alone for the page that renews them every few seconds."""
    now = timezone.now()
    found = guide(now)
    if bool(request.session.get(SETTING_UP)) == found.finished:
        request.session[SETTING_UP] = not found.finished
    context = {
        "guide": found,
        "steps": [
            (step, step.url and (not step.permission or may(request.user, step.permission))) for step in found.steps
        ],
        "now": now,
    }
    name = "_setup_steps" if request.headers.get("HX-Request") else "setup"
    return render(request, f"operations/{name}.html", context)
