"""The doors to tenants: scoping by person lives here and nowhere else."""

from typing import Any

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import QuerySet
from django.http import Http404, HttpRequest

from controlplane.tenants.access import member_of
from controlplane.tenants.models import Installation, Tenant
from controlplane.tenants.roles import Role


def visible_tenants(user: User | AnonymousUser) -> QuerySet[Tenant]:
    """All tenants for staff, the own one for a tenant's member, none for everybody else."""
    member = member_of(user)
    if member is None:
        return Tenant.objects.none()
    if member.role == Role.TENANT:
        return Tenant.objects.filter(pk=member.tenant_id)
    return Tenant.objects.all()


def tenant_for(user: User | AnonymousUser, slug: str) -> Tenant:
    """The only door to a tenant. Not allowed and not existing look the same: Http404."""
    tenant = visible_tenants(user).filter(slug=slug).first()
    if tenant is None:
        raise Http404("There is no such tenant.")
    return tenant


def installation() -> Installation:
    """The installation's row. Raises Installation.DoesNotExist before `manage.py demo` or the first set-up made it."""
    return Installation.objects.get(pk=1)


def shell_context(request: HttpRequest) -> dict[str, Any]:
    """What the shell of every page shows."""
    member = member_of(request.user)
    row = Installation.objects.filter(pk=1).first()
    return {
        "organisation": row.name if row else "Flexband",
        "billing_zone": row.billing_zone if row else "UTC",
        "currency": row.currency if row else "EUR",
        "role": member.role if member else None,
    }
