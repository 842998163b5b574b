"""The demo organisation: made through the actions that the pages call; a second start only adds what is missing.

The fleet is a simulated one: eight slots of a 70B model on H100s that lend two of them, and two agents of a smaller
pool whose classes share every slot.
"""

import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from django.db import transaction

from controlplane.audit.actors import Actor
from controlplane.budgets.actions import create_budget
from controlplane.budgets.models import Budget
from controlplane.contracts.actions import create_class, create_contract, edit_class
from controlplane.contracts.models import Contract, WorkloadClass
from controlplane.core.money import parse_nanos
from controlplane.demo.plan import write_json
from controlplane.demo.shape import (
    BIG_MODEL,
    BIG_POOL,
    BULK,
    CHAT,
    DECODE_US,
    PLACES,
    PREFILL_US,
    SMALL_MODEL,
    SMALL_POOL,
    Bounds,
)
from controlplane.fleet.actions import add_slots, create_enrolment_token, create_pool, retire_agent
from controlplane.fleet.models import Agent, Pool, Slot
from controlplane.ledger import rates
from controlplane.tenants.actions import create_tenant
from controlplane.tenants.key_actions import create_key
from controlplane.tenants.member_actions import create_member, set_password
from controlplane.tenants.models import ApiKey, Member, Tenant

ACTOR = Actor.system("demo")
REASON = "demo organisation"
KV_TOKENS = 240_000


class Seeded(msgspec.Struct):
    """What the supervisor needs next. Secrets are kept in files that only their owner reads."""

    enrolment_tokens: dict[str, str]
    enrolled: dict[str, str]
    """Ids of the agents in use, by name."""
    keys: dict[str, str]
    logins: dict[str, str]


TENANTS = (
    # slug, name, weight, most at once, classes
    ("acme", "Acme Support", 3, 64, (CHAT, BULK)),
    ("globex", "Globex Search", 2, 64, (CHAT, BULK)),
    ("initech", "Initech Desk", 1, 32, (CHAT,)),
    ("hooli", "Hooli Documents", 1, 96, (BULK,)),
)
BUDGETS = (
    ("acme", "acme month", "6000", True),
    ("globex", "globex month", "4000", True),
    ("initech", "initech month", "400", False),
    ("hooli", "hooli month", "2500", True),
)
PEOPLE = (
    ("admin", "admin", ""),
    ("finance", "finance", ""),
    ("oncall", "oncall", ""),
    ("viewer", "viewer", ""),
    ("acme-member", "tenant", "acme"),
)


