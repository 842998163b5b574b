"""The doors to tenants, keys and people: scoping by person lives here and nowhere else."""

from typing import Any, TypeVar

from django.apps import apps
from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Model, Q, QuerySet
from django.http import Http404, HttpRequest

from controlplane.tenants.access import member_of, role_of
from controlplane.tenants.models import ApiKey, Installation, Member, Tenant
from controlplane.tenants.roles import Role

SETTING_UP = "setting_up"
"""Set in the session of who opened the setup guide, until the first request was admitted."""


def visible_tenants(user: User | AnonymousUser) -> QuerySet[Tenant]:
    """All tenants for staff, the own one for a tenant's member, none for everybody else."""
    member = member_of(user)
    if member is None:
        return Tenant.objects.none()
    if member.role == Role.TENANT:
        return Tenant.objects.filter(pk=member.tenant_id or 0)
    return Tenant.objects.all()


def sees_all_tenants(user: User | AnonymousUser) -> bool:
    """Whether `visible_tenants` are all: then nothing needs to be narrowed to them."""
    return role_of(user) not in (None, Role.TENANT)


def slug_or_name_holds(text: str) -> Q:
    """Of a tenant: its short name or its name holds the text."""
    return Q(slug__icontains=text) | Q(name__icontains=text)


def tenant_for(user: User | AnonymousUser, slug: str) -> Tenant:
    """The only door to a tenant. Not allowed and not existing look the same: Http404."""
    tenant = visible_tenants(user).filter(slug=slug).first()
    if tenant is None:
        raise Http404("There is no such tenant.")
    return tenant


Row = TypeVar("Row", bound=Model)


def of_visible_tenants(user: User | AnonymousUser, rows: QuerySet[Row]) -> QuerySet[Row]:
    """Of rows that have a `tenant` those whose tenant the person may see: `visible_tenants`, without joining all."""
    member = member_of(user)
    if member is None:
        return rows.none()
    return rows.filter(tenant=member.tenant_id or 0) if member.role == Role.TENANT else rows


def visible_keys(user: User | AnonymousUser) -> QuerySet[ApiKey]:
    """Keys of the tenants that the person may see."""
    return of_visible_tenants(user, ApiKey.objects.select_related("tenant"))


def key_for(user: User | AnonymousUser, public_id: str) -> ApiKey:
    """The only door to a key; Http404 like `tenant_for`."""
    key = visible_keys(user).filter(public_id=public_id).first()
    if key is None:
        raise Http404("There is no such key.")
    return key


def members() -> QuerySet[Member]:
    """Everybody who can sign in; the view is for administrators."""
    return Member.objects.select_related("user", "tenant").filter(user__is_active=True)


def member_for(member_id: int) -> Member:
    member = members().filter(pk=member_id).first()
    if member is None:
        raise Http404("There is no such member.")
    return member


def search_members(rows: QuerySet[Member], text: str) -> QuerySet[Member]:
    """People whose sign-in name, name, address or tenant holds the text."""
    return rows.filter(
        Q(user__username__icontains=text)
        | Q(user__first_name__icontains=text)
        | Q(user__email__icontains=text)
        | Q(tenant__slug__icontains=text)
    )


TENANTS_NAMED_MAX = 2_000


def search_keys(keys: QuerySet[ApiKey], text: str) -> QuerySet[ApiKey]:
    """Keys whose name, id, prefix or tenant holds the text; two statements with the list's own.

    Tenants are looked up first: a list of ids leaves the database its indexes of keys, a join in an OR does not. Of
    more than TENANTS_NAMED_MAX so many keys are found that the list is soon full whatever way it is read.
    """
    named = Tenant.objects.filter(slug__icontains=text).values_list("pk", flat=True)
    ids = list(named[: TENANTS_NAMED_MAX + 1])
    return keys.filter(
        key_holds(text) | (Q(tenant__in=ids) if len(ids) <= TENANTS_NAMED_MAX else Q(tenant__slug__icontains=text))
    )


def key_holds(text: str) -> Q:
    """Of a key itself: its name, id or prefix holds the text."""
    return (
        Q(name__icontains=text)
        | Q(public_id__icontains=text)
        | Q(prefix__istartswith=text.removeprefix("fb_").split("_")[0])
    )


def class_slugs() -> list[tuple[str, str]]:
    """(slug, label) of the classes that are not archived. The table belongs to an app above this one, so it is asked
    for by name, like a foreign key.
    """
    classes = apps.get_model("contracts", "WorkloadClass").objects.exclude(state="archived").order_by("slug")
    return [(slug, f"{slug} ({kind})") for slug, kind in classes.values_list("slug", "kind")]


def model_names() -> list[str]:
    """Names of the models that pools serve; see `class_slugs` for why by name."""
    return list(apps.get_model("fleet", "ServedModel").objects.order_by("name").values_list("name", flat=True))


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
        "setting_up": bool(getattr(request, "session", {}).get(SETTING_UP)),
    }
