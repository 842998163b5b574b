"""Provider invoices: a file is taken whole, once, or refused with the numbers of its lines."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Any, BinaryIO

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import QuerySet, Sum

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.core.period import Window, load_zone, parse_period
from controlplane.core.reconcile import InvoiceCategory
from controlplane.ledger.invoice_cells import DayOrder, DecimalMark
from controlplane.ledger.invoice_columns import CATEGORIES, COLUMN_FIELDS, ColumnMap
from controlplane.ledger.invoice_reading import (
    FileRefused,
    InvoiceRow,
    Reading,
    RefusedLine,
    open_text,
    read_rows,
    survey,
)
from controlplane.ledger.late_invoices import booked_since, closing_missed, lands_in
from controlplane.ledger.models import Invoice, InvoiceLine, InvoiceMapping
from controlplane.ledger.posting import hold_open, hold_posting, open_period
from controlplane.tenants.models import Installation

CHUNK_LINES = 2_000
NAME_MOST = 255
RATE_MOST = 10**12
REPEATED_IDS_MOST = 100


class LinesRefused(Exception):
    """Some lines cannot be read, so nothing was taken. `refused_more` more than those listed."""

    def __init__(self, refused: list[RefusedLine], refused_more: int, readable: int) -> None:
        super().__init__(f"{len(refused) + refused_more} lines cannot be read: nothing was imported")
        self.refused = refused
        self.refused_more = refused_more
        self.readable = readable


class NoExchangeRate(FileRefused):
    """The file is in another currency than the book and no rate was given."""


@dataclass(frozen=True, slots=True)
class ExchangeRate:
    """Book currency per unit of the invoice's currency, and the day it is of."""

    rate: Decimal
    day: date

    @classmethod
    def of_text(cls, rate: str, day: str) -> "ExchangeRate":
        """Raises ValueError for a rate that is none, or without its day."""
        try:
            found = cls(Decimal(rate.strip()), date.fromisoformat(day.strip()))
        except (InvalidOperation, ValueError):
            raise ValueError(
                f"{rate!r} of {day!r} is not a rate with its day: write it like 0.9214 of 2026-10-31"
            ) from None
        if not 0 < found.rate < RATE_MOST:
            raise ValueError(f"{rate!r} is not a rate: enter a number over zero")
        return found


@dataclass(frozen=True, slots=True)
class Imported:
    """`repeated`: this file was taken for this period before. `repeated_ids` are line ids that stand there twice."""

    invoice: Invoice
    repeated: bool
    repeated_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InvoiceTotals:
    """Exact sums of an invoice in its currency. `effective` None: no line says one."""

    billed: Decimal
    effective: Decimal | None
    by_category: dict[str, Decimal]
    by_service: dict[str, Decimal]


@dataclass(slots=True)
class _Seen:
    """What the lines of a file have in common, gathered while they are stored."""

    lines: int = 0
    outside: int = 0
    currencies: set[str] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)
    repeated_ids: list[str] = field(default_factory=list)

    def take(self, row: InvoiceRow, day: date, window: Window, zone: str) -> None:
        """Counts one line."""
        self.lines += 1
        self.currencies.add(row.currency)
        self.outside += not is_inside(row, day, window, zone)
        if row.line_id:
            if row.line_id in self.ids and len(self.repeated_ids) < REPEATED_IDS_MOST:
                self.repeated_ids.append(row.line_id)
            self.ids.add(row.line_id)


def import_invoice(
    stream: BinaryIO,
    *,
    file_name: str,
    period: str,
    actor: Actor,
    now: datetime,
    format: str = "auto",
    mapping: str = "",
    currency: str = "",
    exchange: ExchangeRate | None = None,
) -> Imported:
    """Takes a provider's file for a period, every line of it.

    `currency` is for files that name none; `exchange` for files in another currency than the book's. A file of a closed
    month is a late one: the closing stays as it is, and what the file opens is booked in the next open month.
    Raises ValueError for a period or mapping that is none, FileRefused and UnknownColumns for the file as a whole,
    LinesRefused for lines that cannot be read.
    """
    installation = Installation.objects.get(pk=1)
    window = parse_period(load_zone(installation.billing_zone), period)
    stream.seek(0)
    digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    if known := _known(digest, period):
        return Imported(known, repeated=True)
    row, columns = saved_mapping(mapping)
    text = open_text(stream)
    try:
        reading = survey(text, format=format, mapping=columns)
        with transaction.atomic():
            invoice = Invoice.objects.create(
                period=period, file_name=file_name[-NAME_MOST:], file_sha256=digest, format=reading.format, mapping=row,
                currency="", exchange_rate=exchange.rate if exchange else None,
                exchange_date=exchange.day if exchange else None, lines_count=0, imported_at=now,
                imported_by=actor.name,
            )  # fmt: skip
            seen = _store(invoice, read_rows(text, reading), window, installation.billing_zone)
            _finish(invoice, seen, reading, currency.upper(), installation.currency)
            _mark_late(invoice)
            _note(invoice, actor, now)
    except IntegrityError:
        # Another import of the same file was faster; its invoice is the answer.
        if known := _known(digest, period):
            return Imported(known, repeated=True)
        raise
    finally:
        text.detach()
    return Imported(invoice, repeated=False, repeated_ids=tuple(seen.repeated_ids))