def seed(
    *,
    agents: list[tuple[str, str]],
    folder: Path,
    bounds: Bounds,
    now: datetime,
    here: Mapping[str, str] | None = None,
) -> Seeded:
    """Makes what is missing. `agents` are (name, pool) of the fleet; those not enrolled yet get a token.

    `here` are the ids of agents by name whose state is there to go on with; other agents of the fleet are retired, for
    nobody has their keys, and make room for new ones of their names.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _classes(bounds, now)
    for slug, name, weight, most, classes in TENANTS:
        if not Tenant.objects.filter(slug=slug).exists():
            create_tenant(
                slug=slug, name=name, weight=weight, max_concurrency=most, classes=list(classes), actor=ACTOR, now=now
            )
    with transaction.atomic():
        _rates(_pools(agents, now), now)
    _contracts(now)
    _budgets(now)
    if here is not None:
        _retire_lost([name for name, _ in agents], here, now)
    in_use = Agent.objects.exclude(state=Agent.State.RETIRED).values_list("name", "uuid")
    enrolled = {name: str(uuid) for name, uuid in in_use}
    return Seeded(
        enrolment_tokens=_tokens(agents, enrolled, now),
        enrolled=enrolled,
        keys=_secrets(folder / "keys.json", lambda known: _keys(known, now)),
        logins=_secrets(folder / "logins.json", lambda known: _people(known, now)),
    )


def _classes(bounds: Bounds, now: datetime) -> None:
    chat = {
        "name": "Chat",
        "priority": 10,
        "max_prompt_tokens": bounds.prompt_tokens + 1_024,
        "max_output_tokens": bounds.output_tokens,
        "default_output_tokens": min(256, bounds.output_tokens),
        "max_queue": 64,
        "max_wait_ms": 2_000,
        "overload": "reject",
        "retry_safe": False,
        "cancellable": True,
    }
    bulk = {
        "name": "Bulk documents",
        "priority": 100,
        "max_prompt_tokens": bounds.prompt_tokens + 1_024,
        "max_output_tokens": bounds.output_tokens,
        "default_output_tokens": min(256, bounds.output_tokens),
        "max_queue": 256,
        "max_wait_ms": 600_000,
        "overload": "queue",
        "retry_safe": True,
        "cancellable": True,
        "default_deadline_s": 4 * 3_600,
        "min_share_ppm": 0,
    }
    for slug, kind, values in ((CHAT, "interactive", chat), (BULK, "batch", bulk)):
        row = WorkloadClass.objects.filter(slug=slug).first()
        if row is None:
            create_class(slug=slug, kind=kind, values=values, actor=ACTOR, now=now, reason=REASON)
            continue
        limits = {name: values[name] for name in ("max_prompt_tokens", "max_output_tokens", "default_output_tokens")}
        if any(getattr(row, name) < limit for name, limit in limits.items()):
            edit_class(slug=slug, values=limits, actor=ACTOR, now=now, reason="bounds of the replayed trace")


def _pools(agents: list[tuple[str, str]], now: datetime) -> set[str]:
    """Makes the pools that the agents need; returns those that are new and have no prices yet."""
    new = {pool for _, pool in agents if not Pool.objects.filter(slug=pool).exists()}
    measured = now.date().isoformat() + "T00:00:00Z"  # as the form writes it: saving the pool again is no change
    valid = now.replace(year=now.year + 1, day=min(now.day, 28)).date().isoformat() + "T00:00:00Z"
    safe_rate = {
        "entries": {"4": 14.0, "5": 17.5, "6": 21.0},
        "measured_at": measured,
        "trace": "demo",
        "valid_until": valid,
    }
    shared = {
        "gpu_type": "H100",
        "interactive_class": CHAT,
        "batch_class": BULK,
        "size_bounds_gpu_ms": [200, 2_000],
        "prefill_us_per_token": PREFILL_US,
        "decode_us_per_token": DECODE_US,
        "idle_policy": "usage",
    }
    if BIG_POOL in new:
        band = {
            "name": "Chat 70B",
            "isolation": "reserved",
            "safe_rate": safe_rate,
            "lend_price_share_ppm": 100_000,
            "lend_hold_s": 20,
            "cooldown_s": 15,
            "decision_interval_s": 5,
            "drain_bound_s": 10,
            "grant_ttl_s": 10,
            "spillover_per_week": 5_000,
            "demo_values": True,
        }
        create_pool(slug=BIG_POOL, model=BIG_MODEL, values={**shared, **band}, actor=ACTOR, now=now, reason=REASON)
        for names, where in (
            (["i1", "i2", "i3", "i4"], "interactive"),
            (["b1", "b2"], "batch"),
            (["f1", "f2"], "flex"),
        ):
            _slots(BIG_POOL, names, where, now)
    if SMALL_POOL in new:
        values = {**shared, "name": "Chat 8B", "isolation": "shared", "gpu_type": "A100"}
        create_pool(slug=SMALL_POOL, model=SMALL_MODEL, values=values, actor=ACTOR, now=now, reason=REASON)
    wanted = 2 * sum(1 for _, pool in agents if pool == SMALL_POOL)
    have = Slot.objects.filter(pool__slug=SMALL_POOL).count()
    if wanted > have:
        _slots(SMALL_POOL, [f"s{number}" for number in range(have + 1, wanted + 1)], "interactive", now)
    return new


def _slots(pool: str, names: list[str], band: str, now: datetime) -> None:
    add_slots(
        pool_slug=pool, names=names, band=band, places=PLACES, kv_tokens=KV_TOKENS, actor=ACTOR, now=now, reason=REASON
    )


PRICES = (
    # pool, slot-hour, model, prompt, cached and output per million tokens
    (BIG_POOL, "2.50", BIG_MODEL, "1.40", "0.26", "4.40"),
    (SMALL_POOL, "1.40", SMALL_MODEL, "0.20", "0.05", "0.60"),
)


def _rates(pools: set[str], now: datetime) -> None:
    for pool, slot_hour, model, prompt, cached, output in PRICES:
        if pool not in pools:
            continue
        rates.add_cost_rate(
            pool_slug=pool, nanos_per_slot_hour=parse_nanos(slot_hour), actor=ACTOR, now=now, reason=REASON
        )
        for workload_class, discount in ((CHAT, 0), (BULK, 500_000)):
            values = {
                "prompt_nanos_per_mtok": parse_nanos(prompt),
                "cached_nanos_per_mtok": parse_nanos(cached),
                "output_nanos_per_mtok": parse_nanos(output),
                "discount_ppm": discount,
            }
            rates.add_rate_card(
                class_slug=workload_class, model=model, values=values, actor=ACTOR, now=now, reason=REASON
            )


def _contracts(now: datetime) -> None:
    ttft = {"objective": "latency", "metric": "ttft", "population": "offered", "window_s": 900}
    promises = (
        ("chat-ttft", "Chat starts streaming", "", {**ttft, "target_ppm": 950_000, "threshold_ms": 1_000}),
        ("chat-acme-queue", "Acme hardly waits", "acme", {
            **ttft, "metric": "queue_wait", "target_ppm": 950_000, "threshold_ms": 500, "load_limit_per_s": 30.0,
        }),
    )  # fmt: skip
    for slug, name, tenant, values in promises:
        if not Contract.objects.filter(slug=slug).exists():
            create_contract(
                slug=slug, name=name, class_slug=CHAT, tenant_slug=tenant, values=values, actor=ACTOR, now=now,
                reason=REASON,
            )  # fmt: skip


def _budgets(now: datetime) -> None:
    for slug, name, limit, hard in BUDGETS:
        tenant = Tenant.objects.get(slug=slug)
        if not Budget.objects.filter(tenant=tenant).exists():
            create_budget(
                tenant_id=tenant.pk, name=name, limit_nanos=parse_nanos(limit), hard=hard, zone="Europe/Berlin",
                reason=REASON, actor=ACTOR, now=now,
            )  # fmt: skip


def _retire_lost(names: Sequence[str], here: Mapping[str, str], now: datetime) -> None:
    for agent in Agent.objects.filter(name__in=names).exclude(state=Agent.State.RETIRED):
        if here.get(agent.name) != str(agent.uuid):
            retire_agent(agent_id=agent.pk, actor=ACTOR, now=now, reason="Its state folder is gone: another enrols.")


def _tokens(agents: list[tuple[str, str]], enrolled: Container[str], now: datetime) -> dict[str, str]:
    """One-time tokens of the agents that have not enrolled."""
    tokens = {}
    for name, pool in agents:
        if name not in enrolled:
            _, tokens[name] = create_enrolment_token(pool=Pool.objects.get(slug=pool), actor=ACTOR, now=now)
    return tokens


def _secrets(file: Path, make: Callable[[dict[str, str]], dict[str, str]]) -> dict[str, str]:
    """Secrets by name from their file; those that are not known are made anew and kept there."""
    known: dict[str, str] = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    made = make(known)
    if made:
        known |= made
        write_json(file, known)
    return known


def _keys(known: dict[str, str], now: datetime) -> dict[str, str]:
    made = {}
    for slug, _, _, _, classes in TENANTS:
        tenant = Tenant.objects.get(slug=slug)
        if slug not in known or not ApiKey.objects.filter(tenant=tenant, name="demo traffic").exists():
            issued = create_key(
                tenant_id=tenant.pk, name="demo traffic", classes=list(classes), default_class=classes[0], actor=ACTOR,
                now=now, reason=REASON,
            )  # fmt: skip
            made[slug] = issued.secret or ""
    return made


def _people(known: dict[str, str], now: datetime) -> dict[str, str]:
    made = {}
    for username, role, tenant in PEOPLE:
        member = Member.objects.filter(user__username=username).first()
        if member is not None and username in known:
            continue
        password = f"{secrets.choice(WORDS)}-{secrets.choice(WORDS)}-{secrets.randbelow(9_000) + 1_000}"
        if member is not None:
            set_password(user_id=member.user_id, password=password, actor=ACTOR, now=now)
        else:
            create_member(
                username=username, password=password, role=role, actor=ACTOR, now=now,
                tenant_id=Tenant.objects.get(slug=tenant).pk if tenant else None,
            )  # fmt: skip
        made[username] = password
    return made


WORDS = (
    "amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron", "indigo", "juniper", "kestrel", "linden",
    "maple", "nectar", "orchid", "pebble", "quartz", "raven", "saffron", "tundra", "umber", "violet", "willow",
)  # fmt: skip
