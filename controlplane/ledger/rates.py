"""Cost rates and rate cards: versions with effective dates, added and never changed.

A rate card is part of policy: agents reserve and charge by the version in force at a request's arrival, which they know
from the revision they apply. So a new card begins no earlier than now, and reaches agents when policy is pushed.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.audit.actions import changes, record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.core.period import load_zone, parse_period
from controlplane.fleet.models import Pool, ServedModel
from controlplane.ledger.models import CostRate, Period, RateCard
from controlplane.tenants.actions import Stale
from controlplane.tenants.models import Installation

PPM = 1_000_000
# A thousand million currency units an hour or a million tokens: more is a slip of the keyboard.
PRICE_MOST_NANOS = 10**15

CARD_FIELDS = (
    "prompt_nanos_per_mtok", "cached_nanos_per_mtok", "output_nanos_per_mtok", "gpu_nanos_per_slot_hour",
    "discount_ppm",
)  # fmt: skip


def add_cost_rate(
    *,
    pool_slug: str,
    nanos_per_slot_hour: int,
    actor: Actor,
    now: datetime,
    reason: str,
    effective_from: datetime | None = None,
    previous_id: int | None = None,
) -> CostRate:
    """What a slot-hour of the pool costs from an instant on (now without one).

    An instant that has passed is allowed: attribution runs again for open hours since then and posts the difference.
    `previous_id`: the newest rate that the person saw; another one raises Stale.
    Raises ValidationError by field.
    """
    reason = checked_reason(reason)
    _check_price("nanos_per_slot_hour", nanos_per_slot_hour)
    starts = effective_from or now
    with transaction.atomic():
        _check_open(starts)
        pool = Pool.objects.select_for_update(of=("self",)).filter(slug=pool_slug).first()
        if pool is None:
            raise ValidationError({"pool": f"There is no pool {pool_slug!r}. Choose one of the list."})
        rates = CostRate.objects.filter(pool=pool)
        newest = rates.order_by("-effective_from").first()
        _check_seen(newest, previous_id)
        if rates.filter(effective_from=starts).exists():
            raise ValidationError({"effective_from": "A rate begins at this very instant already. Choose another."})
        row = CostRate.objects.create(
            pool=pool, nanos_per_slot_hour=nanos_per_slot_hour, effective_from=starts, created_at=now,
            created_by=actor.name, reason=reason,
        )  # fmt: skip
        record(
            actor=actor, action="cost_rate.add", noun="cost_rate", object_id=pool.slug, now=now,
            before={"nanos_per_slot_hour": newest.nanos_per_slot_hour} if newest else None,
            after={"nanos_per_slot_hour": nanos_per_slot_hour, "effective_from": starts}, reason=reason,
        )  # fmt: skip
    return row


def _check_open(starts: datetime) -> None:
    """A price never moves a closed month: its hours keep the rates that it was closed with."""
    zone = load_zone(Installation.objects.values_list("billing_zone", flat=True).get(pk=1))
    closed = Period.objects.filter(state=Period.State.CLOSED).order_by("-name").values_list("name", flat=True).first()
    if closed is not None and starts < parse_period(zone, closed).end:
        raise ValidationError(
            {"effective_from": f"{closed} is closed. Choose an instant after it, or have the month reopened first."}
        )


def add_rate_card(
    *,
    class_slug: str,
    model: str,
    values: Mapping[str, int],
    actor: Actor,
    now: datetime,
    reason: str,
    effective_from: datetime | None = None,
    previous_id: int | None = None,
) -> RateCard:
    """What tenants pay for a class and model from an instant on.

    `values`: any of CARD_FIELDS; the rest stays as it was on the newest card.
    Raises ValidationError by field, Stale when `previous_id` is not the newest card.
    """
    reason = checked_reason(reason)
    starts = effective_from or now
    with transaction.atomic():
        served = ServedModel.objects.select_for_update().filter(name=model).first()
        if served is None:
            raise ValidationError({"model": f"No pool serves a model {model!r}. Choose one of the list."})
        cards = RateCard.objects.filter(class_slug=class_slug, model=served)
        newest = cards.order_by("-effective_from").first()
        _check_seen(newest, previous_id)
        _check_start(starts, newest, now)
        before = {name: getattr(newest, name) for name in CARD_FIELDS} if newest else {}
        after = _card_values({**before, **values})
        changed_before, changed_after = changes(before, after)
        if newest is not None and not changed_after:
            raise ValidationError("Nothing differs from the card before. Change a price or leave it as it is.")
        row = RateCard.objects.create(
            class_slug=class_slug, model=served, effective_from=starts, created_at=now, created_by=actor.name,
            reason=reason, **after,
        )  # fmt: skip
        record(
            actor=actor, action="rate_card.add", noun="rate_card", object_id=row.pk, now=now,
            before={"class": class_slug, "model": model, **changed_before} if newest else None,
            after={"class": class_slug, "model": model, "effective_from": starts, **changed_after}, reason=reason,
        )  # fmt: skip
    return row


def _card_values(values: Mapping[str, Any]) -> dict[str, int]:
    unknown = sorted(set(values) - set(CARD_FIELDS))
    if unknown:
        raise ValidationError(dict.fromkeys(unknown, "This cannot be set here."))
    missing = {"prompt_nanos_per_mtok", "output_nanos_per_mtok"} - set(values)
    if missing:
        raise ValidationError(dict.fromkeys(sorted(missing), "Enter a price; 0 is allowed."))
    filled = {
        "cached_nanos_per_mtok": values["prompt_nanos_per_mtok"],
        "gpu_nanos_per_slot_hour": 0,
        "discount_ppm": 0,
        **values,
    }
    for name, value in filled.items():
        if name != "discount_ppm":
            _check_price(name, value)
    if not 0 <= filled["discount_ppm"] <= PPM:
        raise ValidationError({"discount_ppm": "Enter a discount from 0 to 100 %."})
    if filled["cached_nanos_per_mtok"] > filled["prompt_nanos_per_mtok"]:
        raise ValidationError(
            {"cached_nanos_per_mtok": "A cached prompt token cannot cost more than one that is computed."}
        )
    return filled


def _check_start(starts: datetime, newest: RateCard | None, now: datetime) -> None:
    if newest is None:
        return
    if starts < now:
        raise ValidationError(
            {"effective_from": "Choose an instant that has not passed: requests since then were charged already."}
        )
    if starts <= newest.effective_from:
        raise ValidationError(
            {
                "effective_from": f"The newest card begins at {newest.effective_from:%Y-%m-%d %H:%M} UTC. Choose a"
                " later instant."
            }
        )


def _check_price(field: str, nanos: int) -> None:
    if isinstance(nanos, bool) or not isinstance(nanos, int) or not 0 <= nanos <= PRICE_MOST_NANOS:
        raise ValidationError({field: "Enter a price of 0 or more, at most 1,000,000 with nine decimals."})


def _check_seen(newest: CostRate | RateCard | None, previous_id: int | None) -> None:
    if previous_id is not None and (newest is None or newest.pk != previous_id):
        raise Stale(newest)
