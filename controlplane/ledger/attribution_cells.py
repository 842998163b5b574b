"""From rows to the core's snapshot: slot-minutes with the states that their meters saw.

Idle is owned less busy per slot-minute, so each minute stands for itself; minutes in which a slot had one owner, one
state and a meter that agrees are merged, because for them the sum of the differences is the difference of the sums.
Nothing here reads a clock or the database.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

from controlplane.core.attribution import IdlePolicy, PoolInterval, Usage
from controlplane.core.idle_time import OwnedState, OwnerInterval, SlotTenure
from controlplane.core.period import US_PER_MINUTE, from_us, minute_start_us
from controlplane.ledger.attribution_input import (
    PPM,
    IntervalRows,
    Meter,
    MinuteUsage,
    RateSegment,
    SharingPolicy,
    SlotRows,
)

NOTHING_SEEN = Meter(0, 0, 0, 0)
# A slot joins when it is entered; until its agent's first report nobody watches it, which is nothing to look into.
JOINING_US = US_PER_MINUTE


@dataclass(frozen=True, slots=True)
class Finding:
    """What to look into: `kind` is `gap` (no meter), `meter` (meter and requests disagree) or `no_tenure`.

    A `gap` is without the first JOINING_US of the slot's time in the fleet; that is unobserved idle like any other.
    """

    kind: str
    slot: str
    us: int
    minutes: int


@dataclass(slots=True)
class _Cell:
    owners: list[OwnerInterval] = field(default_factory=list)
    used: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, piece: OwnerInterval) -> None:
        last = self.owners[-1] if self.owners else None
        if (
            last is not None
            and last.end_us == piece.start_us
            and replace(last, end_us=piece.end_us) == replace(piece, start_us=last.start_us)
        ):
            self.owners[-1] = replace(last, end_us=piece.end_us)
        else:
            self.owners.append(piece)

    def use(self, rows: Iterable[MinuteUsage]) -> None:
        for row in rows:
            sums = self.used.setdefault((row.tenant, row.class_), [0, 0])
            sums[0] += row.gpu_us
            sums[1] += 0 if row.charged else row.gpu_us

    def usage(self, name: str) -> Iterator[Usage]:
        for (tenant, class_), (gpu_us, repeated_us) in sorted(self.used.items()):
            yield Usage(tenant, class_, gpu_us, name, repeated_us)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Input of the core for one rate segment. `lending` has whole slots, for the lend price; None where none is due."""

    segment: RateSegment
    pool: PoolInterval
    lending: PoolInterval | None
    findings: tuple[Finding, ...]


def snapshots(rows: IntervalRows, policy: SharingPolicy) -> list[Snapshot]:
    """One snapshot per rate in force. An unpriced segment carries the rate 0: only its times mean something."""
    return [_snapshot(rows, segment, policy) for segment in rows.rates]


def _snapshot(rows: IntervalRows, segment: RateSegment, policy: SharingPolicy) -> Snapshot:
    cut = _Cut(rows.start_us, rows.end_us, segment.start_us, segment.end_us)
    tenures: list[SlotTenure] = []
    usage: list[Usage] = []
    findings: list[Finding] = []
    for slot in rows.slots:
        cells, found = _cells(slot, cut)
        findings += found
        for name, cell in cells.items():
            spans = tuple((owner.start_us, owner.end_us) for owner in cell.owners)
            tenures.append(SlotTenure(name, tuple(cell.owners), slot.band, slot.gpu_share, spans))
            usage += cell.usage(name)
    idle = IdlePolicy(
        policy.idle,
        weights={
            class_: {tenant: Fraction(weight) for tenant, weight in sorted(tenants.items())}
            for class_, tenants in sorted(policy.weights.items())
        },
    )
    rate = segment.nanos_per_slot_hour or 0
    pool = PoolInterval(segment.start_us, segment.end_us, rate, tuple(tenures), tuple(usage), idle)
    return Snapshot(segment, pool, _lending(rows, cut, pool, policy), tuple(findings))


