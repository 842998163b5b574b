"""What may be done to pools, slots, agents and enrolment tokens: lock, load, decide, apply, audit, in one transaction.

Bands, floors, classes and the flex policy act when policy is pushed; a drain acts with the agent's next report, a
retirement at once.
"""

import hashlib
import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import F

from controlplane.audit.actions import changes, record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.fleet import ownership
from controlplane.fleet.models import Agent, EnrolmentToken, Pool, ServedModel, Slot
from controlplane.fleet.pool_rules import check_bands, check_pool
from controlplane.fleet.served_classes import served_classes
from controlplane.fleet.slugs import check_slug
from controlplane.tenants.actions import Stale
from controlplane.wakeups.bells import ring

TOKEN_LIFETIME = timedelta(hours=1)
TOKEN_PREFIX = "fbe_"  # noqa: S105 - how a token begins, not a secret
SLOTS_MOST = 10_000

POOL_FIELDS = (
    "name", "gpu_type", "isolation", "interactive_class", "batch_class", "idle_policy", "lend_price_share_ppm",
    "fairness_unit", "prompt_weight", "output_weight", "size_bounds_gpu_ms", "aging_s", "reserve_after_ms",
    "prefill_us_per_token", "decode_us_per_token", "max_batch_size", "max_batch_wait_ms", "safe_rate", "lend_p95_ms",
    "lend_hold_s", "load_limit", "lend_slack", "return_slack", "return_hold_s", "min_hold_s", "drain_bound_s",
    "grant_ttl_s", "cooldown_s", "decision_interval_s", "max_lent", "spillover_per_week", "spillover_action",
    "demo_values",
)  # fmt: skip
SLOT_FIELDS = ("band", "places", "kv_tokens", "gpu_share_ppm")


# ---- pools ----


def create_pool(
    *, slug: str, model: str, values: Mapping[str, Any], actor: Actor, now: datetime, reason: str = ""
) -> Pool:
    """A new pool for a model (made known by name if it is not yet). `values`: any of POOL_FIELDS.

    Raises ValidationError by field.
    """
    check_slug(slug)
    with transaction.atomic():
        pool = Pool(slug=slug, model=_served_model(model), created_at=now, updated_at=now)
        _assign(pool, values, POOL_FIELDS)
        if not pool.name:
            pool.name = slug
        _clean_pool(pool)
        check_pool(pool, (), served_classes())
        pool.save(force_insert=True)
        record(
            actor=actor, action="pool.create", noun="pool", object_id=slug, now=now, after=_pool_values(pool),
            reason=reason,
        )  # fmt: skip
    return pool


