"""Pages of API keys. A secret is shown on the page that answers the POST which made it, and nowhere else."""

import secrets
from datetime import UTC, datetime
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import Value
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.tenants import key_actions
from controlplane.tenants.access import requires
from controlplane.tenants.actions import Stale
from controlplane.tenants.bulk_nouns import KEYS
from controlplane.tenants.bulk_views import bulk_bar
from controlplane.tenants.forms import KeyForm, RotateForm, key_initial
from controlplane.tenants.key_actions import IssuedKey
from controlplane.tenants.models import ApiKey
from controlplane.tenants.queries import key_for, search_keys, tenant_for, visible_keys
from controlplane.tenants.review import confirmed, lines, overtaken, reason_of, renewed, review_page
from controlplane.web.exports import CsvResponse, in_batches, in_present_order
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request

LABELS = {
    "name": "Name",
    "classes": "Classes",
    "default_class": "Default class",
    "expires_at": "Expires (UTC)",
    "max_concurrency": "Concurrent requests",
    "requests_per_s": "Requests per second",
    "tokens_per_minute": "Tokens per minute",
}
STATES = (("active", "Active"), ("revoked", "Revoked"), ("expired", "Expired"), ("all", "All"))
SORTS = (
    ("newest", "Newest first"),
    ("tenant", "By tenant"),
    ("expiry", "Expiring first"),
    ("unused", "Unused longest"),
)
NEVER = {
    "expiry": {"ends": Coalesce("expires_at", Value(datetime.max.replace(tzinfo=UTC, microsecond=0)))},
    "unused": {"used": Coalesce("last_used_at", Value(datetime(1970, 1, 1, tzinfo=UTC)))},
}
"""A key that never ends comes last of those that do, one that was never used first."""
ORDERS = {
    "newest": ("-id",),
    "tenant": ("tenant__slug", "name", "id"),
    "expiry": ("ends", "id"),
    "unused": ("used", "id"),
}


