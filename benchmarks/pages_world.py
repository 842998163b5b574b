"""The database of the pages benchmark: an organisation of ten thousand tenants, loaded by COPY in a few seconds.

Everything is made from its number, so that two runs hold the same rows. Figures hang together as far as a list shows
them: budgets have windows and days of charges, agents report, contracts have versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.apps import apps
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import Model

from controlplane.alerts.models import Alert
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.budgets.models import Budget, BudgetWindow
from controlplane.contracts.models import Contract, ContractVersion, ObjectiveMinute, WorkloadClass
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.fleet.models import Agent, AgentLive, Pool, ServedModel, Slot, SlotInterval, SlotTenure
from controlplane.jobs.models import Job
from controlplane.ledger.models import AttributionInterval, AttributionLine, CostRate, RateCard
from controlplane.policy.actions import push
from controlplane.policy.models import Delivery, PolicyBundle, Rollout, Wave
from controlplane.tenants.models import ApiKey, Installation, Member, Tenant
from controlplane.usage.models import RollupDay

EUR = 1_000_000_000
CLASSES, MODELS, POOLS, DAYS = 12, 20, 40, 28
MINUTES_KEPT = 60
CHILDREN = 9
"""Of each tenant that has any: one in ten stands at the top of a group."""
MEMBERS_PER, AUDIT_PER, CONTRACTS_PER, JOBS_PER, ALERTS_PER = 0.5, 20, 0.1, 2, 0.2
"""Rows for each tenant."""
AGENTS_PER = 0.05
HOUR = timedelta(hours=1)
ZONE = "Europe/Berlin"
ROLES = ("admin", "finance", "oncall", "viewer")
STAFF_EVERY = 50


@dataclass(frozen=True)
class World:
    """How much of each there is, and who signs in."""

    counts: dict[str, int]
    admin: User
    tenant_person: User


def build(tenants: int, keys: int, now: datetime) -> World:
    """Fills an empty database."""
    Installation.objects.create(pk=1, name="Ten thousand tenants", billing_zone=ZONE)
    fleet(now, agents=max(POOLS, round(tenants * AGENTS_PER)))
    organisation(tenants, keys, now)
    prices(now)
    money(tenants, now)
    costs(tenants, now)
    promises(round(tenants * CONTRACTS_PER), tenants, now)
    kept(round(tenants * CONTRACTS_PER), now)
    log(tenants * AUDIT_PER, tenants, now)
    work(tenants * JOBS_PER, tenants, now)
    alerts(round(tenants * ALERTS_PER), now)
    people(round(tenants * MEMBERS_PER), tenants, now)
    with connection.cursor() as cursor:
        for model in apps.get_models():
            _past_copied(cursor, model)
        publish(now)
        cursor.execute("VACUUM ANALYZE")
    counted = (Tenant, ApiKey, Member, AuditEntry, Budget, Contract, Agent, Job, Alert, RollupDay, AttributionLine)
    return World(
        counts={str(model._meta.verbose_name_plural): model.objects.count() for model in counted},
        admin=User.objects.get(username="person-0"),
        tenant_person=User.objects.get(username="person-1"),
    )


def copy(rows: Iterable[Model]) -> None:
    """Rows of one model through COPY, columns as their fields write them."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return
    fields = [field for field in first._meta.concrete_fields if field.primary_key or not field.generated]
    fields = [field for field in fields if not (field.primary_key and first.pk is None)]
    columns = ", ".join(f'"{field.column}"' for field in fields)
    with connection.cursor() as cursor, cursor.copy(f'COPY "{first._meta.db_table}" ({columns}) FROM STDIN') as pipe:
        for row in (first, *rows):
            pipe.write_row([field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields])


def _past_copied(cursor: Any, model: type[Model]) -> None:
    """Numbers that the database gives go on after those that were copied."""
    table, column = model._meta.db_table, model._meta.pk.column
    cursor.execute("SELECT pg_get_serial_sequence(%s, %s)", [f'"{table}"', column])
    sequence = cursor.fetchone()[0]
    if sequence:
        cursor.execute(
            f'SELECT setval(%s, max("{column}")) FROM "{table}" HAVING max("{column}") IS NOT NULL', [sequence]
        )


