"""Which hours to attribute again: the open one, recent ones, and those that late rows or a new rate have changed."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Exists, OuterRef

from controlplane.core.period import US_PER_MINUTE, from_us, load_zone, parse_period, to_us
from controlplane.fleet.models import Pool
from controlplane.ledger.attribution import IntervalResult, attribute
from controlplane.ledger.models import AttributionInterval, AttributionLine, CostRate
from controlplane.tenants.models import Installation

log = logging.getLogger(__name__)

RECENT = timedelta(hours=3)
"""Looked at in every run: reports of agents that were away for minutes arrive here."""
LATE = timedelta(days=15)
"""As far back as an agent's spool may reach, and a day."""
LATE_USUALLY = timedelta(days=1)
SWEEP_EVERY_MIN = 30
"""Every run compares the last day with what was attributed; all of `LATE` is read twice an hour."""
SETTLE = timedelta(seconds=5)
"""Reports of a minute have arrived this long after its end."""
_FIRST_CATCH_UP = timedelta(days=62)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a run looked at and did; `failed` are the slugs of pools whose hours could not be attributed."""

    intervals: int
    changed: int
    posted: int
    failed: tuple[str, ...] = ()

    @classmethod
    def of(cls, results: Iterable[IntervalResult], failed: Iterable[str] = ()) -> "Settled":
        found = list(results)
        posted = sum(result.posted is not None for result in found)
        return cls(len(found), sum(result.changed for result in found), posted, tuple(failed))


def attribute_open(now: datetime) -> Settled:
    """Every pool: hours never done, the recent ones, and older ones that changed. The open hour up to whole minutes."""
    until = from_us((to_us(now - SETTLE)) // US_PER_MINUTE * US_PER_MINUTE)
    return _catch_up(until, LATE if until.minute % SWEEP_EVERY_MIN == 0 else LATE_USUALLY)


def attribute_now(now: datetime) -> Settled:
    """Everything up to this very instant, the running minute too: for a fleet that has been stopped."""
    return _catch_up(now, LATE)


def _catch_up(until: datetime, late: timedelta) -> Settled:
    results: list[IntervalResult] = []
    failed: list[str] = []
    for pool in Pool.objects.order_by("id"):
        try:
            results += _catch_up_pool(pool, until, late)
        except Exception:
            # One pool's rows must not keep the others' books open; the next run tries it again.
            log.exception("cost of pool %s was not attributed", pool.slug)
            failed.append(pool.slug)
    return Settled.of(results, failed)


def _catch_up_pool(pool: Pool, until: datetime, late: timedelta) -> list[IntervalResult]:
    begin = _resume_at(pool, until)
    if begin is None:
        return []
    results: list[IntervalResult] = []
    for start in sorted(stale_hours(pool, until - late, begin)):
        results += attribute(pool, start, start + timedelta(microseconds=1), until)
    return results + attribute(pool, begin, until, until)


def attribute_period(period: str, now: datetime, *, present_settings: bool = False) -> Settled:
    """Every hour of a month (YYYY-MM), week or day of the billing zone, up to `now`. ValueError for another text."""
    zone = Installation.objects.values_list("billing_zone", flat=True).get(pk=1)
    window = parse_period(load_zone(zone), period)
    results: list[IntervalResult] = []
    for pool in Pool.objects.order_by("id"):
        begin = _tenure_after(pool, window.start)
        if begin is not None:
            results += attribute(pool, begin, window.end, now, present_settings=present_settings)
    return Settled.of(results)


def _resume_at(pool: Pool, now: datetime) -> datetime | None:
    """Where to go on: the first hour that is not complete or not there, or `RECENT` before now when that is earlier.

    None when the pool had no slot at any time that is still to be looked at.
    """
    done = AttributionInterval.objects.filter(pool=pool)
    unfinished = done.filter(complete=False).order_by("starts_at").values_list("starts_at", flat=True).first()
    last = done.order_by("-starts_at").values_list("ends_at", flat=True).first()
    after = now - _FIRST_CATCH_UP if last is None else last
    tenures = [_tenure_after(pool, after), _tenure_after(pool, now - RECENT), unfinished]
    return min((at for at in tenures if at is not None), default=None)


def _tenure_after(pool: Pool, after: datetime) -> datetime | None:
    """The first instant from `after` on at which the pool had a slot."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT min(greatest(t.started_at, %s)) FROM fleet_slottenure t JOIN fleet_slot s ON s.id = t.slot_id"
            " WHERE s.pool_id = %s AND (t.ended_at IS NULL OR t.ended_at > %s)",
            [after, pool.pk, after],
        )
        return cursor.fetchone()[0]