@dataclass(frozen=True, slots=True)
class _Cut:
    """The segment inside the interval, and how much of a minute's figures falls into it."""

    start_us: int
    end_us: int
    from_us: int
    to_us: int

    def minutes(self) -> range:
        return range(minute_start_us(self.from_us), self.to_us, US_PER_MINUTE)

    def span(self, minute_us: int) -> tuple[int, int]:
        """The part of a minute that lies in the segment."""
        return max(minute_us, self.from_us), min(minute_us + US_PER_MINUTE, self.to_us)

    def part(self, slot: SlotRows, minute_us: int, amount: int) -> int:
        """A minute's figure counts in proportion where a rate changes inside the minute; parts add up to it.

        In proportion to the time that the slot was in the fleet: what it did, it did then. Only the figure of a minute
        in which it never was goes by the clock.
        """
        low, high = max(minute_us, self.start_us), min(minute_us + US_PER_MINUTE, self.end_us)
        left, right = self.span(minute_us)
        if not amount or (left, right) == (low, high):
            return amount
        whole, before, through = (_owned_us(slot, low, end) for end in (high, left, right))
        if not whole:
            whole, before, through = high - low, left - low, right - low
        return amount * through // whole - amount * before // whole


def _owned_us(slot: SlotRows, start_us: int, end_us: int) -> int:
    spans = ((max(owner.start_us, start_us), min(owner.end_us, end_us)) for owner in slot.owners)
    return sum(max(0, end - start) for start, end in spans)


def _joining_us(slot: SlotRows, start_us: int, end_us: int) -> int:
    """How much of the span the slot was in the fleet and still joining."""
    spans = ((max(at, start_us), min(at + JOINING_US, end_us)) for at in slot.joined_us)
    return sum(_owned_us(slot, start, end) for start, end in spans if start < end)


def _cells(slot: SlotRows, cut: _Cut) -> tuple[dict[str, _Cell], list[Finding]]:
    cells: dict[str, _Cell] = {}
    gap_us = gap_minutes = 0
    findings: list[Finding] = []
    plain: dict[tuple[str | None, OwnedState, str | None], str] = {}
    for minute_us in cut.minutes():
        left, right = cut.span(minute_us)
        owners = [_clip(owner, left, right) for owner in slot.owners if owner.start_us < right and owner.end_us > left]
        used = _used(slot, cut, minute_us)
        if not owners and not used:
            continue
        owned_us = sum(owner.end_us - owner.start_us for owner in owners)
        busy_us = sum(row.gpu_us for row in used)
        seen = _seen(slot, cut, minute_us, owned_us, busy_us)
        missing_us = seen.unseen_us - _joining_us(slot, left, right)
        if missing_us > 0:
            gap_us, gap_minutes = gap_us + missing_us, gap_minutes + 1
        if not owned_us:
            findings.append(Finding("no_tenure", slot.name, busy_us, 1))
        elif busy_us > owned_us or seen.unexplained_us or seen.misses(busy_us, rows=len(used)):
            findings.append(Finding("meter", slot.name, abs(busy_us - seen.busy_us), 1))
        pieces = _pieces(owners, seen, owned_us)
        keys = {(piece.class_, piece.state, piece.lender) for piece in pieces}
        if len(keys) == 1 and busy_us <= owned_us:
            name = plain.setdefault(next(iter(keys)), f"{slot.name}#{len(plain)}")
        else:
            name = f"{slot.name}@{from_us(minute_us):%H:%M}"
        cell = cells.setdefault(name, _Cell())
        for piece in pieces:
            cell.add(piece)
        cell.use(used)
    if gap_us:
        findings.append(Finding("gap", slot.name, gap_us, gap_minutes))
    return cells, findings


def _clip(owner: OwnerInterval, start_us: int, end_us: int) -> OwnerInterval:
    if owner.start_us >= start_us and owner.end_us <= end_us:
        return owner
    return OwnerInterval(
        owner.class_, max(owner.start_us, start_us), min(owner.end_us, end_us), owner.state, owner.lender
    )