def _mark_late(invoice: Invoice) -> None:
    """A closing that is under way ends first, so that it has the invoice or the invoice says that it was missed."""
    hold_open()
    missed = closing_missed(invoice.period)
    if missed is not None:
        invoice.missed_by, invoice.late_in = missed, open_period(invoice.period)
        invoice.save(update_fields=["missed_by", "late_in"])


def withdraw_invoice(invoice_id: int, *, actor: Actor, now: datetime, reason: str) -> Invoice:
    """An invoice that was taken by mistake counts no longer; its lines stay readable. Twice changes nothing.

    Raises ValidationError: on `reason` without one, on `period` once its month is closed on it or, for a late one, once
    a variance was booked on it.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        # a close that is under way has checked this invoice, so it ends first
        hold_posting()
        invoice = Invoice.objects.select_for_update().get(pk=invoice_id)
        if invoice.state == Invoice.State.CURRENT:
            _check_withdrawable(invoice)
            invoice.state = Invoice.State.WITHDRAWN
            invoice.save(update_fields=["state"])
            record(
                actor=actor, action="invoice.withdraw", noun="invoice", object_id=str(invoice.pk), now=now,
                before={"state": "current"}, after={"state": "withdrawn"}, reason=reason,
            )  # fmt: skip
    return invoice


def _check_withdrawable(invoice: Invoice) -> None:
    if closing_missed(invoice.period) is None:
        return
    if not lands_in(invoice):
        raise ValidationError(
            {"period": f"{invoice.period} is closed on this invoice. Reopen it with a reason, then withdraw."}
        )
    if booked_since(invoice):
        raise ValidationError(
            {"period": f"Variances of {invoice.period} were booked on this invoice. Reopen {invoice.period} with a "
             "reason, then withdraw, and book what its bridge says then."}
        )  # fmt: skip


def totals(invoice: Invoice) -> InvoiceTotals:
    """Exact sums of an invoice."""
    lines = InvoiceLine.objects.filter(invoice=invoice)
    both = lines.aggregate(billed=Sum("billed"), effective=Sum("effective"))
    return InvoiceTotals(
        both["billed"] or Decimal(0), both["effective"], _sums(lines, "category"), _sums(lines, "service")
    )


def imported_json(done: Imported) -> dict[str, Any]:
    """What was taken, amounts as exact text: the answer of the command and of REST."""
    invoice, sums = done.invoice, totals(done.invoice)
    return {
        "invoice": invoice.pk, "repeated": done.repeated, "format": invoice.format, "lines": invoice.lines_count,
        "refused": [], "currency": invoice.currency, "outside_period": invoice.outside_period,
        "repeated_ids": list(done.repeated_ids), "late_in": lands_in(invoice) or None,
        "totals": {
            "billed": decimal_text(sums.billed),
            "effective": None if sums.effective is None else decimal_text(sums.effective),
        },
        "by_category": {name: decimal_text(value) for name, value in sums.by_category.items()},
        "by_service": {name: decimal_text(value) for name, value in sums.by_service.items()},
    }  # fmt: skip


def refused_json(error: LinesRefused) -> dict[str, Any]:
    """Which lines cannot be read, for the command and for REST."""
    return {
        "lines": 0, "readable": error.readable, "refused_more": error.refused_more,
        "refused": [{"line": row.line, "reason": row.reason} for row in error.refused],
    }  # fmt: skip


def decimal_text(value: Decimal) -> str:
    """Exact text without exponent and needless zeros: Decimal("1.500E+1") is "15"."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def _sums(lines: QuerySet[InvoiceLine], column: str) -> dict[str, Decimal]:
    return dict(lines.values_list(column).annotate(billed=Sum("billed")).order_by(column))