def class_slug(number: int) -> str:
    return f"class-{number % CLASSES}"


def tenant_slug(number: int) -> str:
    return f"tenant-{number:05}"


def fleet(now: datetime, *, agents: int) -> None:
    copy(
        WorkloadClass(
            id=n + 1, slug=class_slug(n), name=f"Class {n}", kind="batch" if n % 3 == 2 else "interactive",
            created_at=now, updated_at=now,
        )
        for n in range(CLASSES)
    )  # fmt: skip
    copy(ServedModel(id=n + 1, name=f"model-{n}") for n in range(MODELS))
    copy(
        Pool(
            id=n + 1, slug=f"pool-{n:02}", name=f"Pool {n}", model_id=n % MODELS + 1, gpu_type="H100",
            interactive_class=class_slug(n - n % 3), batch_class=class_slug(n - n % 3 + 2),
            safe_rate={"entries": {"4": 16.0}}, created_at=now, updated_at=now,
        )
        for n in range(POOLS)
    )  # fmt: skip
    copy(
        Agent(
            id=n + 1, name=f"gpu-{n:05}", pool_id=n % POOLS + 1, state="active", public_key=b"\0" * 32,
            enrolled_at=now,
        )
        for n in range(agents)
    )  # fmt: skip
    copy(
        AgentLive(agent_id=n + 1, epoch=1, seq=1, reported_at=now - timedelta(seconds=n % 20), revision=1)
        for n in range(agents)
    )
    bands = ("interactive", "interactive", "batch", "flex")
    slots = [(n, place) for n in range(agents) for place in range(len(bands))]
    copy(
        Slot(id=i + 1, pool_id=n % POOLS + 1, agent_id=n + 1, name=f"s{n}-{place}", band=bands[place])
        for i, (n, place) in enumerate(slots)
    )
    copy(SlotTenure(id=i + 1, slot_id=i + 1, started_at=now) for i in range(len(slots)))
    copy(SlotInterval(id=i + 1, slot_id=i + 1, state="home", started_at=now) for i in range(len(slots)))


def organisation(tenants: int, keys: int, now: datetime) -> None:
    copy(
        Tenant(
            id=n + 1, slug=tenant_slug(n), name=f"Organisation {n} of the north",
            parent_id=None if n % (CHILDREN + 1) == 0 else n - n % (CHILDREN + 1) + 1,
            state="suspended" if n % 97 == 5 else "archived" if n % 101 == 7 else "active",
            weight=1 + n % 5, classes=[class_slug(n), class_slug(n + 2)], cost_centre=f"cc-{n % 300}",
            created_at=now - timedelta(hours=tenants - n), updated_at=now, live_number=n,
        )
        for n in range(tenants)
    )  # fmt: skip
    copy(
        ApiKey(
            id=n + 1, public_id=f"key_{n:012}", tenant_id=n % tenants + 1, name=f"service {n}", prefix=f"p{n:07}",
            secret_hash=hashlib.sha256(b"%d" % n).hexdigest(), state="revoked" if n % 10 == 3 else "active",
            expires_at=now + timedelta(days=n % 400 - 30) if n % 3 else None, classes=[class_slug(n % tenants)],
            default_class=class_slug(n % tenants), created_at=now - timedelta(minutes=keys - n),
            last_used_at=now - timedelta(seconds=n), live_number=tenants + n,
        )
        for n in range(keys)
    )  # fmt: skip


