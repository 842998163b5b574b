"""The three checks of a period together: estimates, meters, invoices; as values and as one JSON document."""

from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from typing import Any

from controlplane.core.money import NANOS_PER_UNIT, format_nanos
from controlplane.core.period import Window, format_utc, load_zone, parse_period
from controlplane.core.reconcile import MatchKey
from controlplane.ledger.bridging import BridgeReport, bridge_report
from controlplane.ledger.checks_of_reports import Estimates, MeterReport, estimates, meter_report
from controlplane.ledger.late_invoices import LateMonth, late_months, tolerance_of
from controlplane.ledger.variances import booked_variances
from controlplane.tenants.models import Installation


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """`booked` are the variances in the book by step, in nanos; `late` the closed months whose late invoices this month
    has to book."""

    period: str
    window: Window
    zone: str
    currency: str
    estimates: Estimates
    meters: MeterReport
    bridge: BridgeReport
    booked: dict[str, int]
    late: tuple[LateMonth, ...] = ()

    @property
    def open_nanos(self) -> int:
        """What the invoice has beyond the book after the variances that were booked."""
        return self.bridge.difference_nanos - sum(self.booked.values())

    @property
    def tolerance_nanos(self) -> int:
        return tolerance_of(self.bridge)

    @property
    def within_tolerance(self) -> bool:
        return bool(self.bridge.invoices) and self.bridge.closes and abs(self.open_nanos) <= self.tolerance_nanos


def month_window(period: str, zone: str) -> Window:
    """A month by its name. Raises ValueError for weeks and days too: months are what is invoiced and closed."""
    window = parse_period(load_zone(zone), period)
    if len(window.label) != len("2026-10"):
        raise ValueError(f"{period!r} is not a month: write it like 2026-10")
    return window


def reconcile(period: str, *, now: datetime) -> Reconciliation:
    """All three checks of a month of the billing zone, up to now. Raises ValueError for a period that is no month."""
    book = Installation.objects.get(pk=1)
    window = month_window(period, book.billing_zone)
    return Reconciliation(
        period, window, book.billing_zone, book.currency, estimates(window), meter_report(window, now),
        bridge_report(period, window, book.billing_zone), booked_variances(period),
        late_months(period, book.billing_zone),
    )  # fmt: skip


def exact(value: Fraction) -> str:
    """A quantity as decimal text: exact where it has at most nine decimals, rounded half-even otherwise."""
    return format_nanos(round(value * NANOS_PER_UNIT), places_min=0)


def key_json(key: MatchKey) -> dict[str, str]:
    return {"provider": key.provider, "account": key.account, "sku": key.sku, "region": key.region, "day": key.day}


def to_json(found: Reconciliation) -> dict[str, Any]:
    """Everything with amounts as exact decimal text; `residual` is 0.00 unless a step is missing."""
    bridge = found.bridge
    return {
        "period": found.period, "zone": found.zone, "currency": found.currency,
        "since": format_utc(found.window.start), "until": format_utc(found.window.end),
        "estimates": _estimates_json(found.estimates),
        "meters": _meters_json(found.meters),
        "late": [
            {"period": month.period, "invoices": [row.pk for row in month.invoices],
             "invoice": format_nanos(month.invoice_nanos), "booked": format_nanos(month.booked_nanos),
             "open": format_nanos(month.left_nanos), "tolerance": format_nanos(month.tolerance_nanos),
             "settled": month.settled}
            for month in found.late
        ],
        "bridge": {
            "book": format_nanos(bridge.book_nanos),
            "steps": [
                {"step": step.name, "amount": format_nanos(step.nanos), "lines": step.lines,
                 "booked": format_nanos(found.booked.get(step.name, 0))}
                for step in bridge.steps
            ],
            "invoice": format_nanos(bridge.invoice_nanos),
            "difference": format_nanos(bridge.difference_nanos),
            "residual": format_nanos(bridge.unexplained_nanos),
            "open": format_nanos(found.open_nanos),
            "tolerance": format_nanos(found.tolerance_nanos),
            "within_tolerance": found.within_tolerance,
            "unpriced_us": bridge.unpriced_us,
            "invoices": [
                {"id": row.pk, "file": row.file_name, "currency": row.currency, "lines": row.lines_count,
                 "exchange_rate": None if row.exchange_rate is None else f"{row.exchange_rate:f}"}
                for row in bridge.invoices
            ],
            "matched": [
                {**key_json(line.key), "book_quantity": exact(line.book_quantity),
                 "book": format_nanos(line.book_nanos), "invoice_quantity": exact(line.invoice_quantity),
                 "invoice": format_nanos(line.invoice_nanos), "price_variance": format_nanos(line.variance.price_nanos),
                 "quantity_variance": format_nanos(line.variance.quantity_nanos)}
                for line in bridge.bridge.matched
            ],
            "unmatched_book": [
                {**key_json(key), "amount": format_nanos(nanos)}
                for key, nanos in bridge.bridge.unmatched_book_nanos.items()
            ],
            "unmatched_invoice": [
                {**key_json(key), "amount": format_nanos(nanos)}
                for key, nanos in bridge.bridge.unmatched_invoice_nanos.items()
            ],
        },
    }  # fmt: skip


def _estimates_json(found: Estimates) -> dict[str, Any]:
    return {
        "records": found.records, "requests": found.requests, "unknown_requests": found.unknown_requests,
        "rows": [
            {"tenant": row.tenant, "class": row.class_, "estimated_gpu_us": row.estimated_gpu_us,
             "actual_gpu_us": row.actual_gpu_us, "bias": None if row.bias is None else round(float(row.bias), 4),
             "admission_factor": round(float(row.admission_factor), 4), "estimated": None,
             "actual": format_nanos(row.actual_nanos)}
            for row in found.rows
        ],
    }  # fmt: skip


def _meters_json(found: MeterReport) -> dict[str, Any]:
    return {
        "slot_minutes": found.minutes, "agree": found.agree, "differs": found.differs, "unknown": found.unknown,
        "gaps": [
            {"agent": gap.agent, "epoch": gap.epoch, "first_seq": gap.first_seq, "last_seq": gap.last_seq,
             "reason": gap.reason, "records": gap.records, "at": format_utc(gap.at)}
            for gap in found.gaps
        ],
        "coverage": [
            {"agent": row.agent, "heard": round(float(row.heard), 6), "minutes": row.minutes} for row in found.coverage
        ],
        "slot_days": [
            {"pool": row.pool, "slot": row.slot, "day": format_utc(row.day), "differs": row.differs,
             "unknown": row.unknown, "requests_us": row.requests_us, "busy_us": row.busy_us}
            for row in found.slot_days
        ],
    }  # fmt: skip
