"""Two checks of reconciliation that need no invoice: estimates against actuals, reports against meters.

A gap is unknown, never zero: what was not reported is counted as such and in no sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction

from django.db import connection

from controlplane.core.period import US_PER_MINUTE, Window, from_us, to_us
from controlplane.core.reconcile import EstimateCheck, MeterCheck, SlotMinute, check_meters, heartbeat_coverage
from controlplane.fleet.models import Slot
from controlplane.ledger.attribution_input import load_names
from controlplane.usage import models as usage
from controlplane.usage.queries import Scope, totals

LATEST_ARRIVAL = timedelta(days=15)
"""A record that ended in a period arrives at the latest this long after it: the age limit of spools, and a day."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """Per tenant and class. `requests` of rollups have no record any more (retired): their estimates are unknown."""

    rows: tuple[EstimateCheck, ...]
    records: int
    requests: int

    @property
    def unknown_requests(self) -> int:
        return max(self.requests - self.records, 0)


def estimates(window: Window) -> Estimates:
    """Estimated and actual GPU time and actual charges of records that ended in the window; three statements.

    Agents keep no estimate of the charge, so its difference is unknown.
    """
    names = load_names()
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT tenant_id, class_id, count(*), sum(estimated_gpu_us)::bigint, sum(gpu_us)::bigint,
                   sum(charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos)::bigint
            FROM usage_record
            WHERE ended_at >= %s AND ended_at < %s AND received_at >= %s AND received_at < %s
            GROUP BY 1, 2
            """,
            [window.start, window.end, window.start, window.end + LATEST_ARRIVAL],
        )
        found = cursor.fetchall()
    rows = [
        EstimateCheck(names.tenant(tenant), names.class_(class_), estimated, actual, None, nanos)
        for tenant, class_, _, estimated, actual, nanos in found
    ]
    whole = totals(Scope(window.start, window.end))
    requests = whole[0].requests if whole else 0
    ordered = sorted(rows, key=lambda row: (-abs(row.actual_gpu_us - row.estimated_gpu_us), row.tenant, row.class_))
    return Estimates(tuple(ordered), sum(row[2] for row in found), requests)


@dataclass(frozen=True, slots=True)
class SlotDay:
    """Slot-minutes of one slot and UTC day by outcome of `core.reconcile.check_meters`; times of the known ones."""

    pool: str
    slot: str
    slot_id: int
    day: datetime
    agree: int
    differs: int
    unknown: int
    requests_us: int
    busy_us: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Reports that never arrived, or were set aside whole; `records` None: nobody knows how many they held."""

    agent: str
    epoch: int
    first_seq: int
    last_seq: int
    at: datetime
    reason: str
    records: int | None


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of the minutes of an agent's slots in which any of them was heard."""

    agent: str
    heard: Fraction
    minutes: int


@dataclass(frozen=True, slots=True)
class MeterReport:
    """`slot_days` only those with a minute that differs or is unknown, the most first."""

    minutes: int
    agree: int
    differs: int
    unknown: int
    slot_days: tuple[SlotDay, ...]
    gaps: tuple[Gap, ...]
    coverage: tuple[Coverage, ...]


_SLOT_DAYS = """
WITH expected AS (
    SELECT DISTINCT t.slot_id, m.minute
    FROM fleet_slottenure t
    CROSS JOIN LATERAL generate_series(
        date_trunc('minute', greatest(t.started_at, %(since)s), 'UTC'),
        least(coalesce(t.ended_at, %(until)s), %(until)s) - interval '1 us', interval '1 minute') AS m (minute)
    WHERE t.started_at < %(until)s AND (t.ended_at IS NULL OR t.ended_at > %(since)s)
      AND m.minute >= %(since)s
), used AS (
    SELECT slot_id, minute, sum(gpu_us)::bigint AS us FROM usage_slotusageminute
    WHERE minute >= %(since)s AND minute < %(until)s GROUP BY 1, 2
), metered AS (
    SELECT slot_id, minute, busy_us AS us FROM usage_slotminute WHERE minute >= %(since)s AND minute < %(until)s
), compared AS (
    SELECT slot_id, minute, u.us AS requests_us, m.us AS busy_us
    FROM expected e FULL JOIN used u USING (slot_id, minute) FULL JOIN metered m USING (slot_id, minute)
)
SELECT p.slug, s.name, s.id, date_trunc('day', c.minute, 'UTC') AS day,
       count(*) FILTER (WHERE coalesce(c.requests_us, 0) = c.busy_us),
       count(*) FILTER (WHERE coalesce(c.requests_us, 0) <> c.busy_us),
       count(*) FILTER (WHERE c.busy_us IS NULL),
       coalesce(sum(c.requests_us), 0)::bigint, coalesce(sum(c.busy_us), 0)::bigint
FROM compared c JOIN fleet_slot s ON s.id = c.slot_id JOIN fleet_pool p ON p.id = s.pool_id
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 4
"""
SLOT_DAYS_KEPT = 500


