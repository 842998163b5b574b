"""Invoices that came after their month was closed: what they open is booked in a later month, and asked for there."""

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.core.period import load_zone, parse_period
from controlplane.ledger.bridging import BridgeReport, bridge_report
from controlplane.ledger.models import Invoice, LedgerEvent, Period
from controlplane.ledger.posting import first_open, open_period
from controlplane.ledger.variances import KIND, booked_variances

TOLERANCE_PPM = 5_000
"""What the invoice and the book, booked variances included, may differ by without a reason: 0.5 % of the invoice."""
PPM = 1_000_000


def tolerance_of(report: BridgeReport) -> int:
    """What a month's bridge may leave unbooked, in nanos."""
    return abs(report.invoice_nanos) * TOLERANCE_PPM // PPM


@dataclass(frozen=True, slots=True)
class LateMonth:
    """A closed month with invoices that its closing did not have; `left_nanos` is what of its bridge is not booked."""

    period: str
    invoices: tuple[Invoice, ...]
    invoice_nanos: int
    booked_nanos: int
    left_nanos: int
    tolerance_nanos: int

    @property
    def settled(self) -> bool:
        return abs(self.left_nanos) <= self.tolerance_nanos


def closing_missed(period: str) -> int | None:
    """The closing that an invoice taken now comes after; None while its month is open."""
    return Period.objects.filter(name=period, state=Period.State.CLOSED).values_list("version", flat=True).first()


def late_months(period: str, zone: str) -> tuple[LateMonth, ...]:
    """Closed months whose late invoices are a month's to book: those that came while it was the next open one, and
    what the months between left unbooked."""
    closed = _closed_versions(name__lt=period)
    late: dict[str, list[Invoice]] = {}
    waiting = Invoice.objects.filter(
        state=Invoice.State.CURRENT, period__in=closed, late_in__gt="", late_in__lte=period
    )
    for row in waiting.order_by("period", "id"):
        if is_late(row, closed):
            late.setdefault(row.period, []).append(row)
    found = [_late_month(name, tuple(rows), zone) for name, rows in late.items()]
    return tuple(month for month in found if not month.settled or any(row.late_in == period for row in month.invoices))


def is_late(invoice: Invoice, closed_versions: dict[str, int]) -> bool:
    """Whether the closing that is in force was made without an invoice; a month closed anew has it."""
    return invoice.missed_by is not None and closed_versions.get(invoice.period) == invoice.missed_by


def landings(invoices: Iterable[Invoice]) -> dict[int, str]:
    """Invoice id -> the open month that its variance is booked in now; those that their month's closing has are
    missing."""
    closed = _closed_versions()
    return {row.pk: first_open(row.period, closed) for row in invoices if is_late(row, closed)}


def lands_in(invoice: Invoice) -> str:
    """The same of one invoice; empty for one that its month's closing has."""
    return landings([invoice]).get(invoice.pk, "")


def late_month_of(period: str) -> str:
    """The month that an invoice of `period` would be booked in if it were taken now; empty while its month is open."""
    return "" if closing_missed(period) is None else open_period(period)


def booked_since(invoice: Invoice) -> bool:
    """Whether a variance of the invoice's month was booked after the invoice came."""
    return LedgerEvent.objects.filter(
        source__startswith=f"{KIND}:{invoice.period}:", posted_at__gte=invoice.imported_at
    ).exists()


def _closed_versions(**narrowed: str) -> dict[str, int]:
    return dict(Period.objects.filter(state=Period.State.CLOSED, **narrowed).values_list("name", "version"))


def _late_month(period: str, invoices: tuple[Invoice, ...], zone: str) -> LateMonth:
    report = bridge_report(period, parse_period(load_zone(zone), period), zone)
    booked = sum(booked_variances(period).values())
    return LateMonth(
        period, invoices, report.invoice_nanos, booked, report.difference_nanos - booked, tolerance_of(report)
    )
