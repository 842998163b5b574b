"""Months as pages and REST list them: state, versions, what came after a closing."""

from dataclasses import dataclass
from datetime import datetime

from django.db import connection
from django.db.models import QuerySet

from controlplane.audit.models import AuditEntry
from controlplane.core.period import Calendar, Window, load_zone, window_at
from controlplane.fleet.models import SlotTenure
from controlplane.ledger.models import Invoice, LedgerEvent, Period, PeriodVersion
from controlplane.tenants.models import Installation

MONTHS_MOST = 60


@dataclass(frozen=True, slots=True)
class Month:
    """A month with its state: `running`, `open` or `closed`, and what its last closing says; None: never closed."""

    name: str
    state: str
    hours: str
    version: PeriodVersion | None


def state_of(period: str) -> str:
    row = Period.objects.filter(name=period).first()
    return row.state if row else Period.State.OPEN


def had_begun(window: Window) -> bool:
    """Whether there was anything of this installation before the end of a month: somebody who acted, a slot in the
    fleet, an invoice or a posting, which may be of months before the first person came.
    """
    return (
        AuditEntry.objects.filter(at__lt=window.end).exists()
        or SlotTenure.objects.filter(started_at__lt=window.end).exists()
        or Invoice.objects.filter(period__lte=window.label).exists()
        or LedgerEvent.objects.filter(period__lte=window.label).exists()
    )


def months(now: datetime) -> list[Month]:
    """From the first month that was posted in or closed, or the one before this, to the present one; newest first."""
    zone = load_zone(Installation.objects.values_list("billing_zone", flat=True).get(pk=1))
    window = window_at(zone, Calendar.MONTH, now)
    with connection.cursor() as cursor:
        cursor.execute("SELECT min(period) FROM ledger_ledgerevent")
        posted = cursor.fetchone()[0]
    rows = Period.objects.in_bulk()
    first = min((posted or "9999-99", *rows))
    last = {version.period_id: version for version in PeriodVersion.objects.order_by("version")}
    found: list[Month] = []
    while len(found) < MONTHS_MOST:
        row = rows.get(window.label)
        state = "running" if now in window else row.state if row else Period.State.OPEN
        hours = f"{window.hours:,.1f}".removesuffix(".0")
        found.append(Month(window.label, str(state), hours, last.get(window.label)))
        if window.label <= first and len(found) > 1:
            break
        window = window_at(zone, Calendar.MONTH, window.start - window.start.resolution)
    return found


def versions(period: str) -> QuerySet[PeriodVersion]:
    """Closings of a month, newest first, with the digests of their exports: their bytes are not read."""
    return PeriodVersion.objects.filter(period_id=period).order_by("-version").prefetch_related("statements")