def stale_hours(pool: Pool, since: datetime, until: datetime) -> set[datetime]:
    """Starts of stored intervals in [since, until) whose usage, meters or rates are not those that were attributed."""
    if since >= until:
        return set()
    stored = AttributionInterval.objects.filter(pool=pool, starts_at__gte=since, starts_at__lt=until)
    newer = CostRate.objects.filter(
        pool=pool, effective_from__lt=OuterRef("ends_at"), created_at__gt=OuterRef("attributed_at")
    )
    rates = set(stored.filter(Exists(newer)).values_list("starts_at", flat=True))
    return rates | _changed_usage(pool, since, until)


def _changed_usage(pool: Pool, since: datetime, until: datetime) -> set[datetime]:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH slots AS (SELECT id FROM fleet_slot WHERE pool_id = %(pool)s),
            used AS (
                SELECT minute, sum(gpu_us) AS us FROM usage_slotusageminute
                WHERE slot_id IN (SELECT id FROM slots) AND minute >= %(since)s AND minute < %(until)s + interval '1 h'
                GROUP BY minute
            ), metered AS (
                SELECT minute, sum(observed_us) AS us FROM usage_slotminute
                WHERE slot_id IN (SELECT id FROM slots) AND minute >= %(since)s AND minute < %(until)s + interval '1 h'
                GROUP BY minute
            )
            SELECT i.starts_at FROM ledger_attributioninterval i
            WHERE i.pool_id = %(pool)s AND i.starts_at >= %(since)s AND i.starts_at < %(until)s AND (
                i.busy_us <> coalesce((SELECT sum(us) FROM used
                                       WHERE minute >= i.starts_at AND minute < i.ends_at), 0)
                OR i.metered_us <> coalesce((SELECT sum(us) FROM metered
                                             WHERE minute >= i.starts_at AND minute < i.ends_at), 0)
            )
            """,
            {"pool": pool.pk, "since": since, "until": until},
        )
        return {row[0] for row in cursor.fetchall()}


@dataclass(frozen=True, slots=True)
class CostSummary:
    """Nanos of everything attributed in [since, until): fleet == attributed, by tenant and by class add up to both.

    `unpriced_us` is slot time without a rate: its cost is unknown and in none of the sums.
    """

    fleet: int
    attributed: int
    by_tenant: dict[str, int]
    by_class: dict[str, int]
    unpriced_us: int


def cost_summary(since: datetime | None = None, until: datetime | None = None) -> CostSummary:
    """`fleet` from the intervals' costs, `attributed` from their lines: two ways to the same number."""
    intervals = AttributionInterval.objects.all()
    if since is not None:
        intervals = intervals.filter(starts_at__gte=since)
    if until is not None:
        intervals = intervals.filter(starts_at__lt=until)
    fleet = unpriced_us = 0
    for cost_nanos, us in intervals.values_list("cost_nanos", "unpriced_us"):
        fleet += cost_nanos or 0
        unpriced_us += us
    by_tenant: dict[str, int] = {}
    by_class: dict[str, int] = {}
    lines = AttributionLine.objects.filter(interval__in=intervals, amount_nanos__isnull=False)
    for tenant, class_, amount in lines.values_list("tenant_slug", "class_slug", "amount_nanos").iterator():
        nanos = amount or 0
        by_tenant[tenant] = by_tenant.get(tenant, 0) + nanos
        by_class[class_] = by_class.get(class_, 0) + nanos
    attributed = sum(by_tenant.values())
    return CostSummary(fleet, attributed, dict(sorted(by_tenant.items())), dict(sorted(by_class.items())), unpriced_us)
