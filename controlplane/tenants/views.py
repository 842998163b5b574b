"""Pages that create and change tenants. The list and a tenant's own page are in `budgets`, which knows their money."""

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.tenants import actions
from controlplane.tenants.access import member_of, requires
from controlplane.tenants.actions import Stale
from controlplane.tenants.forms import TenantForm, copied_initial, tenant_initial
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import tenant_for, visible_tenants
from controlplane.tenants.review import (
    Line,
    confirmed,
    lines,
    overtaken,
    reason_of,
    renewed,
    review_page,
)
from controlplane.tenants.roles import Role
from controlplane.tenants.tenant_field import in_use, suggestions

LABELS = {
    "slug": "Short name",
    "name": "Name",
    "parent": "Parent",
    "weight": "Weight",
    "max_concurrency": "Concurrent requests",
    "classes": "Classes",
    "model_names": "Models",
    "outage_posture": "Without control plane and lease",
    "cost_centre": "Cost centre",
}
NEXT_REVISION = "Weight, concurrency, classes and models reach the agents with the next policy revision."


@requires("home.read")
def start(request: HttpRequest) -> HttpResponseRedirect:
    """Where a person begins: a tenant's member at the tenant, who sets up at the guide, all others at the live page."""
    member = member_of(request.user)
    if member is not None and member.role == Role.TENANT and member.tenant is not None:
        return redirect("tenant", slug=member.tenant.slug)
    if member is not None and member.role == Role.ADMIN and not Tenant.objects.exists():
        return redirect("setup-guide")
    try:
        return redirect(reverse("home"))
    except NoReverseMatch:
        return redirect("tenants")


@requires("tenant.read")
def tenant_names(request: HttpRequest) -> HttpResponse:
    """Suggestions for a field that asks for a tenant: those whose names hold what is typed, under whatever name."""
    text = next((str(typed) for typed in request.GET.values()), "").strip()[:120]
    return HttpResponse(suggestions(in_use(visible_tenants(request.user)), text))


@requires("tenant.write")
def tenant_new(request: HttpRequest) -> HttpResponse:
    """A new tenant; `?like=SLUG` begins with what another one has."""
    title, initial = "New tenant", {}
    if like := request.GET.get("like"):
        title, initial = f"New tenant like {like}", copied_initial(tenant_for(request.user, like))
    form = TenantForm(request.POST or None, initial=initial)
    if request.method == "POST" and form.is_valid():
        if request.POST.get("edit") is None and confirmed(request):
            try:
                tenant = actions.create_tenant(
                    **form.values(), reason=reason_of(request), actor=actor_of(request), now=timezone.now()
                )
            except ValidationError as error:
                take_errors(form, error)
            else:
                messages.success(request, f"Created {tenant.slug}. Give it a key and a budget next.")
                return redirect("tenant", slug=tenant.slug)
        elif request.POST.get("edit") is None:
            return review_page(
                request,
                form=form,
                title="New tenant",
                verb="Create tenant",
                changes=lines(LABELS, {}, _shown(form)),
                notes=[NEXT_REVISION],
                back=reverse("tenants"),
                back_label="Tenants",
            )
    return _form_page(request, form, title=title, back=reverse("tenants"), back_label="Tenants")


@requires("tenant.write")
def tenant_edit(request: HttpRequest, slug: str) -> HttpResponse:
    tenant = tenant_for(request.user, slug)
    back = reverse("tenant", args=[slug])
    page: dict[str, Any] = {"title": f"Edit {slug}", "back": back, "back_label": slug}
    if request.method != "POST":
        return _form_page(request, TenantForm(tenant=tenant, initial=tenant_initial(tenant)), **page)
    form = TenantForm(request.POST, tenant=tenant)
    if not form.is_valid() or "edit" in request.POST:
        return _form_page(request, form, **page)
    if form.cleaned_data["version"] != tenant.version:
        return _overtaken_page(request, tenant, page)
    changes = lines(LABELS, _stored(tenant), _shown(form))
    if not changes:
        messages.info(request, "Nothing was changed.")
        return redirect(back)
    if confirmed(request):
        try:
            actions.edit_tenant(
                tenant_id=tenant.pk,
                version=form.cleaned_data["version"],
                changes=form.values(),
                reason=reason_of(request),
                actor=actor_of(request),
                now=timezone.now(),
            )
        except Stale:
            return _overtaken_page(request, tenant_for(request.user, slug), page)
        except ValidationError as error:
            take_errors(form, error)
            return _form_page(request, form, **page)
        messages.success(request, f"Saved {slug}. {NEXT_REVISION}")
        return redirect(back)
    return review_page(
        request,
        form=form,
        title=f"Change {slug}",
        verb="Save changes",
        changes=changes,
        notes=[NEXT_REVISION],
        back=back,
        back_label=slug,
    )


@require_POST
@requires("tenant.write")
def tenant_archive(request: HttpRequest, slug: str) -> HttpResponse:
    tenant = tenant_for(request.user, slug)
    try:
        actions.archive_tenant(
            tenant_id=tenant.pk, version=tenant.version, reason=reason_of(request), actor=actor_of(request),
            now=timezone.now(),
        )  # fmt: skip
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    except Stale:
        messages.error(request, f"Somebody changed {slug} at the same moment: look at it and decide again.")
    else:
        messages.success(request, f"Archived {slug} and revoked its keys.")
    return redirect("tenant", slug=slug)


def _form_page(request: HttpRequest, form: TenantForm, **page: Any) -> HttpResponse:
    status = 400 if form.is_bound and form.errors else 200
    return render(request, "tenants/tenant_form.html", {"form": form, **page}, status=status)


def _overtaken_page(request: HttpRequest, tenant: Tenant, page: dict[str, Any]) -> HttpResponse:
    form = renewed(TenantForm, request, tenant.version, tenant=tenant)
    form.is_valid()
    differences: list[Line] = lines(LABELS, _stored(tenant), _shown(form))
    context = {"form": form, "overtaken": overtaken("tenant", tenant.slug, differences), **page}
    return render(request, "tenants/tenant_form.html", context, status=409)


def _shown(form: TenantForm) -> dict[str, Any]:
    data = dict(form.cleaned_data)
    return {**data, "parent": data["parent"].slug if data.get("parent") else None}


def _stored(tenant: Tenant) -> dict[str, Any]:
    return actions.snapshot(tenant)
