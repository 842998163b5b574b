"""What a person, or an alert, may do to a flex band: ask a slot back, freeze new loans, do both, let go again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.core.slot_states import BORROWED, SlotState
from controlplane.fleet.models import Pool, Slot
from controlplane.flex.models import Grant
from controlplane.tenants.actions import next_live_number
from controlplane.wakeups.bells import ring

FREEZE_DEFAULT = timedelta(hours=1)
FREEZE_MOST = timedelta(days=7)

_FREEZE_FIELDS = ["frozen_since", "frozen_until", "frozen_by", "freeze_reason", "live_number"]


def recall_slot(
    *, slot_id: int, actor: Actor, now: datetime, reason: str, noted: Mapping[str, Any] | None = None
) -> Grant:
    """Asks a lent slot back; the controller recalls it at its next tick. Asking twice changes nothing.

    `noted`, here and below, is kept in the audit entry: what the person was told to expect.

    Raises ValidationError when the reason is missing or the slot is not lent.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        grant = Grant.objects.select_for_update().select_related("slot__pool").filter(slot_id=slot_id).first()
        if grant is None or grant.state != SlotState.LENT:
            raise ValidationError({"slot": _not_lent(slot_id, grant)})
        if not grant.manual_recall:
            _ask_back([grant], actor, now, reason, noted)
    return grant


def freeze(
    *, pool_id: int, actor: Actor, now: datetime, reason: str, until: datetime | None = None,
    noted: Mapping[str, Any] | None = None,
) -> Pool:  # fmt: skip
    """No new loan in a pool until an instant (default one hour from now); loans run on. A new freeze replaces an old.

    Raises ValidationError when the reason is missing or the end is not within the next seven days.
    """
    reason = checked_reason(reason)
    until = now + FREEZE_DEFAULT if until is None else until
    if not now < until <= now + FREEZE_MOST:
        raise ValidationError({"until": "Choose an end that is ahead, and at most 7 days from now."})
    with transaction.atomic():
        return _freeze(pool_id, actor, now, reason, until, noted)


def freeze_and_recall(
    *, pool_id: int, actor: Actor, now: datetime, reason: str, until: datetime | None = None,
    noted: Mapping[str, Any] | None = None,
) -> Pool:  # fmt: skip
    """Freezes a pool and asks every lent slot back: the other button, and what a page-level burn does."""
    with transaction.atomic():
        pool = freeze(pool_id=pool_id, actor=actor, now=now, reason=reason, until=until, noted=noted)
        _ask_all_back(pool_id, actor, now, reason.strip())
    return pool


def unfreeze(*, pool_id: int, actor: Actor, now: datetime, reason: str, noted: Mapping[str, Any] | None = None) -> Pool:
    """Allows new loans again. Raises ValidationError when the reason is missing; an unfrozen pool stays as it is."""
    reason = checked_reason(reason)
    with transaction.atomic():
        pool = _locked_pool(pool_id)
        if pool.frozen_since is not None:
            _thaw(pool, "flex.unfreeze", actor, now, reason, noted)
    return pool


def end_expired_freezes(now: datetime) -> int:
    """Ends freezes whose time is over; returns how many. Safe to call from several processes."""
    expired = Pool.objects.filter(frozen_until__lte=now).values_list("pk", flat=True)
    ended = 0
    for pool_id in list(expired):
        with transaction.atomic():
            pool = Pool.objects.select_for_update(of=("self",)).get(pk=pool_id)
            if pool.frozen_until is not None and pool.frozen_until <= now:
                _thaw(pool, "flex.freeze_ended", Actor.system("controller"), now, "Its time is over.")
                ended += 1
    return ended


# ---- parts ----


def _not_lent(slot_id: int, grant: Grant | None) -> str:
    if grant is None:
        name = Slot.objects.filter(pk=slot_id).values_list("name", flat=True).first()
        return "There is no such slot." if name is None else f"{name} is not lent: there is nothing to recall."
    if grant.state in BORROWED:
        return f"{grant.slot.name} is on its way home already ({grant.state})."
    return f"{grant.slot.name} is not lent ({grant.state}): there is nothing to recall."


def _ask_all_back(pool_id: int, actor: Actor, now: datetime, reason: str) -> int:
    grants = list(
        Grant.objects.select_for_update(of=("self",))
        .select_related("slot__pool")
        .filter(slot__pool_id=pool_id, state=SlotState.LENT, manual_recall=False)
        .order_by("slot_id")
    )
    _ask_back(grants, actor, now, reason)
    return len(grants)


def _ask_back(
    grants: list[Grant], actor: Actor, now: datetime, reason: str, noted: Mapping[str, Any] | None = None
) -> None:
    for grant in grants:
        grant.manual_recall, grant.manual_recall_by = True, actor.name
        grant.save(update_fields=["manual_recall", "manual_recall_by"])
        record(
            actor=actor, action="flex.recall", noun="slot", object_id=grant.slot_id, now=now,
            before={"slot": grant.slot.name, "pool": grant.slot.pool.slug, "state": str(grant.state)},
            after={"manual_recall": True, "fence": grant.fence, **(noted or {})}, reason=reason,
        )  # fmt: skip


def _locked_pool(pool_id: int) -> Pool:
    pool = Pool.objects.select_for_update(of=("self",)).filter(pk=pool_id, archived_at__isnull=True).first()
    if pool is None:
        raise ValidationError({"pool": "There is no such pool, or it is archived."})
    return pool


def _freeze(
    pool_id: int, actor: Actor, now: datetime, reason: str, until: datetime, noted: Mapping[str, Any] | None
) -> Pool:
    pool = _locked_pool(pool_id)
    before = _frozen(pool)
    running = pool.frozen_since is not None and (pool.frozen_until is None or pool.frozen_until > now)
    pool.frozen_since = pool.frozen_since if running else now
    pool.frozen_until, pool.frozen_by, pool.freeze_reason = until, actor.name, reason
    _announce(pool)
    record(
        actor=actor, action="flex.freeze", noun="pool", object_id=pool.slug, now=now, before=before,
        after={**_frozen(pool), **(noted or {})}, reason=reason,
    )  # fmt: skip
    return pool


def _thaw(
    pool: Pool, action: str, actor: Actor, now: datetime, reason: str, noted: Mapping[str, Any] | None = None
) -> None:
    before = _frozen(pool)
    pool.frozen_since, pool.frozen_until, pool.frozen_by, pool.freeze_reason = None, None, "", ""
    _announce(pool)
    record(
        actor=actor, action=action, noun="pool", object_id=pool.slug, now=now, before=before,
        after={**_frozen(pool), **(noted or {})}, reason=reason,
    )  # fmt: skip


def _announce(pool: Pool) -> None:
    """A freeze acts at once: it is numbered, and signed for the agents."""
    pool.live_number = next_live_number()
    pool.save(update_fields=_FREEZE_FIELDS)
    ring("policy.sign_live")


def _frozen(pool: Pool) -> dict[str, object]:
    return {
        "frozen_since": pool.frozen_since,
        "frozen_until": pool.frozen_until,
        "frozen_by": pool.frozen_by,
        "freeze_reason": pool.freeze_reason,
    }