def _known(digest: str, period: str) -> Invoice | None:
    return Invoice.objects.filter(file_sha256=digest, period=period, state=Invoice.State.CURRENT).first()


def saved_mapping(name: str) -> tuple[InvoiceMapping | None, ColumnMap | None]:
    """A mapping by its name, none without one. Raises ValueError, with those there are, for one that is not saved."""
    if not name:
        return None, None
    row = InvoiceMapping.objects.filter(name=name).first()
    if row is None:
        names = ", ".join(InvoiceMapping.objects.order_by("name").values_list("name", flat=True)) or "none"
        raise ValueError(f"There is no mapping {name!r}. Saved are: {names}.")
    return row, column_map(row)


def column_map(row: InvoiceMapping) -> ColumnMap:
    """A saved mapping as the reader takes it; its categories go before the usual ones."""
    extra = {name: InvoiceCategory(value) for name, value in row.categories.items()}
    return ColumnMap(
        **{fact: tuple(row.columns.get(fact, ())) for fact in COLUMN_FIELDS},
        provider_name=row.provider_name,
        fixed_currency=row.fixed_currency,
        mark=DecimalMark(row.decimal_mark) if row.decimal_mark else None,
        order=DayOrder(row.day_order) if row.day_order else None,
        categories={**CATEGORIES, **extra},
    )


def _store(invoice: Invoice, rows: Iterator[InvoiceRow], window: Window, zone: str) -> _Seen:
    seen = _Seen()
    while chunk := list(islice(rows, CHUNK_LINES)):
        lines = []
        for row in chunk:
            day = billing_day(row, zone)
            seen.take(row, day, window, zone)
            lines.append(_line(invoice, row, day))
        InvoiceLine.objects.bulk_create(lines)
    return seen


def billing_day(row: InvoiceRow, zone: str) -> date:
    """The day of the billing zone that a line belongs to."""
    return row.starts.astimezone(load_zone(zone)).date() if isinstance(row.starts, datetime) else row.starts


def is_inside(row: InvoiceRow, day: date, window: Window, zone: str) -> bool:
    """Whether a line is of the period."""
    if isinstance(row.starts, datetime):
        return row.starts in window
    first, after = (at.astimezone(load_zone(zone)).date() for at in (window.start, window.end))
    return first <= day < after


def _line(invoice: Invoice, row: InvoiceRow, day: date) -> InvoiceLine:
    return InvoiceLine(
        invoice=invoice, line=row.line, billed=row.billed, effective=row.effective, category=row.category.value,
        provider=row.provider, account=row.account, sku=row.sku, region=row.region, service=row.service,
        description=row.description, day=day, starts_at=row.starts if isinstance(row.starts, datetime) else None,
        quantity=row.quantity, unit=row.unit, provider_line_id=row.line_id,
    )  # fmt: skip


def _finish(invoice: Invoice, seen: _Seen, reading: Reading, currency: str, book: str) -> None:
    """Completes the invoice, or raises and takes everything back."""
    if reading.refused:
        raise LinesRefused(reading.refused, reading.refused_more, seen.lines)
    if not seen.lines:
        raise FileRefused("The file has a header and no lines.")
    invoice.currency = _currency(seen.currencies, currency)
    if invoice.currency != book and invoice.exchange_rate is None:
        raise NoExchangeRate(
            f"The file is in {invoice.currency}, the book is in {book}. Give the rate and its day: how many {book} for "
            f"one {invoice.currency}."
        )
    invoice.lines_count, invoice.outside_period = seen.lines, seen.outside
    invoice.save(update_fields=["currency", "lines_count", "outside_period"])


def _currency(seen: set[str], given: str) -> str:
    named = sorted(seen - {""})
    if len(named) > 1:
        raise FileRefused(f"The file has lines in several currencies: {', '.join(named)}. Split it by currency.")
    if not named and not given:
        raise FileRefused("The file names no currency. Name it, or save a mapping that does.")
    if named and given and named[0] != given:
        raise FileRefused(f"The file is in {named[0]}, not in {given}.")
    return named[0] if named else given


def _note(invoice: Invoice, actor: Actor, now: datetime) -> None:
    record(
        actor=actor, action="invoice.import", noun="invoice", object_id=str(invoice.pk), now=now,
        after={
            "period": invoice.period, "file": invoice.file_name, "sha256": invoice.file_sha256,
            "format": invoice.format, "lines": invoice.lines_count, "currency": invoice.currency,
        },
    )  # fmt: skip