def edit_pool(
    *, slug: str, values: Mapping[str, Any], actor: Actor, now: datetime, reason: str, version: int | None = None
) -> Pool:
    """Changes any of POOL_FIELDS. Slots that are home change owner when isolation or a class changes.

    Raises ValidationError by field, Stale when `version` is not the present one.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        pool = locked_pool(slug, version)
        before = _pool_values(pool)
        _assign(pool, values, POOL_FIELDS)
        _clean_pool(pool)
        slots = _slots_in_the_fleet(pool)
        check_pool(pool, [slot.band for slot in slots], served_classes())
        check_bands(pool, [slot.band for slot in slots], served_classes())
        changed_before, changed_after = changes(before, _pool_values(pool))
        if not changed_after:
            return pool
        pool.updated_at = now
        pool.version += 1
        pool.save(update_fields=[*POOL_FIELDS, "updated_at", "version"])
        for slot in slots:
            ownership.change_owner(slot, ownership.home_class(pool, slot.band), now=now, reason="pool_edited")
        record(
            actor=actor, action="pool.edit", noun="pool", object_id=slug, now=now, before=changed_before,
            after=changed_after, reason=reason,
        )  # fmt: skip
    return pool


def archive_pool(*, slug: str, actor: Actor, now: datetime, reason: str, version: int | None = None) -> Pool:
    """Takes a pool out of use. Refused while it has slots or agents."""
    reason = checked_reason(reason)
    with transaction.atomic():
        pool = locked_pool(slug, version)
        slots = len(_slots_in_the_fleet(pool))
        agents = Agent.objects.filter(pool=pool).exclude(state=Agent.State.RETIRED).count()
        if slots or agents:
            raise ValidationError(
                f"The pool still has {slots} slots and {agents} agents. Retire its agents and remove its slots first.",
                code="pool_in_use",
            )
        pool.archived_at, pool.updated_at, pool.version = now, now, pool.version + 1
        pool.save(update_fields=["archived_at", "updated_at", "version"])
        record(
            actor=actor, action="pool.archive", noun="pool", object_id=slug, now=now,
            before={"archived_at": None}, after={"archived_at": now}, reason=reason,
        )  # fmt: skip
    return pool


def locked_pool(slug: str, version: int | None = None) -> Pool:
    """The pool in use, locked. Raises Pool.DoesNotExist, Stale for another version."""
    pool = Pool.objects.select_for_update(of=("self",)).select_related("model").get(slug=slug, archived_at=None)
    _check_version(pool, version)
    return pool


# ---- slots ----


def add_slots(
    *,
    pool_slug: str,
    names: list[str],
    band: str,
    actor: Actor,
    now: datetime,
    places: int = 4,
    kv_tokens: int = 60_000,
    gpu_share_ppm: int = 1_000_000,
    reason: str = "",
) -> list[Slot]:
    """Adds slots of one kind; their tenure and cost begin now. A slot that was removed comes back by its name.

    Raises ValidationError by field.
    """
    values = {"band": band, "places": places, "kv_tokens": kv_tokens, "gpu_share_ppm": gpu_share_ppm}
    with transaction.atomic():
        pool = locked_pool(pool_slug)
        present = _slots_in_the_fleet(pool)
        _check_names(names, present)
        known = {slot.name: slot for slot in Slot.objects.select_for_update().filter(pool=pool, name__in=names)}
        slots = [known.get(name) or Slot(pool=pool, name=name) for name in names]
        for slot in slots:
            _assign(slot, values, SLOT_FIELDS)
            slot.removed_at = None
            _clean_slot(slot)
        check_bands(pool, [slot.band for slot in [*present, *slots]], served_classes(), growing=True)
        for slot in slots:
            slot.version = slot.version + 1 if slot.pk else 1
            slot.save()
            ownership.begin_tenure(slot, pool, now=now, reason="added")
        record(
            actor=actor, action="slot.add", noun="pool", object_id=pool.slug, now=now,
            after={"slots": names, **values}, reason=reason,
        )  # fmt: skip
    return slots


def edit_slot(
    *,
    slot_id: int,
    values: Mapping[str, Any],
    actor: Actor,
    now: datetime,
    reason: str = "",
    version: int | None = None,
) -> Slot:
    """Changes band, places, KV tokens or GPU share. Another band needs the slot home.

    Raises ValidationError by field, Stale when `version` is not the present one.
    """
    with transaction.atomic():
        slot, pool = _locked_slot(slot_id, version)
        before = _slot_values(slot)
        _assign(slot, values, SLOT_FIELDS)
        _clean_slot(slot)
        changed_before, changed_after = changes(before, _slot_values(slot))
        if not changed_after:
            return slot
        if "band" in changed_after:
            _check_home(slot, "change its band")
            others = [other.band for other in _slots_in_the_fleet(pool) if other.pk != slot.pk]
            check_bands(pool, [*others, slot.band], served_classes())
        slot.version += 1
        slot.save(update_fields=[*SLOT_FIELDS, "version"])
        ownership.change_owner(slot, ownership.home_class(pool, slot.band), now=now, reason="band_changed")
        record(
            actor=actor, action="slot.edit", noun="pool", object_id=pool.slug, now=now,
            before={"slot": slot.name, **changed_before}, after={"slot": slot.name, **changed_after}, reason=reason,
        )  # fmt: skip
    return slot


def remove_slot(*, slot_id: int, actor: Actor, now: datetime, reason: str, version: int | None = None) -> Slot:
    """Takes a slot out of the fleet: tenure and cost end now. Needs the slot home."""
    reason = checked_reason(reason)
    with transaction.atomic():
        slot, pool = _locked_slot(slot_id, version)
        _check_home(slot, "remove it")
        others = [other.band for other in _slots_in_the_fleet(pool) if other.pk != slot.pk]
        check_bands(pool, others, served_classes())
        agent_id, slot.agent = slot.agent_id, None
        slot.removed_at, slot.version = now, slot.version + 1
        slot.save(update_fields=["agent", "removed_at", "version"])
        ownership.end_tenure(slot, now=now)
        record(
            actor=actor, action="slot.remove", noun="pool", object_id=pool.slug, now=now,
            before={"slot": slot.name, "agent": agent_id, **_slot_values(slot)}, reason=reason,
        )  # fmt: skip
    return slot


# ---- agents ----


def create_enrolment_token(*, pool: Pool, actor: Actor, now: datetime) -> tuple[EnrolmentToken, str]:
    """A token that enrols one agent into a pool within the hour. The secret is answered once and stored hashed."""
    if pool.archived_at is not None:
        raise ValidationError({"pool": f"The pool {pool.slug} is archived. Choose a pool in use."})
    secret = TOKEN_PREFIX + secrets.token_urlsafe(24)
    with transaction.atomic():
        row = EnrolmentToken.objects.create(
            prefix=secret[:12],
            token_hash=hashlib.sha256(secret.encode()).hexdigest(),
            pool=pool,
            created_by=actor.name,
            created_at=now,
            expires_at=now + TOKEN_LIFETIME,
        )
        record(
            actor=actor, action="enrolment_token.create", noun="enrolment_token", object_id=row.pk, now=now,
            after={"pool": pool.slug, "prefix": row.prefix, "expires_at": row.expires_at},
        )  # fmt: skip
    return row, secret


def approve_agent(*, agent_id: int, actor: Actor, now: datetime) -> Agent:
    """Lets a pending agent say hello. Approving an active agent again changes nothing."""
    with transaction.atomic():
        agent = _locked_agent(agent_id)
        if agent.state == Agent.State.RETIRED:
            raise ValidationError("The agent was retired. Enrol it again with a new token.", code="retired")
        if agent.state == Agent.State.ACTIVE:
            return agent
        agent.state = Agent.State.ACTIVE
        agent.save(update_fields=["state"])
        _record_agent(agent, "agent.approve", {"state": "pending"}, {"state": "active"}, actor, now)
        ring("policy.sweep")
    return agent


def request_drain(
    *, agent_id: int, actor: Actor, now: datetime, reason: str, noted: Mapping[str, Any] | None = None
) -> Agent:
    """The agent takes no new request from its next report on and finishes what it has. Asking twice changes nothing.

    `noted`, here and below, is kept in the audit entry: what the person was told to expect.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        agent = _locked_agent(agent_id)
        _check_in_use(agent)
        if agent.drain_requested_at is not None:
            return agent
        agent.drain_requested_at = now
        agent.save(update_fields=["drain_requested_at"])
        after = {"drain_requested_at": now, **(noted or {})}
        _record_agent(agent, "agent.drain", {"drain_requested_at": None}, after, actor, now, reason)
    return agent