def people(count: int, tenants: int, now: datetime) -> None:
    """Person 0 is an administrator, person 1 acts for a tenant, and so on; nobody has a password that works."""
    first = User.objects.order_by("-id").values_list("id", flat=True).first() or 0
    staff = [n for n in range(count) if n % STAFF_EVERY == 0]
    roles = {n: ROLES[place % len(ROLES)] for place, n in enumerate(staff)}
    copy(
        User(
            id=first + n + 1, username=f"person-{n}", first_name=f"Ada {n}", email=f"person-{n}@example.com",
            password="!", last_login=now - timedelta(hours=n), date_joined=now,
        )
        for n in range(count)
    )  # fmt: skip
    copy(
        Member(
            id=n + 1, user_id=first + n + 1, role=roles.get(n, "tenant"),
            tenant_id=None if n in roles else n % tenants + 1,
        )
        for n in range(count)
    )  # fmt: skip
    invitation = apps.get_model("access", "Invitation")
    copy(
        invitation(
            id=n + 1, email=f"guest-{n}@example.com", role="tenant", tenant_id=n % tenants + 1, created_at=now,
            secret_hash=hashlib.sha256(b"i%d" % n).hexdigest(), created_by="person-0",
            expires_at=now + timedelta(days=7),
        )
        for n in range(count // 10)
    )  # fmt: skip


def money(tenants: int, now: datetime) -> None:
    """A monthly budget each, its window half spent, and four weeks of charges by day."""
    month = window_at(load_zone(ZONE), Calendar.MONTH, now)
    copy(
        Budget(
            id=n + 1, tenant_id=n + 1, name=f"Month {n}", zone=ZONE, limit_nanos=1_000 * EUR, hard=n % 4 > 0,
            created_at=now, updated_at=now,
        )
        for n in range(tenants)
    )  # fmt: skip
    copy(
        BudgetWindow(
            id=n + 1, budget_id=n + 1, starts_at=month.start, ends_at=month.end, limit_nanos=1_000 * EUR,
            hard=n % 4 > 0, settled_nanos=n * 7 % 1_000 * EUR, leased_nanos=0,
        )
        for n in range(tenants)
    )  # fmt: skip
    today: date = now.date()
    copy(
        RollupDay(
            id=day * tenants + n + 1, day=today - timedelta(days=day + 1), pool_id=n % POOLS + 1, tenant_id=n + 1,
            class_id=n % CLASSES + 1, model_id=n % MODELS + 1, rate_version=1, outcome=1, requests=100,
            prompt_tokens=10_000, cached_tokens=0, output_tokens=5_000, gpu_us=1_000_000,
            charge_prompt_nanos=n % 50 * EUR, charge_cached_nanos=0, charge_output_nanos=EUR, charge_gpu_nanos=0,
            stages=b"",
        )
        for day in range(DAYS)
        for n in range(tenants)
    )  # fmt: skip


def costs(tenants: int, now: datetime) -> None:
    """What the days of charges cost: a busy hour a day in each pool, of which each of its tenants has a line."""
    noon = now.replace(hour=12, minute=0, second=0, microsecond=0)
    hours = [(day, pool) for day in range(DAYS) for pool in range(POOLS)]
    used = [[(n, (n % 7 + 1) * EUR // 4) for n in range(pool, tenants, POOLS)] for pool in range(POOLS)]
    copy(
        AttributionInterval(
            id=i + 1, pool_id=pool + 1, starts_at=noon - timedelta(days=day + 1), ends_at=noon - timedelta(days=day + 1)
            + HOUR, run=1, method="usage", attributed_at=now, complete=True, owned_us=len(used[pool]) + 1,
            cost_nanos=EUR + sum(nanos for _, nanos in used[pool]),
        )
        for i, (day, pool) in enumerate(hours)
    )  # fmt: skip
    lines = (
        line
        for i, (_, pool) in enumerate(hours)
        for line in (
            (i + 1, "platform", "", "unused", EUR),
            *((i + 1, tenant_slug(n), class_slug(n), "direct", nanos) for n, nanos in used[pool]),
        )
    )
    copy(
        AttributionLine(
            id=number + 1, interval_id=interval, tenant_slug=tenant, class_slug=klass, line=line, gpu_us=1,
            amount_nanos=nanos,
        )
        for number, (interval, tenant, klass, line, nanos) in enumerate(lines)
    )  # fmt: skip


def prices(now: datetime) -> None:
    """A cost rate for each pool, a rate card for each class and model that a pool serves."""
    since = now - timedelta(days=90)
    told = {"effective_from": since, "created_at": since, "created_by": "person-0", "reason": "list"}
    copy(CostRate(id=n + 1, pool_id=n + 1, nanos_per_slot_hour=2 * EUR + n, **told) for n in range(POOLS))
    served = {(class_slug(n - n % 3 + step), n % MODELS) for n in range(POOLS) for step in (0, 2)}
    copy(
        RateCard(
            id=i + 1, class_slug=slug, model_id=model + 1, prompt_nanos_per_mtok=EUR, cached_nanos_per_mtok=0,
            output_nanos_per_mtok=4 * EUR, **told,
        )
        for i, (slug, model) in enumerate(sorted(served))
    )  # fmt: skip


def publish(now: datetime) -> None:
    """All of it as revision 1, signed (by nobody's key) and told to every agent."""
    push(actor=Actor.system("bench"), reason="the first", now=now)
    PolicyBundle.objects.update(signature=b"\0" * 64, kid="none", signed_at=now)
    Wave.objects.update(state=Wave.State.SENT, sent_at=now)
    Delivery.objects.update(state=Delivery.State.ACKED, sent_at=now, answered_at=now)
    Rollout.objects.update(state=Rollout.State.DONE)


def promises(contracts: int, tenants: int, now: datetime) -> None:
    copy(
        Contract(
            id=n + 1, slug=f"contract-{n:04}", name=f"Promise {n}", workload_class_id=n % CLASSES + 1,
            tenant_id=n % tenants + 1 if n % 5 else None, created_at=now,
        )
        for n in range(contracts)
    )  # fmt: skip
    copy(
        ContractVersion(
            id=n * 2 + number + 1, contract_id=n + 1, number=number + 1, target_ppm=990_000, threshold_ms=800,
            effective_from=now - timedelta(days=90 - 60 * number), created_by="person-0", created_at=now,
        )
        for n in range(contracts)
        for number in range(2)
    )  # fmt: skip


def kept(contracts: int, now: datetime) -> None:
    """An hour of requests by minute for nine contracts of ten; most keep what they promise, some burn."""
    minute = now.replace(second=0, microsecond=0)
    copy(
        ObjectiveMinute(
            contract_version_id=n * 2 + 2, pool_id=n % POOLS + 1, minute=minute - timedelta(minutes=back), offered=600,
            admitted=600, successful=600, good=600 - (n % 40 if n % 25 == 0 else n % 3),
            bad={"slow": n % 40 if n % 25 == 0 else n % 3},
        )
        for n in range(contracts)
        if n % 10
        for back in range(MINUTES_KEPT)
    )  # fmt: skip


def log(entries: int, tenants: int, now: datetime) -> None:
    """Entries without a chain: the lists show them, nobody verifies them."""
    actions = (("tenant.edit", "tenant"), ("key.create", "key"), ("key.revoke", "key"), ("budget.edit", "budget"))
    copy(
        AuditEntry(
            id=n + 1, at=now - timedelta(seconds=entries - n), actor_id=1, actor_name=f"person-{n % 60 * 50}",
            actor_role="admin", action=actions[n % 4][0], noun=actions[n % 4][1],
            object_id=tenant_slug(n * 31 % tenants), tenant_slug=tenant_slug(n * 31 % tenants),
            before={"weight": n % 7}, after={"weight": n % 9}, reason=f"reason {n}", request_id=f"request-{n // 3}",
            previous_hash=hashlib.sha256(b"%d" % n).digest(), hash=hashlib.sha256(b"%d" % (n + 1)).digest(),
        )
        for n in range(entries)
    )  # fmt: skip


def work(jobs: int, tenants: int, now: datetime) -> None:
    copy(
        Job(
            id=n + 1, tenant_id=n % tenants + 1, workload_class_id=3, pool_id=n % POOLS + 1, name=f"night {n}",
            items=100, items_completed=100 if n % 20 else 40, prompt_tokens=500, expected_output_tokens=200,
            deadline=now + timedelta(hours=n % 48 - 2), state="completed" if n % 20 else "running",
            created_by=f"service {n}", created_at=now - timedelta(minutes=jobs - n),
        )
        for n in range(jobs)
    )  # fmt: skip


def alerts(count: int, now: datetime) -> None:
    copy(
        Alert(
            id=n + 1, key=f"burn:{n}", kind="burn", severity="page" if n % 3 else "ticket", grade="bad", word="Burning",
            group=f"contract-{n % 100:04}", contract=f"contract-{n % 100:04}", title=f"contract-{n % 100:04} burns",
            raised_at=now - timedelta(minutes=count - n), seen_at=now,
            resolved_at=None if n % 40 == 0 else now,
        )
        for n in range(count)
    )  # fmt: skip
