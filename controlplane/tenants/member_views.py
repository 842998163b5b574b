"""Pages of settings: people, and who may do what."""

from collections.abc import Iterable
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.tenants import member_actions
from controlplane.tenants.access import may, requires
from controlplane.tenants.actions import Stale
from controlplane.tenants.bulk_nouns import MEMBERS
from controlplane.tenants.bulk_views import bulk_bar
from controlplane.tenants.forms import MemberEditForm, MemberForm, PasswordForm, member_initial
from controlplane.tenants.models import Member
from controlplane.tenants.queries import installation, member_for, search_members
from controlplane.tenants.queries import members as all_members
from controlplane.tenants.review import lines, overtaken, reason_of, renewed
from controlplane.tenants.roles import PERMISSIONS, Role
from controlplane.web.exports import CsvResponse, in_batches
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request

LABELS = {"role": "Role", "tenant": "Tenant"}
SORTS = (("name", "By name"), ("role", "By role"), ("newest", "Newest first"))
ORDERS = {"name": ("user__username", "id"), "role": ("role", "user__username", "id"), "newest": ("-id",)}
ROLE_WORDS = {
    Role.ADMIN: "Everything",
    Role.FINANCE: "Reports, invoices, rates and budgets; reads the rest",
    Role.ONCALL: "Live, alerts, recall, freeze, drain, suspend, rollback; reads the rest",
    Role.VIEWER: "Reads",
    Role.TENANT: "Its own tenant's usage, budget, keys and contracts, nothing else",
}


@requires("settings.read")
def settings_page(request: HttpRequest) -> HttpResponse:
    """The installation, and the way to people, roles and the REST description."""
    context = {"installation": installation(), "may_read_members": may(request.user, "member.read")}
    return render(request, "tenants/settings.html", context)


@requires("settings.read")
def roles(request: HttpRequest) -> HttpResponse:
    """Who may do what, out of the table that every route asks."""
    order = list(Role)
    groups: dict[str, list[dict[str, Any]]] = {}
    for permission, allowed in PERMISSIONS.items():
        noun, verb = permission.split(".", 1)
        row = {"permission": permission, "verb": verb, "cells": [(role.value, role in allowed) for role in order]}
        groups.setdefault(noun, []).append(row)
    context = {"roles": [(role.value, ROLE_WORDS[role]) for role in order], "groups": groups, "total": len(PERMISSIONS)}
    return render(request, "tenants/roles.html", context)


@requires("member.read")
def members(request: HttpRequest) -> HttpResponseBase:
    text, role = request.GET.get("q", "").strip()[:120], request.GET.get("role", "")
    sort = request.GET.get("sort", "name")
    order = ORDERS.get(sort, ORDERS["name"])
    rows = search_members(all_members(), text) if text else all_members()
    if role in set(Role):
        rows = rows.filter(role=role)
    if request.GET.get("format") == "csv":
        return _csv(row for batch in in_batches(rows, order) for row in batch)
    try:
        page = keyset_page(rows, order, cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    context = {
        "page": page, "q": text, "sort": sort, "sorts": SORTS, "role_chosen": role, "roles": [r.value for r in Role],
        "total": rows.count(),
        **bulk_bar(request, MEMBERS, page.rows),
    }  # fmt: skip
    return render(request, "tenants/members.html", context)


def _csv(rows: Iterable[Member]) -> CsvResponse:
    header = ["member", "full_name", "email", "role", "tenant", "last_sign_in_at"]
    lines = (
        [
            row.user.username, row.user.get_full_name(), row.user.email, row.role,
            row.tenant.slug if row.tenant else None, row.user.last_login,
        ]
        for row in rows
    )  # fmt: skip
    return CsvResponse("members.csv", header, lines)


@requires("member.read", write="member.write")
def member_new(request: HttpRequest) -> HttpResponse:
    form = MemberForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        data = dict(form.cleaned_data)
        tenant = data.pop("tenant")
        try:
            member = member_actions.create_member(
                **data, tenant_id=tenant.pk if tenant else None, actor=actor_of(request), now=timezone.now()
            )
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, f"{member.user.username} can sign in as {member.role}.")
            return redirect("members")
    status = 400 if form.errors else 200
    return render(request, "tenants/member_form.html", {"form": form, "title": "New member"}, status=status)


@requires("member.read", write="member.write")
def member_edit(request: HttpRequest, member_id: int) -> HttpResponse:
    member = member_for(member_id)
    form = MemberEditForm(request.POST or None, initial=member_initial(member))
    context: dict[str, Any] = {"member": member, "title": f"Edit {member.user.username}", "password": PasswordForm()}
    if request.method == "POST" and form.is_valid():
        tenant = form.cleaned_data["tenant"]
        try:
            member_actions.edit_member(
                member_id=member.pk,
                version=form.cleaned_data["version"],
                role=form.cleaned_data["role"],
                tenant_id=tenant.pk if tenant else None,
                reason=reason_of(request),
                actor=actor_of(request),
                now=timezone.now(),
            )
        except ValidationError as error:
            take_errors(form, error)
        except Stale:
            member = member_for(member_id)
            wanted = {"role": form.cleaned_data["role"], "tenant": tenant.slug if tenant else None}
            differences = lines(LABELS, member_actions.snapshot(member), wanted)
            context["overtaken"] = overtaken("member", member.user.username, differences)
            context["form"] = renewed(MemberEditForm, request, member.version)
            return render(request, "tenants/member_edit.html", context, status=409)
        else:
            messages.success(request, f"Saved {member.user.username}. It counts from the person's next request.")
            return redirect("members")
    context["form"] = form
    return render(request, "tenants/member_edit.html", context, status=400 if form.errors else 200)


@require_POST
@requires("member.write")
def member_password(request: HttpRequest, member_id: int) -> HttpResponse:
    member = member_for(member_id)
    form = PasswordForm(request.POST)
    if form.is_valid():
        try:
            member_actions.set_password(
                user_id=member.user_id,
                password=form.cleaned_data["password"],
                actor=actor_of(request),
                now=timezone.now(),
            )
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, f"Set the password of {member.user.username}; open sessions have ended.")
            return redirect("members")
    context = {
        "member": member,
        "title": f"Edit {member.user.username}",
        "form": MemberEditForm(initial=member_initial(member)),
        "password": form,
    }
    return render(request, "tenants/member_edit.html", context, status=400)


@require_POST
@requires("member.write")
def member_remove(request: HttpRequest, member_id: int) -> HttpResponse:
    member = member_for(member_id)
    try:
        member_actions.remove_member(
            member_id=member.pk, reason=reason_of(request), actor=actor_of(request), now=timezone.now()
        )
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    else:
        messages.success(request, f"{member.user.username} can no longer sign in.")
    return redirect("members")
