"""What one pool cost over one interval, and whose cost it was.

Every slot-microsecond that the pool owned is either busy (direct cost of who used it) or idle, with a cause and an
owner. Lines are exact rationals until the very end: the pool's cost is rounded once, then divided by largest remainder
over tenants, each tenant's integer over its classes and each of those over its lines. Sum of lines == cost, always.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from controlplane.core.idle_time import (
    IdleCause,
    OwnedKey,
    SlotTenure,
    idle_by_key,
    owned_by_key,
    unobserved,
)
from controlplane.core.money import US_PER_HOUR, distribute, round_half_even, split_largest_remainder

PLATFORM = "platform"
"""Reserved tenant slug: pays what no tenant is eligible for."""
NO_CLASS = ""
"""Class of lines of capacity that belongs to no class (pools whose slots are shared)."""

Shares = Mapping[str, Fraction]


class IdleMethod(StrEnum):
    """How idle time of a class is spread over its tenants."""

    WEIGHTS = "weights"
    USAGE = "usage"
    EVEN = "even"
    PLATFORM = "platform"


class LineKind(StrEnum):
    """Lines that are not idle; an idle line has its IdleCause as kind."""

    DIRECT = "direct"
    REPEATED_WORK = "repeated_work"
    LEND_PRICE = "lend_price"
    LEND_INCOME = "lend_income"


@dataclass(frozen=True, slots=True)
class Usage:
    """GPU time of one tenant in one class; `repeated_us` of it went to attempts that nobody is charged for.

    Without `slot` the usage is checked against all slots that have no usage of their own.
    """

    tenant: str
    class_: str
    gpu_us: int
    slot: str | None = None
    repeated_us: int = 0


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """Method by class, else by band, else for the pool. `weights` by class; NO_CLASS weighs capacity without class."""

    method: IdleMethod = IdleMethod.USAGE
    by_class: Mapping[str, IdleMethod] = field(default_factory=dict)
    by_band: Mapping[str, IdleMethod] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, Fraction]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolInterval:
    """Snapshot that attribution works on: [start_us, end_us), a rate per slot-hour, tenures and usage."""

    start_us: int
    end_us: int
    rate_nanos_per_slot_hour: int
    slots: Sequence[SlotTenure]
    usage: Sequence[Usage]
    idle: IdlePolicy = field(default_factory=IdlePolicy)
    lend_price_share: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True, order=True)
class CostLine:
    """One line of the pool's cost. `owner` is the class that owns the capacity or used it; nanos may be negative."""

    tenant: str
    class_: str
    kind: str
    nanos: int


@dataclass(frozen=True, slots=True)
class MeterFinding:
    """Slots (one, or all without usage of their own) whose requests say more busy time than was owned."""

    slots: tuple[str, ...]
    owned_us: int
    busy_us: int


@dataclass(frozen=True, slots=True)
class Attribution:
    """Lines that add up to `total_nanos`, and what to look into."""

    total_nanos: int
    owned_us: int
    busy_us: int
    lines: tuple[CostLine, ...]
    findings: tuple[MeterFinding, ...]

    def by_tenant(self) -> dict[str, int]:
        return _sums((line.tenant, line.nanos) for line in self.lines)

    def by_class(self) -> dict[str, int]:
        return _sums((line.class_, line.nanos) for line in self.lines)

    def by_kind(self) -> dict[str, int]:
        return _sums((line.kind, line.nanos) for line in self.lines)


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for key, nanos in pairs:
        sums[key] = sums.get(key, 0) + nanos
    return dict(sorted(sums.items()))


LineKey = tuple[str, str, str]


@dataclass(slots=True)
class _Draft:
    """Exact lines while they are gathered; the key is (tenant, class, kind)."""

    lines: dict[LineKey, Fraction] = field(default_factory=dict)

    def add(self, tenant: str, class_: str, kind: str, nanos: Fraction | int) -> None:
        if nanos:
            key = (tenant, class_, kind)
            self.lines[key] = self.lines.get(key, Fraction(0)) + nanos

    def spread(self, shares: Shares, class_: str, kind: str, nanos: Fraction) -> None:
        for tenant, share in shares.items():
            self.add(tenant, class_, kind, nanos * share)


@dataclass(frozen=True, slots=True)
class _Cell:
    """Slots that are checked against one busy figure: one slot, or all those without usage of their own."""

    slots: tuple[SlotTenure, ...]
    usage: tuple[Usage, ...]


