"""The same lists as Django and its REST framework have them out of the box: LIMIT and OFFSET, a count on every page.

A peer goes through the same middleware, session and shell as the page it stands beside; its rows are plain columns.
"""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template import engines
from django.urls import include, path
from django.views.generic import ListView
from rest_framework.generics import ListAPIView
from rest_framework.pagination import PageNumberPagination

from controlplane.audit.models import AuditEntry
from controlplane.audit.queries import with_revision
from controlplane.budgets.models import Budget
from controlplane.contracts.models import Contract
from controlplane.tenants.access import requires
from controlplane.tenants.api import KeySerializer, MemberSerializer, TenantSerializer
from controlplane.tenants.audit_api import AuditSerializer
from controlplane.tenants.models import ApiKey, Member, Tenant

PAGE = 50
_ROWS = """{% extends "base.html" %}{% block content %}<table>{% for row in page_obj %}<tr>{% for cell in row %}
<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<p>Page {{ page_obj.number }} of {{ paginator.num_pages }}, {{ paginator.count }} rows</p>{% endblock %}"""

ROWS: dict[str, tuple[QuerySet[Any], tuple[str, ...], tuple[str, ...]]] = {
    "tenants": (
        Tenant.objects.order_by("slug"),
        ("slug", "name", "parent__slug", "state", "weight", "cost_centre"),
        ("slug", "name"),
    ),
    "keys": (
        ApiKey.objects.order_by("-id"),
        ("name", "public_id", "tenant__slug", "prefix", "state", "expires_at", "last_used_at"),
        ("name", "public_id", "prefix", "tenant__slug"),
    ),
    "members": (
        Member.objects.order_by("user__username"),
        ("user__username", "role", "tenant__slug", "user__email", "user__last_login"),
        ("user__username", "tenant__slug"),
    ),
    "audit": (
        AuditEntry.objects.order_by("-id"),
        ("at", "actor_name", "action", "noun", "object_id", "tenant_slug", "before", "after", "reason"),
        ("actor_name",),
    ),
    "budgets": (
        Budget.objects.order_by("tenant__slug"),
        ("tenant__slug", "name", "period", "limit_nanos", "hard"),
        ("name", "tenant__slug"),
    ),
    "contracts": (
        Contract.objects.order_by("slug"),
        ("slug", "name", "workload_class__slug", "tenant__slug", "created_at"),
        ("slug", "name"),
    ),
}
SERIALIZERS = {
    "tenants": (Tenant.objects.select_related("parent").order_by("slug"), TenantSerializer),
    "api-keys": (ApiKey.objects.select_related("tenant").order_by("-id"), KeySerializer),
    "members": (Member.objects.select_related("user", "tenant").order_by("id"), MemberSerializer),
    "audit": (with_revision(AuditEntry.objects.order_by("-id")), AuditSerializer),
}


class _Rows(ListView):
    paginate_by = PAGE
    noun = ""

    def get_queryset(self) -> QuerySet[Any]:
        rows, columns, searched = ROWS[self.noun]
        wanted = Q()
        if text := self.request.GET.get("q", ""):
            for column in searched:
                wanted |= Q(**{f"{column}__icontains": text})
        return rows.filter(wanted).values_list(*columns)

    def render_to_response(self, context: dict[str, Any], **options: Any) -> HttpResponse:
        return HttpResponse(engines["django"].from_string(_ROWS).render(context, self.request))


class _Pages(PageNumberPagination):
    page_size = PAGE


def _rest(noun: str) -> Any:
    rows, serializer = SERIALIZERS[noun]
    attributes = {
        "queryset": rows.all(), "serializer_class": serializer, "pagination_class": _Pages,
        "read_permission": "tenant.read", "filter_backends": [],
    }  # fmt: skip
    return type(f"Peer{noun}", (ListAPIView,), attributes).as_view()


def _page(noun: str) -> Any:
    view = _Rows.as_view(noun=noun)

    @requires("tenant.read")
    def page(request: HttpRequest) -> Any:
        return view(request)

    return page


urlpatterns = [
    *(path(f"peer/{noun}/", _page(noun)) for noun in ROWS),
    *(path(f"peer/api/{noun}/", _rest(noun)) for noun in SERIALIZERS),
    path("", include("controlplane.config.urls")),
]
