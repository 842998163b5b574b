"""Tables that finance keeps for matching invoices: what a pool is called on them, and planned exchange rates."""

from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal, InvalidOperation

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controlplane.audit.actions import changes, record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.fleet.models import Pool
from controlplane.ledger.models import PlannedExchangeRate, PoolSku

TEXTS = ("provider", "account", "sku", "region")
CHARS_MOST = 200
NUMBER_MOST = Decimal(10) ** 9


def set_pool_sku(*, pool: str, values: Mapping[str, str], actor: Actor, now: datetime, reason: str) -> PoolSku:
    """What a pool's slots are called on the invoice. Raises ValidationError by field."""
    reason = checked_reason(reason)
    after: dict[str, object] = {name: values.get(name, "").strip() for name in TEXTS}
    for name in TEXTS:
        if len(str(after[name])) > CHARS_MOST:
            raise ValidationError({name: f"Use at most {CHARS_MOST} characters."})
    if not after["sku"]:
        raise ValidationError({"sku": "Enter the SKU that stands on the invoice's lines."})
    after["units_per_slot_hour"] = _number(values.get("units_per_slot_hour") or "1", "units_per_slot_hour", places=10)
    with transaction.atomic():
        row = Pool.objects.select_for_update(of=("self",)).filter(slug=pool).first()
        if row is None:
            raise ValidationError({"pool": f"There is no pool {pool[:63]!r}. Choose one of the list."})
        known = PoolSku.objects.filter(pool=row).first()
        before = {name: getattr(known, name) for name in after} if known else {}
        found, _ = PoolSku.objects.update_or_create(
            pool=row,
            defaults={
                **after, "updated_at": now, "updated_by": actor.name, "version": known.version + 1 if known else 1,
            },
        )  # fmt: skip
        was, became = changes(before, after)
        if became:
            record(
                actor=actor, action="pool_sku.set", noun="pool_sku", object_id=row.slug, now=now,
                before=was if known else None, after=became, reason=reason,
            )  # fmt: skip
    return found


def add_planned_rate(
    *, currency: str, rate: str, effective_from: date, actor: Actor, now: datetime, reason: str
) -> PlannedExchangeRate:
    """The exchange rate that the book plans with from a day on; added, never changed. Raises ValidationError."""
    reason = checked_reason(reason)
    currency = currency.strip().upper()
    if len(currency) != 3 or not currency.isascii() or not currency.isalpha():
        raise ValidationError({"currency": "Enter a currency of three letters, such as USD."})
    number = _number(rate, "rate", places=15)
    try:
        with transaction.atomic():
            row = PlannedExchangeRate.objects.create(
                currency=currency, rate=number, effective_from=effective_from, created_at=now, created_by=actor.name
            )
            record(
                actor=actor, action="planned_rate.add", noun="planned_rate", object_id=f"{currency} {effective_from}",
                now=now, after={"rate": f"{number:f}"}, reason=reason,
            )  # fmt: skip
    except IntegrityError:
        raise ValidationError({"effective_from": "A planned rate begins on this day already."}) from None
    return row


def _number(text: str, field: str, *, places: int) -> Decimal:
    try:
        number = Decimal(str(text).strip())
    except InvalidOperation:
        number = Decimal(0)
    exponent = number.as_tuple().exponent
    if not number.is_finite() or not 0 < number < NUMBER_MOST or not isinstance(exponent, int) or -exponent > places:
        raise ValidationError({field: f"Enter a number over 0 with at most {places} decimals, such as 1.5."})
    return number