def meter_report(window: Window, until: datetime) -> MeterReport:
    """Every slot-minute of the window up to `until` (whole minutes), gaps and coverage; four statements.

    An agent sends a minute's use with its meter: a meter without use says that there was none; use without a meter,
    or neither, is unknown.
    """
    end = from_us(to_us(min(window.end, until)) // US_PER_MINUTE * US_PER_MINUTE)
    with connection.cursor() as cursor:
        cursor.execute(_SLOT_DAYS, {"since": window.start, "until": max(end, window.start)})
        days = [SlotDay(*row) for row in cursor.fetchall()]
    agree, differs, unknown = (sum(getattr(day, name) for day in days) for name in ("agree", "differs", "unknown"))
    bad = sorted(
        (day for day in days if day.differs or day.unknown),
        key=lambda day: (-day.differs, -day.unknown, day.pool, day.slot, day.day),
    )
    return MeterReport(
        agree + differs + unknown, agree, differs, unknown, tuple(bad[:SLOT_DAYS_KEPT]), tuple(gaps(window)),
        tuple(coverage(window, end)) if end > window.start else (),
    )  # fmt: skip


def slot_day_minutes(slot: Slot, since: datetime, until: datetime) -> list[MeterCheck]:
    """The minutes of one slot over at most a day through `core.reconcile.check_meters`, those that agree left out."""
    span = {"slot_id": slot.pk, "minute__gte": since, "minute__lt": until}
    busy = {
        SlotMinute(slot.name, to_us(minute)): us
        for minute, us in usage.SlotMinute.objects.filter(**span).values_list("minute", "busy_us")
    }
    used: dict[SlotMinute, int] = dict.fromkeys(busy, 0)
    for minute, us in usage.SlotUsageMinute.objects.filter(**span).values_list("minute", "gpu_us"):
        at = SlotMinute(slot.name, to_us(minute))
        used[at] = used.get(at, 0) + us
    expected = [
        SlotMinute(slot.name, at)
        for started, ended in slot.tenures.values_list("started_at", "ended_at")
        for at in range(
            max(to_us(started) // US_PER_MINUTE * US_PER_MINUTE, to_us(since)),
            min(to_us(ended), to_us(until)) if ended else to_us(until),
            US_PER_MINUTE,
        )
    ]
    return [check for check in check_meters(expected, used, busy) if check.status != "agree"]


def gaps(window: Window) -> list[Gap]:
    """Ranges that agents named as lost, and reports that were set aside whole, found in the window."""
    rows = usage.Quarantine.objects.filter(
        at__gte=window.start, at__lt=window.end, seq__isnull=False, agent_id__isnull=False
    )
    rows = rows.filter(reason__in=("reports_lost", "refused_by_database"))
    agents = _agent_names([row.agent_id for row in rows])
    found = []
    for row in rows.order_by("at", "id"):
        payload = row.payload if isinstance(row.payload, dict) else {}
        first, last = payload.get("first_seq", row.seq or 0), payload.get("last_seq", row.seq or 0)
        records = payload.get("records", row.records)
        found.append(
            Gap(
                agents.get(row.agent_id, f"agent {row.agent_id}"),
                row.epoch or 0,
                first,
                last,
                row.at,
                row.reason,
                records,
            )
        )
    return found


def _agent_names(ids: Sequence[int | None]) -> dict[int | None, str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT id, name FROM fleet_agent WHERE id = ANY(%s)", [[pk for pk in ids if pk is not None]])
        return dict(cursor.fetchall())


def coverage(window: Window, until: datetime) -> list[Coverage]:
    """Heartbeat coverage of each agent that has slots: minutes in which a meter of one of its slots was read."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT a.name, min(greatest(t.started_at, %(since)s)),
                   max(least(coalesce(t.ended_at, %(until)s), %(until)s)),
                   (SELECT array_agg(DISTINCT extract(epoch FROM m.minute)::bigint)
                    FROM usage_slotminute m JOIN fleet_slot o ON o.id = m.slot_id
                    WHERE o.agent_id = a.id AND m.minute >= %(since)s AND m.minute < %(until)s AND m.observed_us > 0)
            FROM fleet_agent a JOIN fleet_slot s ON s.agent_id = a.id JOIN fleet_slottenure t ON t.slot_id = s.id
            WHERE t.started_at < %(until)s AND (t.ended_at IS NULL OR t.ended_at > %(since)s)
            GROUP BY a.id, a.name ORDER BY a.name
            """,
            {"since": window.start, "until": until},
        )
        rows = cursor.fetchall()
    found = []
    for name, since, end, minutes in rows:
        first = to_us(since) // US_PER_MINUTE * US_PER_MINUTE
        last = -(-to_us(end) // US_PER_MINUTE) * US_PER_MINUTE
        if last <= first:
            continue
        heard = [int(second) * 1_000_000 for second in minutes or ()]
        share = heartbeat_coverage(heard, first, last, US_PER_MINUTE)
        found.append(Coverage(name, share, (last - first) // US_PER_MINUTE))
    return sorted(found, key=lambda row: (row.heard, row.agent))
