"""Pages of an action on many rows: its values, the review of each row, and how each went. All three work without a
script: the rows travel in the form.
"""

from collections.abc import Sequence
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.tenants import bulk
from controlplane.tenants.access import may, requires
from controlplane.tenants.audit_views import changes_of
from controlplane.tenants.bulk import Noun, Outcome, Selection
from controlplane.tenants.bulk_nouns import KEYS, MEMBERS, TENANTS
from controlplane.tenants.review import confirmed, reason_of


def bulk_bar(request: HttpRequest, noun: Noun, rows: Sequence[Any]) -> dict[str, Any]:
    """What a list's page needs to let its rows be selected: nothing is offered to who may do nothing with them."""
    return {
        "bulk": noun,
        "bulk_actions": noun.offered(request.user),
        "bulk_keys": [f"{row.pk}:{row.version}" for row in rows],
    }


@require_POST
@requires("tenant.suspend")
def tenants(request: HttpRequest) -> HttpResponse:
    return _step(request, TENANTS)


@require_POST
@requires("key.write")
def keys(request: HttpRequest) -> HttpResponse:
    return _step(request, KEYS)


@require_POST
@requires("member.write")
def members(request: HttpRequest) -> HttpResponse:
    return _step(request, MEMBERS)


def _step(request: HttpRequest, noun: Noun) -> HttpResponse:
    """The values where the action needs some, then the review, then with a reason the action."""
    selection, action = bulk.selection_of(request.POST), noun.action(request.POST.get("action", ""))
    back = _back(request, noun)
    if action is None:
        return _told(request, back, "Choose what to do with the selected rows.")
    if not may(request.user, action.permission):
        raise PermissionDenied(f"Your role does not include {action.permission}.")
    if selection.too_many:
        return _told(request, back, f"Select at most {bulk.ROWS_MAX} {noun.plural} at a time.")
    rows = noun.rows(request.user, list(selection.versions))
    if not rows:
        return _told(request, back, f"Select the {noun.plural} first.")
    page: dict[str, Any] = {"noun": noun, "action": action, "back": back, "count": len(rows), "nav_section": "tenants"}
    values: dict[str, Any] = {}
    if action.form is not None:
        bound = "given" in request.POST
        form = action.form(request.POST if bound else None)
        if not bound or not form.is_valid() or "edit" in request.POST:
            context = {**page, "form": form, "sent": _sent(request, drop=set(form.fields))}
            return render(request, "tenants/bulk_values.html", context, status=400 if form.errors else 200)
        values = form.cleaned_data
    if confirmed(request) and reason_of(request):
        return _results(request, page, selection, values)
    return _review(request, page, rows, selection, values)


def _review(
    request: HttpRequest, page: dict[str, Any], rows: list[Any], selection: Selection, values: dict[str, Any]
) -> HttpResponse:
    noun, action = page["noun"], page["action"]
    outcomes = bulk.rehearse(noun, action, rows, selection, values, actor=actor_of(request), now=timezone.now())
    asked = confirmed(request)
    context = {
        **page,
        "lines": [(one, _changes(one)) for one in outcomes],
        "ready": sum(one.state == bulk.READY for one in outcomes),
        "refused": sum(one.state == bulk.REFUSED for one in outcomes),
        "unchanged": sum(one.state == bulk.NOTHING for one in outcomes),
        # what goes on is reviewed as it is now, whatever version was listed
        "rows": [one.key for one in outcomes if one.state == bulk.READY],
        "sent": _sent(request, drop={"row", "all", "shown"}),
        "error": asked,
    }
    return render(request, "tenants/bulk_review.html", context, status=400 if asked else 200)


def _results(request: HttpRequest, page: dict[str, Any], selection: Selection, values: dict[str, Any]) -> HttpResponse:
    noun, action = page["noun"], page["action"]
    rows = noun.rows(request.user, list(selection.versions))
    outcomes = bulk.apply(
        noun, action, rows, selection, values, reason=reason_of(request), actor=actor_of(request), now=timezone.now()
    )
    overtaken = [one for one in outcomes if one.state == bulk.CHANGED]
    context = {
        **page,
        "lines": [(one, _changes(one)) for one in outcomes],
        "applied": sum(one.state == bulk.APPLIED for one in outcomes),
        "overtaken": overtaken,
        "refused": sum(one.state == bulk.REFUSED for one in outcomes),
        "sent": _sent(request, drop={"row", "all", "shown", "reason"}),
        "request_id": getattr(request, "request_id", ""),
    }
    return render(request, "tenants/bulk_results.html", context)


def _changes(outcome: Outcome) -> list[tuple[str, str, str]]:
    """What somebody else did to the row since it was looked at."""
    return changes_of(outcome.entry) if outcome.entry is not None else []


def _sent(request: HttpRequest, *, drop: set[str]) -> list[tuple[str, str]]:
    """What travels on in hidden fields."""
    left_out = drop | {"csrfmiddlewaretoken", "confirm", "edit", "reason", "given"}
    return [(name, value) for name, group in request.POST.lists() if name not in left_out for value in group]


def _back(request: HttpRequest, noun: Noun) -> str:
    """The list as it was filtered; only an address of our own."""
    wanted = request.POST.get("back", "")
    if wanted.startswith("/") and url_has_allowed_host_and_scheme(wanted, allowed_hosts=None):
        return wanted
    return reverse(noun.list_name)


def _told(request: HttpRequest, back: str, said: str) -> HttpResponse:
    messages.error(request, said)
    return redirect(back)