def _used(slot: SlotRows, cut: _Cut, minute_us: int) -> list[MinuteUsage]:
    rows = []
    for row in slot.usage.get(minute_us, ()):
        gpu_us = cut.part(slot, minute_us, row.gpu_us)
        if gpu_us:
            rows.append(row if gpu_us == row.gpu_us else replace(row, gpu_us=gpu_us))
    return rows


@dataclass(frozen=True, slots=True)
class _Seen:
    """How much of a slot-minute was what; the rest was as its owner's state says."""

    busy_us: int
    unseen_us: int
    unexplained_us: int
    broken_us: int
    warming_us: int

    def misses(self, busy_us: int, *, rows: int) -> bool:
        """Requests say more than the meter can have missed; each row's part of a cut minute is rounded by itself."""
        return busy_us > self.busy_us + self.unseen_us + rows


def _seen(slot: SlotRows, cut: _Cut, minute_us: int, owned_us: int, busy_us: int) -> _Seen:
    """Busy time that no request explains is time that nobody can say anything about: it counts as unobserved."""
    meter = slot.meters.get(minute_us, NOTHING_SEEN)
    observed_us = min(cut.part(slot, minute_us, meter.observed_us), owned_us)
    metered_busy_us = cut.part(slot, minute_us, meter.busy_us)
    unexplained_us = min(max(metered_busy_us - busy_us, 0), observed_us)
    left_us = observed_us - unexplained_us
    broken_us = min(cut.part(slot, minute_us, meter.broken_us), left_us)
    warming_us = min(cut.part(slot, minute_us, meter.warming_us), left_us - broken_us)
    return _Seen(metered_busy_us, owned_us - observed_us, unexplained_us, broken_us, warming_us)


def _pieces(owners: list[OwnerInterval], seen: _Seen, owned_us: int) -> list[OwnerInterval]:
    """Owners cut by state. Where in the minute a state was is not known: each owner gets its share, cut by cut."""
    amounts = (
        (OwnedState.UNOBSERVED, seen.unseen_us + seen.unexplained_us),
        (OwnedState.BROKEN, seen.broken_us),
        (OwnedState.WARMING, seen.warming_us),
    )
    pieces: list[OwnerInterval] = []
    before_us = 0
    for owner in owners:
        length_us = owner.end_us - owner.start_us
        at_us = owner.start_us
        for state, amount_us in amounts:
            share_us = amount_us * (before_us + length_us) // owned_us - amount_us * before_us // owned_us
            end_us = min(at_us + share_us, owner.end_us)
            if end_us > at_us:
                kept = owner.state if owner.state is OwnedState.UNOBSERVED else state
                pieces.append(replace(owner, start_us=at_us, end_us=end_us, state=kept))
            at_us = end_us
        if at_us < owner.end_us:
            pieces.append(replace(owner, start_us=at_us))
        before_us += length_us
    return pieces


def _lending(rows: IntervalRows, cut: _Cut, pool: PoolInterval, policy: SharingPolicy) -> PoolInterval | None:
    lent = any(owner.lender is not None for slot in rows.slots for owner in slot.owners)
    if not policy.lend_price_share_ppm or not lent:
        return None
    tenures: list[SlotTenure] = []
    usage: list[Usage] = []
    for slot in rows.slots:
        cell = _Cell()
        for owner in slot.owners:
            if owner.start_us < cut.to_us and owner.end_us > cut.from_us:
                cell.owners.append(_clip(owner, cut.from_us, cut.to_us))
        for minute_us in cut.minutes():
            cell.use(_used(slot, cut, minute_us))
        spans = tuple((owner.start_us, owner.end_us) for owner in cell.owners)
        tenures.append(SlotTenure(slot.name, tuple(cell.owners), slot.band, slot.gpu_share, spans))
        usage += cell.usage(slot.name)
    share = Fraction(policy.lend_price_share_ppm, PPM)
    return replace(pool, slots=tuple(tenures), usage=tuple(usage), lend_price_share=share)
