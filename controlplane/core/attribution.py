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
"""(tenant, class, kind)."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """Slots that are checked against one busy figure: one slot, or all those without usage of their own."""

    slots: tuple[SlotTenure, ...]
    usage: tuple[Usage, ...]

    @property
    def gpu_share(self) -> Fraction | int:
        share = self.slots[0].gpu_share if self.slots else 1
        return 1 if share == 1 else share  # integers while slots are whole GPUs: several times faster


@dataclass(slots=True)
class _Draft:
    """Exact time while it is gathered, in microseconds x share of a GPU: all of it costs one rate."""

    owned_us: int = 0
    cost_us: Fraction | int = 0
    lines: dict[LineKey, Fraction | int] = field(default_factory=dict)
    idle: dict[OwnedKey, Fraction | int] = field(default_factory=dict)
    findings: list[MeterFinding] = field(default_factory=list)

    def add(self, tenant: str, class_: str, kind: str, us: Fraction | int) -> None:
        if us:
            key = (tenant, class_, kind)
            self.lines[key] = self.lines.get(key, 0) + us


def attribute(pool: PoolInterval) -> Attribution:
    """Attribute the cost of one pool over one interval.

    Raises ValueError when the input is unusable: negative usage, unknown slot, ownership with gaps or overlaps, a
    tenant named `platform`, usage without slot where slots have different shares of a GPU.
    """
    _check(pool)
    shares = _IdleShares(pool)
    draft = _Draft()
    for cell in _cells(pool):
        _add_cell(draft, pool, cell)
    for key, us in draft.idle.items():
        for tenant, share in shares.of(key.class_, key.band).items():
            draft.add(tenant, key.class_ or NO_CLASS, key.cause, us * share)
    rate = Fraction(pool.rate_nanos_per_slot_hour, US_PER_HOUR)
    exact = {key: us * rate for key, us in draft.lines.items()}
    for lend_key, nanos in _lend_price(pool, shares).items():
        exact[lend_key] = exact.get(lend_key, Fraction(0)) + nanos
    total_nanos = round_half_even(draft.cost_us * rate)
    busy_us = sum(usage.gpu_us for usage in pool.usage)
    return Attribution(total_nanos, draft.owned_us, busy_us, _round_lines(total_nanos, exact), tuple(draft.findings))


def _add_cell(draft: _Draft, pool: PoolInterval, cell: _Cell) -> None:
    owned = _owned(pool, cell)
    owned_us, busy_us = sum(owned.values()), sum(usage.gpu_us for usage in cell.usage)
    gpu_share = cell.gpu_share
    draft.owned_us += owned_us
    draft.cost_us += owned_us * gpu_share
    idle: Mapping[OwnedKey, Fraction | int]
    if busy_us > owned_us:
        draft.findings.append(MeterFinding(tuple(sorted(slot.slot for slot in cell.slots)), owned_us, busy_us))
        idle = unobserved(owned)
    else:
        for row in cell.usage:
            draft.add(row.tenant, row.class_, LineKind.DIRECT, (row.gpu_us - row.repeated_us) * gpu_share)
            draft.add(row.tenant, row.class_, LineKind.REPEATED_WORK, row.repeated_us * gpu_share)
        idle = idle_by_key(owned, _sums((row.class_, row.gpu_us) for row in cell.usage))
    for key, us in idle.items():
        draft.idle[key] = draft.idle.get(key, 0) + us * gpu_share


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


class _IdleShares:
    """Who pays idle time of a class, as shares that add up to 1; the platform where no tenant is eligible."""

    def __init__(self, pool: PoolInterval) -> None:
        self._policy = pool.idle
        self._known: dict[tuple[str | None, str | None], Shares] = {}
        self._usage_us: dict[str, dict[str, int]] = {}
        for row in pool.usage:
            tenants = self._usage_us.setdefault(row.class_, {})
            tenants[row.tenant] = tenants.get(row.tenant, 0) + row.gpu_us

    def of(self, class_: str | None, band: str | None) -> Shares:
        if (class_, band) not in self._known:
            self._known[class_, band] = _normalised(self._weights(class_, band))
        return self._known[class_, band]

    def _weights(self, class_: str | None, band: str | None) -> Mapping[str, Fraction | int]:
        policy = self._policy
        if class_ is None:
            return policy.weights.get(NO_CLASS, {})
        method = policy.by_class.get(class_) or policy.by_band.get(band or "") or policy.method
        if method is IdleMethod.WEIGHTS:
            return policy.weights.get(class_, {})
        if method is IdleMethod.PLATFORM:
            return {}
        tenants = self._usage_us.get(class_, {})
        return tenants if method is IdleMethod.USAGE else dict.fromkeys(tenants, 1)


def _normalised(weights: Mapping[str, Fraction | int]) -> Shares:
    whole = sum((Fraction(weight) for weight in weights.values()), Fraction(0))
    if not whole:
        return {PLATFORM: Fraction(1)}
    return {tenant: Fraction(weight) / whole for tenant, weight in weights.items() if weight}


def _lend_price(pool: PoolInterval, shares: _IdleShares) -> dict[LineKey, int]:
    """One pair per slot, lender and borrower: whole nanos on both sides, so that the pair's sum is zero exactly."""
    lines: dict[LineKey, int] = {}

    def book(owners: Shares, class_: str, kind: LineKind, nanos: int) -> None:
        for tenant, part in split_largest_remainder(nanos, owners).items():
            lines[tenant, class_, kind] = lines.get((tenant, class_, kind), 0) + part

    for slot in pool.slots if pool.lend_price_share else ():
        rate = Fraction(pool.rate_nanos_per_slot_hour, US_PER_HOUR) * slot.gpu_share * pool.lend_price_share
        for (lender, borrower), us in sorted(_lent_us(pool, slot).items()):
            nanos = round_half_even(us * rate)
            used = [usage for usage in pool.usage if usage.slot == slot.slot and usage.class_ == borrower]
            on_slot = _sums((usage.tenant, usage.gpu_us) for usage in used)
            payers = _normalised(on_slot) if any(on_slot.values()) else shares.of(borrower, slot.band)
            book(payers, borrower, LineKind.LEND_PRICE, nanos)
            book(shares.of(lender, slot.band), lender, LineKind.LEND_INCOME, -nanos)
    return lines


def _lent_us(pool: PoolInterval, slot: SlotTenure) -> dict[tuple[str, str], int]:
    lent: dict[tuple[str, str], int] = {}
    for owner in slot.owners:
        us = min(owner.end_us, pool.end_us) - max(owner.start_us, pool.start_us)
        if owner.lender is not None and owner.class_ is not None and us > 0:
            pair = (owner.lender, owner.class_)
            lent[pair] = lent.get(pair, 0) + us
    return lent


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
