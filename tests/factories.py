"""Rows for tests, made through the ORM with sensible values; every function takes overrides by name."""

import functools
from datetime import UTC, datetime
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import make_password
from django.test import Client

from controlplane.contracts.models import WorkloadClass
from controlplane.fleet.models import Agent, Pool, ServedModel, Slot, SlotTenure
from controlplane.tenants.models import Installation, Member, Tenant

NOW = datetime(2026, 11, 29, 20, 0, tzinfo=UTC)


def installation(**values: Any) -> Installation:
    row, _ = Installation.objects.get_or_create(pk=1, defaults={"name": "Test organisation", **values})
    return row


def tenant(slug: str = "acme", **values: Any) -> Tenant:
    defaults = {"name": slug.title(), "classes": ["chat", "bulk"], "created_at": NOW, "updated_at": NOW}
    return Tenant.objects.create(slug=slug, **{**defaults, **values})


def workload_class(slug: str = "chat", kind: str = "interactive", **values: Any) -> WorkloadClass:
    defaults = {"name": slug.title(), "kind": kind, "created_at": NOW, "updated_at": NOW}
    return WorkloadClass.objects.create(slug=slug, **{**defaults, **values})


def pool(slug: str = "chat-70b", *, model: str = "llama-70b", **values: Any) -> Pool:
    served, _ = ServedModel.objects.get_or_create(name=model)
    defaults = {
        "name": slug, "gpu_type": "H100", "interactive_class": "chat", "batch_class": "bulk",
        "safe_rate": {"entries": {"4": 16.0, "5": 20.0, "6": 24.0}}, "created_at": NOW, "updated_at": NOW,
    }  # fmt: skip
    return Pool.objects.create(slug=slug, model=served, **{**defaults, **values})


def agent(pool_row: Pool, name: str = "gpu-1", **values: Any) -> Agent:
    defaults = {"state": "active", "public_key": b"\0" * 32, "enrolled_at": NOW}
    return Agent.objects.create(pool=pool_row, name=name, **{**defaults, **values})


def slot(pool_row: Pool, name: str, band: str, **values: Any) -> Slot:
    row = Slot.objects.create(pool=pool_row, name=name, band=band, **values)
    SlotTenure.objects.create(slot=row, started_at=NOW)
    return row


def batch_floor(pool_row: Pool, slots: int = 2) -> None:
    """Slots that jobs are promised, without an agent that reports them."""
    for number in range(slots):
        Slot.objects.create(pool=pool_row, name=f"floor-{number}", band="batch")


@functools.cache
def password_hash() -> str:
    """Of the one password of all people in tests: hashed once, since hashing is slow on purpose."""
    return make_password("correct horse battery")


def person(role: str, *, tenant_row: Tenant | None = None, name: str | None = None) -> Client:
    user = get_user_model().objects.create(username=name or role, password=password_hash())
    Member.objects.create(user=user, role=role, tenant=tenant_row)
    client = Client()
    client.force_login(user)
    return client


def people() -> dict[str, Client]:
    own = Tenant.objects.filter(slug="acme").first() or tenant("acme")
    other = tenant("stranger", classes=[])
    made = {role: person(role) for role in ("admin", "finance", "oncall", "viewer")}
    made["tenant"] = person("tenant", tenant_row=own)
    made["stranger"] = person("tenant", tenant_row=other, name="stranger")
    made["anonymous"] = Client()
    return made
