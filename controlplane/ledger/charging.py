"""What usage is charged, in the book: one event for each day of the billing zone and model, and differences after it.

A day is a source for each of its models. It is booked once it is over; what comes later is one more event with the
difference, so that tenant, class, model and day of every charge can be read from the book, and running it again writes
no row. A closed month is not touched: its late charges are adjustments of the open one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta

from django.db import connection, transaction

from controlplane.core.period import Window, day_windows, load_zone
from controlplane.ledger.models import LedgerEvent
from controlplane.ledger.posting import PostingLine, Source, hold_open, post
from controlplane.ledger.proposals import billed_account, revenue_account
from controlplane.ledger.queries import charges
from controlplane.tenants.models import Installation

CHARGES = "charges"
SYSTEM = "system:charges"
SETTLE = timedelta(minutes=10)
"""Reports of a day have arrived this long after its end; those of an agent that was away are differences."""
LATE = timedelta(days=15)
"""As far back as an agent's spool may reach, and a day: so long charges of a day may still arrive."""
LATE_USUALLY = timedelta(days=2)
SWEEP_BEFORE_MIN = 10
"""Runs in an hour's first minutes look at all of `LATE`, the others at the last days."""
# Any fixed number: one run at a time, since two would find the same difference.
_LOCK = 0x63686172

Amounts = Mapping[tuple[str, str], int]
"""Nanos by (tenant, class)."""


def post_due_charges(now: datetime) -> list[str]:
    """Books the days that are over, and what came late of those before; returns the keys of the events.

    Safe to run any number of times, also at once: one transaction a day.
    """
    back = LATE if now.minute < SWEEP_BEFORE_MIN else LATE_USUALLY
    posted = []
    for day in day_windows(load_zone(_zone()), now - back, now):
        if day.end + SETTLE <= now:
            with transaction.atomic():
                _one_at_a_time()
                if not _booked_as_a_whole(day.label[:7]):
                    posted += [event.key for event in _post_day(day, now, SYSTEM)]
    return posted


def post_charges(period: str, window: Window, *, now: datetime, created_by: str) -> LedgerEvent | None:
    """Books what usage of a month is charged beyond what was booked, the day that is not over included.

    Returns the last of the events, None where nothing was missing.
    """
    with transaction.atomic():
        _one_at_a_time()
        if _booked_as_a_whole(period):
            wanted: dict[tuple[str, str], int] = {}
            for amounts in _usage(window).values():
                for key, nanos in amounts.items():
                    wanted[key] = wanted.get(key, 0) + nanos
            return _post_difference(f"{CHARGES}:{period}", window, wanted, now, created_by)
        days = day_windows(load_zone(_zone()), window.start, min(window.end, now))
        events = [event for day in days for event in _post_day(day, now, created_by)]
    return events[-1] if events else None


def _zone() -> str:
    return Installation.objects.values_list("billing_zone", flat=True).get(pk=1)


def _one_at_a_time() -> None:
    # after the lock of periods, in the order of a closing: it holds that one when it books charges
    hold_open()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def _booked_as_a_whole(period: str) -> bool:
    """Whether a month was booked by an earlier release, which had one source for all of it: it stays so."""
    return LedgerEvent.objects.filter(source=f"{CHARGES}:{period}").exists()


def _post_day(day: Window, now: datetime, created_by: str) -> list[LedgerEvent]:
    wanted, before = _usage(day), _booked(f"{CHARGES}:{day.label}:%")
    events = []
    for model in sorted(wanted.keys() | {source.split(":", 2)[2] for source in before}):
        source = f"{CHARGES}:{day.label}:{model}"
        event = _post_difference(source, day, wanted.get(model, {}), now, created_by, before.get(source, {}))
        if event is not None:
            events.append(event)
    return events


def _label(model: str) -> str:
    """A model's name as it stands in sources, which have room for 100 characters of it."""
    return model if len(model) <= 100 else f"{model[:83]}~{hashlib.sha256(model.encode()).hexdigest()[:16]}"


def _usage(window: Window) -> dict[str, dict[tuple[str, str], int]]:
    """Label of a model -> what its requests that ended in the window are charged, sums of rounded charges."""
    found: dict[str, dict[tuple[str, str], int]] = {}
    for one in charges(window.start, window.end):
        amounts = found.setdefault(_label(one.model), {})
        amounts[one.tenant, one.class_] = amounts.get((one.tenant, one.class_), 0) + one.nanos
    return found


def _post_difference(
    source: str, window: Window, wanted: Amounts, now: datetime, created_by: str, before: Amounts | None = None
) -> LedgerEvent | None:
    booked = _booked(source).get(source, {}) if before is None else before
    lines = [
        PostingLine(billed_account(*key), revenue_account(key[1]), wanted.get(key, 0) - booked.get(key, 0))
        for key in sorted(wanted.keys() | booked.keys())
        if wanted.get(key, 0) != booked.get(key, 0)
    ]
    if not lines:
        return None
    number = LedgerEvent.objects.filter(source=source).count() + 1
    return post(
        f"{source}#{number}", CHARGES, lines, at=window.start, now=now, created_by=created_by,
        source=Source(source, window.start, window.end),
    )  # fmt: skip


_BOOKED = """
SELECT e.source, a.tenant_slug, a.class_slug,
       sum(CASE WHEN t.debit_id = a.id THEN t.amount_nanos ELSE -t.amount_nanos END)::bigint
FROM ledger_ledgerevent e JOIN ledger_transfer t ON t.event_id = e.id
JOIN ledger_account a ON a.id IN (t.debit_id, t.credit_id) AND a.kind = 'billed'
WHERE e.source LIKE %(source)s AND e.kind = 'charges' AND (%(but)s::text IS NULL OR e.period <> %(but)s)
GROUP BY 1, 2, 3
"""


def _booked(pattern: str, but: str | None = None) -> dict[str, dict[tuple[str, str], int]]:
    """Source -> what it has billed so far, of all sources that match a pattern of LIKE; not `but` in that month."""
    found: dict[str, dict[tuple[str, str], int]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_BOOKED, {"source": pattern, "but": but})
        for source, tenant, class_, nanos in cursor.fetchall():
            found.setdefault(source, {})[tenant, class_] = nanos
    return found


def billed_elsewhere(period: str) -> dict[tuple[str, str], int]:
    """(tenant, class) -> charges of a month that were booked in other months, because it was closed."""
    found: dict[tuple[str, str], int] = {}
    for amounts in _booked(f"{CHARGES}:{period}%", period).values():
        for key, nanos in amounts.items():
            found[key] = found.get(key, 0) + nanos
    return found
