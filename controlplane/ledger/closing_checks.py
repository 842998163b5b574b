"""What has to be in order before a month is closed; what is not needs a written reason."""

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection

from controlplane.core.money import cents_of
from controlplane.core.period import Window
from controlplane.ledger.models import Proposal
from controlplane.ledger.pages import cents_text
from controlplane.ledger.queries import charges, checks
from controlplane.ledger.reconciliation import Reconciliation, reconcile
from controlplane.usage.duplicates import HOUR
from controlplane.usage.models import AuditedHour, DuplicateRecord, Quarantine, RollupDelta, UsageRecord

FOLDED_WITHIN = timedelta(minutes=2)
AUDITED_BY = timedelta(minutes=15)
"""After its end an hour was looked through for copies by then."""
OK, RISK, BAD, UNKNOWN = "ok", "risk", "bad", "unknown"
UNPRICED_MOST = 100


@dataclass(frozen=True, slots=True)
class UnpricedUse:
    """How many requests of a tenant, class and model ended without a rate card in force."""

    tenant: str
    workload_class: str
    model: str
    requests: int


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the checklist: `state` is ok, or what it is instead; `word` says how many, `text` what to do.

    `unpriced` belongs to unpriced requests: whose they are, the most first, at most UNPRICED_MOST.
    """

    name: str
    title: str
    state: str
    word: str
    text: str
    unpriced: tuple[UnpricedUse, ...] = ()

    @property
    def held(self) -> bool:
        return self.state == OK


@dataclass(frozen=True, slots=True)
class Checklist:
    """All checks of a month, with the reconciliation they were read from."""

    checks: tuple[Check, ...]
    reconciliation: Reconciliation

    @property
    def open(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.held)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(check) for check in self.checks]


def checklist(period: str, *, now: datetime) -> Checklist:
    """Checks of a month up to now. Raises ValueError for a text that is no month."""
    found = reconcile(period, now=now)
    window = found.window
    return Checklist(
        (
            _gaps(found), _unknown(found), _quarantine(window), _copies(window, now), _behind(window, now),
            *_attribution(window, now), _unpriced_requests(window),
            _unreconciled(found), _residual(found), _late_invoices(found), _proposals(period),
        ),
        found,
    )  # fmt: skip


def _gaps(found: Reconciliation) -> Check:
    gaps = found.meters.gaps
    if not gaps:
        return Check("gaps", "Gaps in agents’ reports", OK, "0", "Every report arrived.")
    first = gaps[0]
    more = f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""
    text = f"{first.agent}: reports {first.first_seq:,} to {first.last_seq:,} are missing{more}."
    text += " Their time costs as unobserved."
    return Check("gaps", "Gaps in agents’ reports", RISK, _many(len(gaps), "gap"), text)


def _unknown(found: Reconciliation) -> Check:
    meters = found.meters
    title = "Requests against meters"
    if meters.differs:
        text = f"{meters.differs:,} slot-minutes differ, {meters.unknown:,} were not seen."
        return Check("meters", title, RISK, f"{meters.differs:,} differ", text)
    if meters.unknown:
        text = f"{meters.unknown:,} of {meters.minutes:,} slot-minutes were not seen: unknown, not idle."
        return Check("meters", title, UNKNOWN, f"{meters.unknown:,} unknown", text)
    return Check("meters", title, OK, f"{meters.agree:,} agree", "Use by requests adds up to the busy meters.")


def _quarantine(window: Window) -> Check:
    rows = Quarantine.objects.filter(at__gte=window.start, at__lt=window.end, resolved_at=None)
    count = sum(rows.values_list("records", flat=True))
    if not count and not rows.exists():
        return Check("quarantine", "Quarantine", OK, "0", "Nothing is set aside.")
    return Check("quarantine", "Quarantine", RISK, _many(count, "record"), "Set aside and in no total. Decide on them.")


_COPIED = ("charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "charge_gpu_nanos")


def _copies(window: Window, now: datetime) -> Check:
    title = "Counted twice"
    found = DuplicateRecord.objects.filter(ended_at__gte=window.start, ended_at__lt=window.end)
    count, nanos = found.count(), sum(sum(row) for row in found.values_list(*_COPIED))
    if count:
        text = f"Their copies are charged too: {_money(nanos)} too much. Stop the second reporter, book the correction."
        return Check("duplicates", title, RISK, _many(count, "attempt"), text)
    if _not_looked_through(window, now):
        text = "Hours of records were not looked through for copies yet: look at the worker first."
        return Check("duplicates", title, UNKNOWN, "Not known yet", text)
    return Check("duplicates", title, OK, "0", "No attempt stands in the records more than once.")


def _not_looked_through(window: Window, now: datetime) -> bool:
    """Whether records came that the audit should have reached; those of the month arrive until an hour after it."""
    last = AuditedHour.objects.order_by("-hour").values_list("hour", flat=True).first()
    since = max(window.start, last + HOUR) if last is not None else window.start
    until = min(window.end + HOUR, (now - AUDITED_BY).astimezone(UTC).replace(minute=0, second=0, microsecond=0))
    return UsageRecord.objects.filter(received_at__gte=since, received_at__lt=until).exists()


def _behind(window: Window, now: datetime) -> Check:
    """A minute is folded within seconds of its end, so younger ones are on their way and no sign of a worker behind."""
    until = min(window.end, now - FOLDED_WITHIN)
    waiting = RollupDelta.objects.filter(minute__gte=window.start, minute__lt=until).count()
    title = "Usage not folded"
    if waiting:
        text = "Received usage waits to be folded: the worker is behind. Sums include it; look at the worker first."
        return Check("behind", title, RISK, f"{waiting:,} waiting", text)
    return Check("behind", title, OK, "0", "Everything received is folded.")


_MISSING_HOURS = """
SELECT count(*) FROM (
    SELECT DISTINCT s.pool_id, h.at FROM fleet_slottenure t JOIN fleet_slot s ON s.id = t.slot_id
    CROSS JOIN LATERAL generate_series(
        date_trunc('hour', greatest(t.started_at, %(since)s), 'UTC'),
        least(coalesce(t.ended_at, %(until)s), %(until)s) - interval '1 us', interval '1 hour') AS h (at)
    WHERE t.started_at < %(until)s AND (t.ended_at IS NULL OR t.ended_at > %(since)s)
) due
WHERE NOT EXISTS (
    SELECT FROM ledger_attributioninterval i
    WHERE i.pool_id = due.pool_id AND i.starts_at >= due.at AND i.starts_at < due.at + interval '1 hour'
)
"""


def _attribution(window: Window, now: datetime) -> tuple[Check, Check]:
    found, over = checks(window), max(window.start, min(window.end, now))
    with connection.cursor() as cursor:
        cursor.execute(_MISSING_HOURS, {"since": window.start, "until": over})
        missing = int(cursor.fetchone()[0])
    unposted = missing + found.open_intervals
    title = "Unposted pool hours"
    if found.intervals_nanos != found.ledger_nanos:
        text = f"Pool hours say {_money(found.intervals_nanos)}, the ledger {_money(found.ledger_nanos)}."
        posted = Check("unposted", title, BAD, "Sums disagree", f"{text} Run attribution for this month.")
    elif unposted:
        text = "Hours without attribution, or not complete. Run attribution for this month."
        posted = Check("unposted", title, RISK, _many(unposted, "hour"), text)
    else:
        posted = Check("unposted", title, OK, "0", f"{found.intervals:,} pool hours are in the ledger.")
    hours = found.unpriced_us / 3_600_000_000
    text = "Slot time without a rate has no known cost. Add a cost rate that begins early enough."
    priced = Check("unpriced", "Unpriced time", OK, "0", "All slot time has a rate.")
    if found.unpriced_us:
        priced = Check("unpriced", "Unpriced time", UNKNOWN, f"{hours:,.1f} slot-hours", text)
    return posted, priced


def _unpriced_requests(window: Window) -> Check:
    """Requests that no rate card was in force for: what they cost is unknown and on no statement."""
    title = "Unpriced requests"
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in charges(window.start, window.end):
        if row.is_unpriced:
            counts[row.tenant, row.class_, row.model] += row.requests
    if not counts:
        return Check("unpriced_requests", title, OK, "0", "Every request has a rate card.")
    uses = [UnpricedUse(*key, requests) for key, requests in counts.items()]
    uses.sort(key=lambda use: (-use.requests, use.tenant, use.workload_class, use.model))
    most = uses[0]
    more = f" and {len(uses) - 1} more" if len(uses) > 1 else ""
    text = f"No rate card was in force for {most.workload_class} on {most.model} of {most.tenant}{more}: these requests"
    text += " are billed to nobody. Add a card for what comes, and propose an adjustment for what was used."
    word = _many(counts.total(), "request")
    return Check("unpriced_requests", title, UNKNOWN, word, text, tuple(uses[:UNPRICED_MOST]))


def _unreconciled(found: Reconciliation) -> Check:
    title = "Unreconciled"
    if not found.bridge.invoices:
        return Check("unreconciled", title, UNKNOWN, "No invoice", "No invoice of this month is imported.")
    left, tolerance = _money(abs(found.open_nanos)), _money(found.tolerance_nanos)
    text = f"{left} {found.currency} of variance is not booked; {tolerance} are tolerated."
    return Check("unreconciled", title, OK if found.within_tolerance else RISK, left, text)


def _residual(found: Reconciliation) -> Check:
    left = _money(found.bridge.unexplained_nanos)
    if not found.bridge.invoices:
        return Check("bridge", "Bridge", UNKNOWN, "No invoice", "Without an invoice there is nothing to add up to.")
    if found.bridge.closes:
        return Check("bridge", "Bridge", OK, f"Residual {left}", "Every step adds up to the invoice.")
    return Check("bridge", "Bridge", BAD, f"Residual {left}", "No step names this amount. Report it.")


def _late_invoices(found: Reconciliation) -> Check:
    """Invoices of months that were closed without them; their variances are booked in this one."""
    title = "Late invoices"
    left = [month for month in found.late if not month.settled]
    if not left:
        done = ", ".join(month.period for month in found.late)
        text = (
            f"What late invoices of {done} left is booked." if done else "No invoice came after its month was closed."
        )
        return Check("late_invoices", title, OK, "0", text)
    amounts = ", ".join(f"{month.period}: {_money(abs(month.left_nanos))} {found.currency}" for month in left)
    text = f"Not booked of months that were closed without them: {amounts}. Book it from that month’s bridge."
    return Check("late_invoices", title, RISK, _many(len(left), "month"), text)


def _proposals(period: str) -> Check:
    waiting = Proposal.objects.filter(period=period, state=Proposal.State.PROPOSED).count()
    if waiting:
        return Check("proposals", "Proposals", RISK, _many(waiting, "proposal"), "Approve or reject them first.")
    return Check("proposals", "Proposals", OK, "0", "Nothing waits for a second person.")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _money(nanos: int) -> str:
    return cents_text(cents_of(nanos))
