"""Attribution of one pool, hour by hour: the core's lines are stored, and the book gets the difference.

An hour is the UTC hour, cut where a day of the billing zone begins inside it. Running again ends in the same lines and
balances, whatever the order and number of runs; a run without change writes no row. The hour that is not over yet may
be attributed up to an instant: its end grows with each run, its lines are replaced, the book gets the difference.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from django.db import connection, transaction

from controlplane.core.attribution import Attribution, LineKind, PoolInterval
from controlplane.core.attribution import attribute as attribute_interval
from controlplane.core.money import US_PER_HOUR
from controlplane.core.period import Window, cut_hours, format_utc, from_us, load_zone, to_us
from controlplane.fleet.models import Pool
from controlplane.ledger.attribution_cells import Finding, Snapshot, snapshots
from controlplane.ledger.attribution_input import (
    IntervalRows,
    Names,
    SharingPolicy,
    load_names,
    load_rows,
    present_policy,
)
from controlplane.ledger.models import Account, AttributionInterval, AttributionLine, LedgerEvent
from controlplane.ledger.posting import (
    AccountKind,
    AccountRef,
    PostingLine,
    Source,
    fleet_account,
    owner_account,
    post,
    posted_from,
)
from controlplane.tenants.models import Installation

ACTOR = "system:attribution"
KIND = "attribution"
# Agents report every second or two: less than this of an interval without a reading is a late report, not a silent one.
GAP_LEAST_US = 10_000_000
_LOCK_SPACE = 0x61747472
_LENDING = frozenset({LineKind.LEND_PRICE, LineKind.LEND_INCOME})

LineKey = tuple[str, str, str]
"""(tenant, class, line)."""


@dataclass(frozen=True, slots=True)
class IntervalResult:
    """What a run did to one interval. `changed`: lines were written; `posted`: the key of the event, if any."""

    pool: str
    start: datetime
    end: datetime
    changed: bool
    cost_nanos: int | None
    posted: str | None = None


@dataclass(slots=True)
class _Sum:
    """Lines of all rate segments of an interval; amounts of unpriced time are unknown."""

    slot_us: dict[LineKey, int]
    nanos: dict[LineKey, int]
    cost_nanos: int | None
    owned_us: int
    busy_us: int
    unpriced_us: int
    findings: list[Finding]


def hours(starts_at: datetime, ends_at: datetime, zone_name: str) -> list[Window]:
    """The intervals of attribution that [starts_at, ends_at) touches: whole, never cut at its edges."""
    first = from_us(to_us(starts_at) // US_PER_HOUR * US_PER_HOUR)
    last = from_us(-(-to_us(ends_at) // US_PER_HOUR) * US_PER_HOUR)
    if first >= last:
        return []
    return [w for w in cut_hours(first, last, load_zone(zone_name)) if w.end > starts_at and w.start < ends_at]


def attribute(
    pool: Pool, starts_at: datetime, ends_at: datetime, now: datetime, *, present_settings: bool = False
) -> list[IntervalResult]:
    """Attribute every interval that [starts_at, ends_at) touches, none beyond `now`; one transaction each.

    An interval that was completed before keeps the idle policy it was completed under; `present_settings` applies the
    pool's present one instead, and the book gets the difference.
    """
    zone = Installation.objects.values_list("billing_zone", flat=True).get(pk=1)
    names = load_names()
    results = []
    for window in hours(starts_at, min(ends_at, now), zone):
        result = _attribute_one(pool, window, now, names, present_settings=present_settings)
        if result is not None:
            results.append(result)
    return results


def _attribute_one(
    pool: Pool, window: Window, now: datetime, names: Names, *, present_settings: bool
) -> IntervalResult | None:
    with transaction.atomic():
        _lock(pool, window)
        stored = AttributionInterval.objects.filter(pool=pool, starts_at=window.start).first()
        end = min(window.end, max(now, stored.ends_at if stored else now))
        if end <= window.start:
            return None
        rows = load_rows(pool, Window(window.start, end), names)
        if stored is None and rows.is_empty:
            return None
        keep = stored is not None and stored.complete and not present_settings
        policy = SharingPolicy.from_json(stored.policy) if stored and keep else present_policy(pool)
        found = snapshots(rows, policy)
        digest = _digest(found, policy)
        if stored is not None and stored.input_digest == digest:
            return IntervalResult(pool.slug, window.start, end, False, stored.cost_nanos)
        total = _add_up(found)
        interval = _store(pool, window, end, rows, policy, digest, total, stored, now)
        posted = _post_difference(pool, interval, total.nanos, now)
    return IntervalResult(pool.slug, window.start, end, True, total.cost_nanos, posted)


def _lock(pool: Pool, window: Window) -> None:
    # One run per pool and interval; half an hour is the finest cut that a zone makes, a quarter is on the safe side.
    with connection.cursor() as cursor:
        quarter = window.start_us // (US_PER_HOUR // 4)
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", (_LOCK_SPACE ^ pool.pk, quarter))


def _digest(found: list[Snapshot], policy: SharingPolicy) -> str:
    text = repr([(snapshot.segment, snapshot.pool, snapshot.lending) for snapshot in found])
    # A meter that saw less than the requests say moves no line, and is still to be looked into.
    text += "".join(repr(finding) for snapshot in found for finding in snapshot.findings)
    return hashlib.sha256(f"{policy.to_json()}\n{text}".encode()).hexdigest()


def _add_up(found: list[Snapshot]) -> _Sum:
    total = _Sum({}, {}, None, 0, 0, 0, [])
    for snapshot in found:
        # At this rate a slot-hour costs as many nanos as it has microseconds: lines are times that add up exactly.
        times = attribute_interval(_at_rate(snapshot, US_PER_HOUR))
        total.owned_us += times.owned_us
        total.busy_us += times.busy_us
        total.findings += snapshot.findings
        _add(total.slot_us, _lines(times))
        if snapshot.segment.nanos_per_slot_hour is None:
            total.unpriced_us += times.total_nanos
            continue
        priced = attribute_interval(snapshot.pool)
        total.cost_nanos = (total.cost_nanos or 0) + priced.total_nanos
        _add(total.nanos, _lines(priced))
        if snapshot.lending is not None:
            lent = _lines(attribute_interval(snapshot.lending))
            _add(total.nanos, ((key, nanos) for key, nanos in lent if key[2] in _LENDING))
    if not total.owned_us:
        total.cost_nanos = 0
    return total


def _at_rate(snapshot: Snapshot, rate: int) -> PoolInterval:
    return replace(snapshot.pool, rate_nanos_per_slot_hour=rate)


def _lines(result: Attribution) -> list[tuple[LineKey, int]]:
    return [((line.tenant, line.class_, str(line.kind)), line.nanos) for line in result.lines]


def _add(sums: dict[LineKey, int], lines: Iterable[tuple[LineKey, int]]) -> None:
    for key, amount in lines:
        sums[key] = sums.get(key, 0) + amount


def _store(
    pool: Pool,
    window: Window,
    end: datetime,
    rows: IntervalRows,
    policy: SharingPolicy,
    digest: str,
    total: _Sum,
    stored: AttributionInterval | None,
    now: datetime,
) -> AttributionInterval:
    assert total.cost_nanos is None or sum(total.nanos.values()) == total.cost_nanos
    state = AttributionInterval.State.PRICED
    if total.unpriced_us:
        known = total.cost_nanos is not None
        state = AttributionInterval.State.PARTLY_UNPRICED if known else AttributionInterval.State.UNPRICED
    interval, _ = AttributionInterval.objects.update_or_create(
        pool=pool,
        starts_at=window.start,
        defaults={
            "ends_at": end, "run": stored.run + 1 if stored else 1, "input_digest": digest, "method": policy.idle,
            "policy": policy.to_json(), "state": state, "cost_nanos": total.cost_nanos, "owned_us": total.owned_us,
            "busy_us": rows.used_us, "metered_us": rows.metered_us, "unpriced_us": total.unpriced_us,
            "findings": _findings(total.findings), "attributed_at": now, "complete": end == window.end,
        },
    )  # fmt: skip
    AttributionLine.objects.filter(interval=interval).delete()
    keys = sorted({key for sums in (total.slot_us, total.nanos) for key, amount in sums.items() if amount})
    AttributionLine.objects.bulk_create(
        AttributionLine(
            interval=interval,
            tenant_slug=key[0],
            class_slug=key[1],
            line=key[2],
            gpu_us=total.slot_us.get(key, 0),
            amount_nanos=total.nanos.get(key),
        )
        for key in keys
    )
    return interval


def _findings(found: Iterable[Finding]) -> list[dict[str, object]]:
    sums: dict[tuple[str, str], list[int]] = {}
    for finding in found:
        both = sums.setdefault((finding.kind, finding.slot), [0, 0])
        both[0] += finding.us
        both[1] += finding.minutes
    return [
        {"kind": kind, "slot": slot, "us": us, "minutes": minutes}
        for (kind, slot), (us, minutes) in sorted(sums.items())
        if kind != "gap" or us >= GAP_LEAST_US
    ]


def source_of(pool: Pool, start: datetime) -> str:
    """The name under which an interval's events are booked."""
    return f"{KIND}:{pool.slug}:{format_utc(start)}"


def _post_difference(
    pool: Pool, interval: AttributionInterval, nanos: Mapping[LineKey, int], now: datetime
) -> str | None:
    fleet = fleet_account(pool.slug)
    source = Source(source_of(pool, interval.starts_at), interval.starts_at, interval.ends_at)
    wanted = {owner_account(*key): amount for key, amount in nanos.items()}
    before = posted_from(fleet, source.name)
    refs = {ref.code: ref for ref in wanted}
    lines = []
    for code in sorted({*before, *refs}):
        ref = refs.get(code) or _account_of(code)
        difference = wanted.get(ref, 0) - before.get(code, 0)
        if difference:
            lines.append(PostingLine(ref, fleet, difference))
    if not lines:
        return None
    number = LedgerEvent.objects.filter(source=source.name).count() + 1
    event = post(
        f"{source.name}#{number}", KIND, lines, at=interval.starts_at, now=now, created_by=ACTOR, source=source
    )
    return event.key


def _account_of(code: str) -> AccountRef:
    row = Account.objects.get(code=code)
    return AccountRef(AccountKind(row.kind), row.tenant_slug, row.class_slug, row.pool_slug, row.line)
