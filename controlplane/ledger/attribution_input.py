"""The rows that attribution of one pool and hour works on, read into plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from django.apps import apps
from django.db.models import Q

from controlplane.core.attribution import NO_CLASS, IdleMethod
from controlplane.core.idle_time import Band, OwnedState, OwnerInterval
from controlplane.core.period import Window, from_us, minute_start_us, to_us
from controlplane.core.slot_states import BORROWED, SlotState
from controlplane.fleet.models import Pool, Slot, SlotInterval, SlotTenure
from controlplane.fleet.ownership import home_class
from controlplane.ledger.models import CostRate
from controlplane.tenants.models import Tenant
from controlplane.usage.models import SlotMinute, SlotUsageMinute

PPM = 1_000_000
_BANDS = {
    Slot.Band.INTERACTIVE: Band.INTERACTIVE_FLOOR,
    Slot.Band.BATCH: Band.BATCH_FLOOR,
    Slot.Band.FLEX: Band.FLEX,
}


@dataclass(frozen=True, slots=True)
class Meter:
    """What a slot's meter saw in one minute, in microseconds."""

    busy_us: int
    observed_us: int
    warming_us: int
    broken_us: int


@dataclass(frozen=True, slots=True)
class MinuteUsage:
    """GPU time of one tenant and class on one slot in one minute; not `charged` is repeated work."""

    tenant: str
    class_: str
    charged: bool
    gpu_us: int


@dataclass(frozen=True, slots=True)
class SlotRows:
    """A slot with its owners (clipped to tenures and to the interval), and its minutes by their start.

    `joined_us` has the instants, not clipped, at which the tenures began that the interval touches.
    """

    name: str
    band: Band | None
    gpu_share: Fraction
    owners: tuple[OwnerInterval, ...]
    meters: Mapping[int, Meter]
    usage: Mapping[int, tuple[MinuteUsage, ...]]
    joined_us: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RateSegment:
    """A part of the interval over which one rate was in force; None: none was."""

    start_us: int
    end_us: int
    nanos_per_slot_hour: int | None


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """How idle time is spread: the method, weights by class and tenant, and the lend price."""

    idle: IdleMethod
    weights: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    lend_price_share_ppm: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "idle": str(self.idle),
            "weights": {class_: dict(tenants) for class_, tenants in self.weights.items()},
            "lend_price_share_ppm": self.lend_price_share_ppm,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "SharingPolicy":
        return cls(IdleMethod(document["idle"]), document["weights"], document["lend_price_share_ppm"])


@dataclass(frozen=True, slots=True)
class IntervalRows:
    """Everything about one pool over [start_us, end_us) but the policy."""

    start_us: int
    end_us: int
    rates: tuple[RateSegment, ...]
    slots: tuple[SlotRows, ...]

    @property
    def is_empty(self) -> bool:
        return not any(slot.owners or slot.usage for slot in self.slots)

    @property
    def used_us(self) -> int:
        return sum(row.gpu_us for slot in self.slots for rows in slot.usage.values() for row in rows)

    @property
    def metered_us(self) -> int:
        return sum(meter.observed_us for slot in self.slots for meter in slot.meters.values())


@dataclass(frozen=True, slots=True)
class Names:
    """Slugs by id: rows of usage carry ids, the book carries names."""

    tenants: Mapping[int, str]
    classes: Mapping[int, str]

    def tenant(self, tenant_id: int) -> str:
        return self.tenants.get(tenant_id, f"unknown-{tenant_id}")

    def class_(self, class_id: int) -> str:
        return self.classes.get(class_id, f"unknown-{class_id}")


def load_names() -> Names:
    """Tenants and classes, archived ones too. Classes belong to an app above, so they are asked for by name."""
    classes = apps.get_model("contracts", "WorkloadClass").objects.values_list("id", "slug")
    return Names(dict(Tenant.objects.values_list("id", "slug")), dict(classes))


def present_policy(pool: Pool) -> SharingPolicy:
    """The pool's policy as it stands, weights of the tenants that may use each class at present."""
    method = IdleMethod(pool.idle_policy)
    weights: dict[str, dict[str, int]] = {}
    if method is IdleMethod.WEIGHTS:
        tenants = Tenant.objects.exclude(state=Tenant.State.ARCHIVED).order_by("slug")
        allowed = list(tenants.values_list("slug", "weight", "classes"))
        classes = sorted({pool.interactive_class, pool.batch_class} - {""})
        for class_ in classes:
            weights[class_] = {slug: weight for slug, weight, may in allowed if class_ in may}
        if pool.isolation == Pool.Isolation.SHARED:
            weights[NO_CLASS] = {slug: weight for slug, weight, may in allowed if set(classes) & set(may)}
    return SharingPolicy(method, weights, pool.lend_price_share_ppm)