def attribute(pool: PoolInterval) -> Attribution:
    """Attribute the cost of one pool over one interval.

    Raises ValueError when the input is unusable: negative usage, unknown slot, ownership with gaps or overlaps, a
    tenant named `platform`, usage without slot where slots have different shares of a GPU.
    """
    _check(pool)
    draft, findings = _Draft(), []
    total = Fraction(0)
    owned_us = 0
    for cell in _cells(pool):
        owned = _owned(pool, cell)
        busy_us = sum(usage.gpu_us for usage in cell.usage)
        cell_us = sum(owned.values())
        rate = _rate_per_us(pool, cell)
        total += cell_us * rate
        owned_us += cell_us
        if busy_us > cell_us:
            findings.append(MeterFinding(tuple(sorted(slot.slot for slot in cell.slots)), cell_us, busy_us))
            idle: Mapping[OwnedKey, Fraction] = unobserved(owned)
        else:
            _add_direct(draft, cell.usage, rate)
            idle = idle_by_key(owned, _busy_by_class(cell.usage))
        _add_idle(draft, pool, idle, rate)
    _add_lend_price(draft, pool)
    total_nanos = round_half_even(total)
    lines = _round_lines(total_nanos, draft.lines)
    busy_us = sum(usage.gpu_us for usage in pool.usage)
    return Attribution(total_nanos, owned_us, busy_us, lines, tuple(findings))


def _check(pool: PoolInterval) -> None:
    if pool.end_us <= pool.start_us:
        raise ValueError("the interval is empty: its end must be after its start")
    if pool.rate_nanos_per_slot_hour < 0:
        raise ValueError("the rate per slot-hour must not be negative")
    if not 0 <= pool.lend_price_share <= 1:
        raise ValueError(f"the lend price share must be 0 to 1, not {pool.lend_price_share}")
    names = [slot.slot for slot in pool.slots]
    if len(set(names)) != len(names):
        raise ValueError("a slot is listed twice: give each slot once with all its owners")
    for usage in pool.usage:
        if usage.tenant == PLATFORM:
            raise ValueError(f"{PLATFORM!r} is reserved and cannot be the slug of a tenant with usage")
        if usage.gpu_us < 0 or not 0 <= usage.repeated_us <= usage.gpu_us:
            raise ValueError(f"usage of {usage.tenant} in {usage.class_} is negative or repeats more than it used")
        if usage.slot is not None and usage.slot not in names:
            raise ValueError(f"usage of {usage.tenant} names the slot {usage.slot!r}, which is not in the pool")
    if any(weight < 0 for weights in pool.idle.weights.values() for weight in weights.values()):
        raise ValueError("a weight is negative: weights are zero or more")


def _cells(pool: PoolInterval) -> list[_Cell]:
    by_slot: dict[str, list[Usage]] = {}
    for usage in pool.usage:
        if usage.slot is not None:
            by_slot.setdefault(usage.slot, []).append(usage)
    cells = [_Cell((slot,), tuple(by_slot[slot.slot])) for slot in pool.slots if slot.slot in by_slot]
    rest = tuple(slot for slot in pool.slots if slot.slot not in by_slot)
    loose = tuple(usage for usage in pool.usage if usage.slot is None)
    if loose:
        if len({slot.gpu_share for slot in rest}) > 1:
            raise ValueError("usage without a slot needs slots of one GPU share: name the slot of each usage")
        return [*cells, _Cell(rest, loose)]
    return [*cells, *(_Cell((slot,), ()) for slot in rest)]


def _owned(pool: PoolInterval, cell: _Cell) -> dict[OwnedKey, int]:
    owned: dict[OwnedKey, int] = {}
    for slot in cell.slots:
        for key, us in owned_by_key(slot, pool.start_us, pool.end_us).items():
            owned[key] = owned.get(key, 0) + us
    return owned


def _rate_per_us(pool: PoolInterval, cell: _Cell) -> Fraction:
    gpu_share = cell.slots[0].gpu_share if cell.slots else Fraction(1)
    return Fraction(pool.rate_nanos_per_slot_hour, US_PER_HOUR) * gpu_share


def _busy_by_class(usage: Iterable[Usage]) -> dict[str, int]:
    return _sums((row.class_, row.gpu_us) for row in usage)


def _add_direct(draft: _Draft, usage: Iterable[Usage], rate: Fraction) -> None:
    for row in usage:
        draft.add(row.tenant, row.class_, LineKind.DIRECT, (row.gpu_us - row.repeated_us) * rate)
        draft.add(row.tenant, row.class_, LineKind.REPEATED_WORK, row.repeated_us * rate)