@requires("key.read")
def keys(request: HttpRequest) -> HttpResponseBase:
    """Every key that the person may see."""
    now = timezone.now()
    rows = visible_keys(request.user)
    text, state = request.GET.get("q", "").strip()[:120], request.GET.get("state", "active")
    sort = request.GET.get("sort", "newest")
    order = ORDERS.get(sort, ORDERS["newest"])
    if sort in NEVER:
        rows = rows.annotate(**NEVER[sort])
    if text:
        rows = search_keys(rows, text)
    if state == "active":
        rows = rows.filter(state=ApiKey.State.ACTIVE)
    elif state == "revoked":
        rows = rows.filter(state=ApiKey.State.REVOKED)
    elif state == "expired":
        rows = rows.filter(expires_at__lte=now)
    if request.GET.get("format") == "csv":
        newest = order == ORDERS["newest"]
        batches = in_batches(rows, order) if newest else in_present_order(rows, order, visible_keys(request.user))
        return _csv(key for batch in batches for key in batch)
    try:
        page = keyset_page(rows, order, cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    context = {
        "page": page, "q": text, "state": state, "states": STATES, "sort": sort, "sorts": SORTS, "now": now,
        "total": rows.count(),
        **bulk_bar(request, KEYS, page.rows),
    }  # fmt: skip
    return render(request, "tenants/keys.html", context)


@requires("key.write")
def key_new(request: HttpRequest, slug: str) -> HttpResponse:
    tenant = tenant_for(request.user, slug)
    back = reverse("tenant", args=[slug]) + "?tab=keys"
    form = KeyForm(request.POST or None, tenant=tenant, initial={"classes": tenant.classes[:1]})
    if request.method == "POST" and form.is_valid():
        try:
            issued = key_actions.create_key(
                tenant_id=tenant.pk, **form.values(), actor=actor_of(request), now=timezone.now()
            )
        except ValidationError as error:
            take_errors(form, error)
        else:
            return _secret_page(request, issued, title="Key created")
    page = {"title": f"New key for {slug}", "back": back, "back_label": slug, "tenant": tenant, "verb": "Create key"}
    return _form_page(request, form, page)


@requires("key.write")
def key_edit(request: HttpRequest, public_id: str) -> HttpResponse:
    key = key_for(request.user, public_id)
    back = reverse("tenant", args=[key.tenant.slug]) + "?tab=keys"
    page: dict[str, Any] = {
        "title": f"Edit key {key.name}", "back": back, "back_label": key.tenant.slug, "tenant": key.tenant,
        "verb": "Review changes",
    }  # fmt: skip
    if request.method != "POST":
        return _form_page(request, KeyForm(tenant=key.tenant, key=key, initial=key_initial(key)), page)
    form = KeyForm(request.POST, tenant=key.tenant, key=key)
    if not form.is_valid() or "edit" in request.POST:
        return _form_page(request, form, page)
    if form.cleaned_data["version"] != key.version:
        return _overtaken_page(request, key, page)
    changes = lines(LABELS, key_actions.snapshot(key), form.cleaned_data)
    if not changes:
        messages.info(request, "Nothing was changed.")
        return redirect(back)
    if not confirmed(request):
        note = "Acts on every agent within seconds. What the key spent stays."
        return review_page(
            request, form=form, title=f"Change key {key.name}", verb="Save changes", changes=changes, notes=[note],
            back=back, back_label=key.tenant.slug,
        )  # fmt: skip
    try:
        key_actions.edit_key(
            key_id=key.pk, version=form.cleaned_data["version"], changes=form.values(), reason=reason_of(request),
            actor=actor_of(request), now=timezone.now(),
        )  # fmt: skip
    except Stale:
        return _overtaken_page(request, key_for(request.user, public_id), page)
    except ValidationError as error:
        take_errors(form, error)
        return _form_page(request, form, page)
    messages.success(request, f"Saved key {key.name}.")
    return redirect(back)


@requires("key.write")
def key_rotate(request: HttpRequest, public_id: str) -> HttpResponse:
    key, now = key_for(request.user, public_id), timezone.now()
    initial = {"rotation_id": f"page-{secrets.token_hex(8)}"}
    form = RotateForm(request.POST or None, key=key, now=now, initial=initial)
    if request.method == "POST" and form.is_valid():
        try:
            issued = key_actions.rotate_key(
                key_id=key.pk,
                rotation_id=form.cleaned_data["rotation_id"],
                overlap=form.overlap(),
                end_overlap=form.cleaned_data.get("end_overlap", False),
                reason=form.cleaned_data["reason"],
                actor=actor_of(request),
                now=now,
            )
        except ValidationError as error:
            take_errors(form, error)
        else:
            return _secret_page(request, issued, title="Key rotated")
    context = {"form": form, "key": key, "back": reverse("tenant", args=[key.tenant.slug]) + "?tab=keys"}
    return render(request, "tenants/key_rotate.html", context, status=400 if form.errors else 200)


@require_POST
@requires("key.write")
def key_revoke(request: HttpRequest, public_id: str) -> HttpResponse:
    key = key_for(request.user, public_id)
    try:
        key_actions.revoke_key(key_id=key.pk, reason=reason_of(request), actor=actor_of(request), now=timezone.now())
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    else:
        messages.success(request, f"Revoked key {key.name}: agents refuse it within seconds.")
    return redirect(reverse("tenant", args=[key.tenant.slug]) + "?tab=keys")


def _secret_page(request: HttpRequest, issued: IssuedKey, *, title: str) -> HttpResponse:
    context = {"key": issued.key, "secret": issued.secret, "secret_title": title}
    response = render(request, "tenants/key_secret.html", context)
    response.headers["Cache-Control"] = "no-store"
    return response


def _form_page(request: HttpRequest, form: KeyForm, page: dict[str, Any]) -> HttpResponse:
    status = 400 if form.is_bound and form.errors else 200
    return render(request, "tenants/key_form.html", {"form": form, **page}, status=status)


def _overtaken_page(request: HttpRequest, key: ApiKey, page: dict[str, Any]) -> HttpResponse:
    form = renewed(KeyForm, request, key.version, tenant=key.tenant, key=key)
    form.is_valid()
    differences = lines(LABELS, key_actions.snapshot(key), form.cleaned_data)
    context = {"form": form, "overtaken": overtaken("key", key.public_id, differences), **page}
    return render(request, "tenants/key_form.html", context, status=409)


def _csv(rows: Any) -> CsvResponse:
    header = [
        "key_id", "tenant", "name", "prefix", "state", "classes", "default_class", "expires_at", "created_at",
        "last_used_at",
    ]  # fmt: skip
    return CsvResponse(
        "keys.csv",
        header,
        (
            [
                key.public_id, key.tenant.slug, key.name, f"fb_{key.prefix}", key.state, " ".join(key.classes),
                key.default_class, key.expires_at, key.created_at, key.last_used_at,
            ]
            for key in rows
        ),
    )  # fmt: skip