def load_rows(pool: Pool, window: Window, names: Names) -> IntervalRows:
    """Five statements, whatever the number of slots."""
    slots = {slot.pk: slot for slot in Slot.objects.filter(pool=pool).order_by("name")}
    tenures = _by_slot(SlotTenure, slots, window)
    intervals = _by_slot(SlotInterval, slots, window)
    first_minute = from_us(minute_start_us(window.start_us))
    minutes = Q(slot_id__in=list(slots), minute__gte=first_minute, minute__lt=window.end)
    meters: dict[int, dict[int, Meter]] = {}
    columns = ("slot_id", "minute", "busy_us", "observed_us", "warming_us", "broken_us")
    for slot_id, minute, *values in SlotMinute.objects.filter(minutes).order_by("minute").values_list(*columns):
        meters.setdefault(slot_id, {})[to_us(minute)] = Meter(*values)
    usage: dict[int, dict[int, list[MinuteUsage]]] = {}
    keys = ("minute", "slot_id", "tenant_id", "class_id", "charged")
    used = SlotUsageMinute.objects.filter(minutes, gpu_us__gt=0).order_by(*keys).values_list(*keys, "gpu_us")
    for minute, slot_id, tenant_id, class_id, charged, gpu_us in used:
        row = MinuteUsage(names.tenant(tenant_id), names.class_(class_id), charged, gpu_us)
        usage.setdefault(slot_id, {}).setdefault(to_us(minute), []).append(row)
    rows = tuple(
        SlotRows(
            slot.name,
            None if pool.isolation == Pool.Isolation.SHARED else _BANDS[Slot.Band(slot.band)],
            Fraction(slot.gpu_share_ppm, PPM),
            _owners(pool, slot, tenures.get(pk, []), intervals.get(pk, []), window),
            meters.get(pk, {}),
            {minute: tuple(found) for minute, found in usage.get(pk, {}).items()},
            tuple(to_us(tenure.started_at) for tenure in tenures.get(pk, [])),
        )
        for pk, slot in slots.items()
    )
    return IntervalRows(window.start_us, window.end_us, _rates(pool, window), rows)


def _by_slot(model: type[SlotTenure] | type[SlotInterval], slots: Mapping[int, Slot], window: Window) -> dict[int, Any]:
    found: dict[int, list[Any]] = {}
    open_or_later = Q(ended_at__isnull=True) | Q(ended_at__gt=window.start)
    rows = model.objects.filter(open_or_later, slot_id__in=list(slots), started_at__lt=window.end)
    for row in rows.order_by("started_at", "id"):
        found.setdefault(row.slot_id, []).append(row)
    return found


def _clip(row: SlotTenure | SlotInterval, window: Window) -> tuple[int, int]:
    end = window.end if row.ended_at is None else min(row.ended_at, window.end)
    return to_us(max(row.started_at, window.start)), to_us(end)


def _owners(
    pool: Pool, slot: Slot, tenures: Sequence[SlotTenure], intervals: Sequence[SlotInterval], window: Window
) -> tuple[OwnerInterval, ...]:
    """Owners that tile the tenures inside the window; time that no interval covers belongs to the band's home class."""
    home = home_class(pool, slot.band)
    owners: list[OwnerInterval] = []
    for tenure in tenures:
        at_us, end_us = _clip(tenure, window)
        for row in intervals:
            from_, to = _clip(row, window)
            from_, to = max(from_, at_us), min(to, end_us)
            if from_ >= to:
                continue
            if from_ > at_us:
                owners.append(OwnerInterval(home or None, at_us, from_))
            owners.append(_owner(row, from_, to, home))
            at_us = to
        if at_us < end_us:
            owners.append(OwnerInterval(home or None, at_us, end_us))
    return tuple(owners)


def _owner(row: SlotInterval, start_us: int, end_us: int, home: str) -> OwnerInterval:
    state = OwnedState.READY
    if row.state == SlotState.LOST:
        state = OwnedState.UNOBSERVED
    elif row.state in BORROWED and row.state != SlotState.LENT:
        state = OwnedState.DRAINING
    lender = home if home and row.state in BORROWED and row.owner_class != home else None
    return OwnerInterval(row.owner_class or None, start_us, end_us, state, lender)


def _rates(pool: Pool, window: Window) -> tuple[RateSegment, ...]:
    """The rates in force over the window, cut where one begins; the first part is without when none was before."""
    rates = list(
        CostRate.objects.filter(pool=pool, effective_from__lt=window.end)
        .order_by("effective_from")
        .values_list("effective_from", "nanos_per_slot_hour")
    )
    before = [nanos for at, nanos in rates if at <= window.start]
    inside = [(to_us(at), nanos) for at, nanos in rates if at > window.start]
    starts = [(window.start_us, before[-1] if before else None), *inside]
    ends = [at for at, _ in inside] + [window.end_us]
    return tuple(RateSegment(start, end, nanos) for (start, nanos), end in zip(starts, ends, strict=True))