def cancel_drain(
    *, agent_id: int, actor: Actor, now: datetime, reason: str, noted: Mapping[str, Any] | None = None
) -> Agent:
    """The agent serves again from its next report on."""
    reason = checked_reason(reason)
    with transaction.atomic():
        agent = _locked_agent(agent_id)
        _check_in_use(agent)
        if agent.drain_requested_at is None:
            return agent
        before = {"drain_requested_at": agent.drain_requested_at}
        agent.drain_requested_at = None
        agent.save(update_fields=["drain_requested_at"])
        after = {"drain_requested_at": None, **(noted or {})}
        _record_agent(agent, "agent.undrain", before, after, actor, now, reason)
    return agent


def retire_agent(*, agent_id: int, actor: Actor, now: datetime, reason: str) -> Agent:
    """Ends an agent for good: it is refused from now on, its slots' tenures end and the slots are free for another.

    Its key is kept, so that what it spooled can be told apart. Retiring twice changes nothing.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        agent = _locked_agent(agent_id)
        if agent.state == Agent.State.RETIRED:
            return agent
        before = {"state": agent.state, "retired_at": None}
        slots = list(Slot.objects.select_for_update().filter(agent=agent).order_by("id"))
        for slot in slots:
            ownership.end_tenure(slot, now=now)
        Slot.objects.filter(pk__in=[slot.pk for slot in slots]).update(agent=None, version=F("version") + 1)
        agent.state, agent.retired_at = Agent.State.RETIRED, now
        agent.save(update_fields=["state", "retired_at"])
        after = {"state": "retired", "retired_at": now, "slots": [slot.name for slot in slots]}
        _record_agent(agent, "agent.retire", before, after, actor, now, reason)
        ring("policy.sweep")
    return agent


# ---- parts ----


def _served_model(name: str) -> ServedModel:
    name = name.strip()
    if not name or len(name) > 120:
        raise ValidationError({"model": "Enter the model's name as requests give it, at most 120 characters."})
    return ServedModel.objects.get_or_create(name=name)[0]


def _assign(row: Pool | Slot, values: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise ValidationError(dict.fromkeys(unknown, "This cannot be set here."))
    for name, value in values.items():
        setattr(row, name, value)


def _clean_pool(pool: Pool) -> None:
    # an empty table or list is a value here, which full_clean takes for a missing one
    empty = {name for name in ("safe_rate", "size_bounds_gpu_ms") if not getattr(pool, name)}
    pool.full_clean(exclude=empty, validate_constraints=False)


def _pool_values(pool: Pool) -> dict[str, Any]:
    return {"model": pool.model.name, **{name: getattr(pool, name) for name in POOL_FIELDS}}


def _slot_values(slot: Slot) -> dict[str, Any]:
    return {name: getattr(slot, name) for name in SLOT_FIELDS}


def _check_version(row: Pool | Slot, version: int | None) -> None:
    if version is not None and row.version != version:
        raise Stale(row)


def _check_names(names: list[str], present: list[Slot]) -> None:
    taken = sorted({slot.name for slot in present} & set(names))
    if taken:
        raise ValidationError({"names": f"The pool has a slot {taken[0]} already. Choose another name."})
    if not names or len(set(names)) < len(names):
        raise ValidationError({"names": "Enter each name once, at least one."})
    if len(names) + len(present) > SLOTS_MOST:
        raise ValidationError({"names": f"A pool has at most {SLOTS_MOST} slots."})


def _clean_slot(slot: Slot) -> None:
    slot.full_clean(exclude=["pool", "agent"], validate_unique=False, validate_constraints=False)
    if slot.places < 1:
        raise ValidationError({"places": "A slot runs at least one request at a time: enter 1 or more."})
    if slot.kv_tokens < 1:
        raise ValidationError({"kv_tokens": "Enter the tokens that the slot's KV memory holds, 1 or more."})
    if slot.gpu_share_ppm < 1:
        raise ValidationError({"gpu_share_ppm": "Enter the slot's GPUs in millionths, 1,000,000 for a whole one."})


def _slots_in_the_fleet(pool: Pool) -> list[Slot]:
    return list(Slot.objects.filter(pool=pool, removed_at__isnull=True).order_by("name"))


def _locked_slot(slot_id: int, version: int | None) -> tuple[Slot, Pool]:
    # the pool first, as everywhere: its row orders changes of its bands
    pool_slug = Slot.objects.values_list("pool__slug", flat=True).get(pk=slot_id, removed_at__isnull=True)
    pool = locked_pool(pool_slug)
    slot = Slot.objects.select_for_update(of=("self",)).get(pk=slot_id, removed_at__isnull=True)
    _check_version(slot, version)
    return slot, pool


def _check_home(slot: Slot, doing: str) -> None:
    present = ownership.open_interval(slot)
    if present is not None and present.state not in (ownership.HOME, "lost"):
        raise ValidationError(
            {"band": f"Slot {slot.name} is {present.state}. Recall it and wait until it is home, then {doing}."},
            code="slot_not_home",
        )


def _locked_agent(agent_id: int) -> Agent:
    return Agent.objects.select_for_update(of=("self",), no_key=True).select_related("pool").get(pk=agent_id)


def _check_in_use(agent: Agent) -> None:
    if agent.state == Agent.State.RETIRED:
        raise ValidationError("The agent was retired; there is nothing to drain.", code="retired")


def _record_agent(
    agent: Agent,
    action: str,
    before: dict[str, Any],
    after: dict[str, Any],
    actor: Actor,
    now: datetime,
    reason: str = "",
) -> None:
    record(
        actor=actor, action=action, noun="agent", object_id=agent.pk, now=now,
        before={"agent": agent.name, **before}, after={"agent": agent.name, **after}, reason=reason,
    )  # fmt: skip