def _add_idle(draft: _Draft, pool: PoolInterval, idle: Mapping[OwnedKey, Fraction], rate: Fraction) -> None:
    for key, us in idle.items():
        if us:
            shares = _idle_shares(pool, key.class_, key.band)
            draft.spread(shares, key.class_ or NO_CLASS, key.cause, us * rate)


def _idle_shares(pool: PoolInterval, class_: str | None, band: str | None) -> Shares:
    """Who pays idle time of a class, as shares that add up to 1; the platform where no tenant is eligible."""
    policy = pool.idle
    if class_ is None:
        weights: Mapping[str, Fraction | int] = policy.weights.get(NO_CLASS, {})
        return _normalised(weights)
    method = policy.by_class.get(class_) or policy.by_band.get(band or "") or policy.method
    rows = [usage for usage in pool.usage if usage.class_ == class_]
    if method is IdleMethod.WEIGHTS:
        return _normalised(policy.weights.get(class_, {}))
    if method is IdleMethod.USAGE:
        return _normalised(_sums((usage.tenant, usage.gpu_us) for usage in rows))
    if method is IdleMethod.EVEN:
        return _normalised({usage.tenant: 1 for usage in rows})
    return {PLATFORM: Fraction(1)}


def _normalised(weights: Mapping[str, Fraction | int]) -> Shares:
    whole = sum((Fraction(weight) for weight in weights.values()), Fraction(0))
    if not whole:
        return {PLATFORM: Fraction(1)}
    return {tenant: Fraction(weight) / whole for tenant, weight in weights.items() if weight}


def _add_lend_price(draft: _Draft, pool: PoolInterval) -> None:
    """One pair per slot, lender and borrower: whole nanos on both sides, so that the pair's sum is zero exactly."""
    if not pool.lend_price_share:
        return
    for slot in pool.slots:
        lent: dict[tuple[str, str], int] = {}
        for owner in slot.owners:
            us = min(owner.end_us, pool.end_us) - max(owner.start_us, pool.start_us)
            if owner.lender is not None and owner.class_ is not None and us > 0:
                pair = (owner.lender, owner.class_)
                lent[pair] = lent.get(pair, 0) + us
        rate = Fraction(pool.rate_nanos_per_slot_hour, US_PER_HOUR) * slot.gpu_share * pool.lend_price_share
        for (lender, borrower), us in sorted(lent.items()):
            nanos = round_half_even(us * rate)
            used = [usage for usage in pool.usage if usage.slot == slot.slot and usage.class_ == borrower]
            on_slot = _sums((usage.tenant, usage.gpu_us) for usage in used)
            payers = _normalised(on_slot) if any(on_slot.values()) else _idle_shares(pool, borrower, slot.band)
            for tenant, part in split_largest_remainder(nanos, payers).items():
                draft.add(tenant, borrower, LineKind.LEND_PRICE, part)
            for tenant, part in split_largest_remainder(nanos, _idle_shares(pool, lender, slot.band)).items():
                draft.add(tenant, lender, LineKind.LEND_INCOME, -part)


def _round_lines(total_nanos: int, exact: Mapping[LineKey, Fraction]) -> tuple[CostLine, ...]:
    by_tenant: dict[str, dict[str, dict[str, Fraction]]] = {}
    for (tenant, class_, kind), nanos in exact.items():
        by_tenant.setdefault(tenant, {}).setdefault(class_, {})[kind] = nanos
    lines: list[CostLine] = []
    tenants = {
        tenant: sum((_sum(kinds) for kinds in classes.values()), Fraction(0)) for tenant, classes in by_tenant.items()
    }
    for tenant, tenant_nanos in distribute(total_nanos, tenants).items():
        classes = by_tenant[tenant]
        sums = {class_: _sum(kinds) for class_, kinds in classes.items()}
        for class_, class_nanos in distribute(tenant_nanos, sums).items():
            parts = distribute(class_nanos, classes[class_])
            lines.extend(CostLine(tenant, class_, kind, part) for kind, part in parts.items())
    return tuple(lines)


def _sum(parts: Mapping[str, Fraction]) -> Fraction:
    return sum(parts.values(), Fraction(0))


__all__ = [
    "NO_CLASS",
    "PLATFORM",
    "Attribution",
    "CostLine",
    "IdleCause",
    "IdleMethod",
    "IdlePolicy",
    "LineKind",
    "MeterFinding",
    "PoolInterval",
    "Usage",
    "attribute",
]
