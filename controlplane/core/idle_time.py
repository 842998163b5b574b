"""Owned time of slots by class and cause, and which part of it was idle. Durations are integer microseconds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise


class Band(StrEnum):
    """A slot's permanent home. A slot of a pool without bands has none."""

    INTERACTIVE_FLOOR = "interactive_floor"
    BATCH_FLOOR = "batch_floor"
    FLEX = "flex"


class OwnedState(StrEnum):
    """What a slot was during an ownership interval."""

    READY = "ready"
    UNOBSERVED = "unobserved"
    BROKEN = "broken"
    WARMING = "warming"
    DRAINING = "draining"


class IdleCause(StrEnum):
    """Why owned time was not busy, in order of precedence; `unused` is idle of a slot that has no band."""

    UNOBSERVED = "unobserved"
    BROKEN = "broken"
    WARMING = "warming"
    DRAINING = "draining"
    LENT_UNUSED = "lent_unused"
    BATCH_FLOOR_UNUSED = "batch_floor_unused"
    INTERACTIVE_FLOOR_UNUSED = "interactive_floor_unused"
    FLEX_NOT_LENT = "flex_not_lent"
    UNUSED = "unused"


_NEVER_BUSY = frozenset({IdleCause.UNOBSERVED, IdleCause.BROKEN, IdleCause.WARMING})
_BY_STATE = {
    OwnedState.UNOBSERVED: IdleCause.UNOBSERVED,
    OwnedState.BROKEN: IdleCause.BROKEN,
    OwnedState.WARMING: IdleCause.WARMING,
    OwnedState.DRAINING: IdleCause.DRAINING,
}
_BY_BAND = {
    Band.BATCH_FLOOR: IdleCause.BATCH_FLOOR_UNUSED,
    Band.INTERACTIVE_FLOOR: IdleCause.INTERACTIVE_FLOOR_UNUSED,
    Band.FLEX: IdleCause.FLEX_NOT_LENT,
}


@dataclass(frozen=True, slots=True)
class OwnerInterval:
    """A class owns a slot over [start_us, end_us); None where no class does. `lender` is the class that lent it.

    DRAINING, CANCELLING and OVERDUE count to the borrower: class_ is the borrower and the state is `draining`.
    """

    class_: str | None
    start_us: int
    end_us: int
    state: OwnedState = OwnedState.READY
    lender: str | None = None


@dataclass(frozen=True, slots=True)
class SlotTenure:
    """A slot, its share of a GPU in rate units, and its owners. Owners tile each tenure without gap or overlap.

    `tenures` are (enrolled_us, retired_us) pairs; without them the owners must be one unbroken stretch.
    """

    slot: str
    owners: tuple[OwnerInterval, ...]
    band: Band | None = None
    gpu_share: Fraction = Fraction(1)
    tenures: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class OwnedKey:
    """Owner class, band and the cause that idle time of it has."""

    class_: str | None
    band: Band | None
    cause: IdleCause


def idle_cause(owner: OwnerInterval, band: Band | None) -> IdleCause:
    """First cause that holds for idle time of an ownership interval."""
    if owner.state in _BY_STATE:
        return _BY_STATE[owner.state]
    if owner.lender is not None:
        return IdleCause.LENT_UNUSED
    return IdleCause.UNUSED if band is None else _BY_BAND[band]


def check_tiling(slot: SlotTenure) -> None:
    """Raise ValueError unless owners are ordered, not empty, and tile the tenures without gap or overlap."""
    owners = sorted(slot.owners, key=lambda owner: owner.start_us)
    for owner in owners:
        if owner.end_us <= owner.start_us:
            raise ValueError(f"slot {slot.slot} has an owner whose end is not after its start")
    stretches: list[tuple[int, int]] = []
    for owner in owners:
        if stretches and owner.start_us < stretches[-1][1]:
            raise ValueError(f"slot {slot.slot} has two owners at {owner.start_us} us: ownership must not overlap")
        if stretches and owner.start_us == stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], owner.end_us)
        else:
            stretches.append((owner.start_us, owner.end_us))
    if slot.tenures:
        if stretches != _joined(slot):
            raise ValueError(f"slot {slot.slot}: owners do not tile its tenures")
    elif len(stretches) > 1:
        raise ValueError(f"slot {slot.slot} has no owner from {stretches[0][1]} to {stretches[1][0]} us")


def _joined(slot: SlotTenure) -> list[tuple[int, int]]:
    tenures = sorted(slot.tenures)
    if any(left[1] > right[0] for left, right in pairwise(tenures)):
        raise ValueError(f"slot {slot.slot} has tenures that overlap")
    joined: list[tuple[int, int]] = []
    for start_us, end_us in tenures:
        if joined and joined[-1][1] == start_us:
            joined[-1] = (joined[-1][0], end_us)
        else:
            joined.append((start_us, end_us))
    return joined


def owned_by_key(slot: SlotTenure, start_us: int, end_us: int) -> dict[OwnedKey, int]:
    """Owned time of a slot inside [start_us, end_us) by class, band and idle cause."""
    check_tiling(slot)
    owned: dict[OwnedKey, int] = {}
    for owner in slot.owners:
        us = min(owner.end_us, end_us) - max(owner.start_us, start_us)
        if us > 0:
            key = OwnedKey(owner.class_, slot.band, idle_cause(owner, slot.band))
            owned[key] = owned.get(key, 0) + us
    return owned


def unobserved(owned: Mapping[OwnedKey, int]) -> dict[OwnedKey, int]:
    """All owned time as idle of cause `unobserved`: what a meter that disagrees leaves known."""
    idle: dict[OwnedKey, int] = {}
    for key, us in owned.items():
        blind = OwnedKey(key.class_, key.band, IdleCause.UNOBSERVED)
        idle[blind] = idle.get(blind, 0) + us
    return idle


def idle_by_key(owned: Mapping[OwnedKey, int], busy_us_by_class: Mapping[str, int]) -> dict[OwnedKey, Fraction | int]:
    """Owned less busy. Busy time is taken from what its class owned, then from what no class owned, then from the rest.

    Inside one class it is taken from all causes in proportion; from unobserved, broken and warming time only when
    nothing else is left. The sum of busy time must not exceed the sum of owned time (ValueError).
    """
    if sum(busy_us_by_class.values()) > sum(owned.values()):
        raise ValueError("more busy time than owned time: the meter disagrees")
    if len(owned) == 1:  # the usual slot: one owner, one cause, integers throughout
        ((key, us),) = owned.items()
        return {key: us - sum(busy_us_by_class.values())}
    left = {key: Fraction(us) for key, us in owned.items()}
    overrun = Fraction(0)
    for class_, busy_us in sorted(busy_us_by_class.items()):
        overrun += _take(left, [key for key in left if key.class_ == class_], Fraction(busy_us))
    overrun = _take(left, [key for key in left if key.class_ is None], overrun)
    _take(left, list(left), overrun)
    return {**left}


def _take(left: dict[OwnedKey, Fraction], keys: Iterable[OwnedKey], amount: Fraction) -> Fraction:
    """Take an amount from keys in place and return what could not be taken."""
    keys = list(keys)
    for never_busy in (False, True):
        group = [key for key in keys if (key.cause in _NEVER_BUSY) is never_busy]
        available = sum((left[key] for key in group), Fraction(0))
        if not amount or not available:
            continue
        taken = min(amount, available)
        for key in group:
            left[key] -= left[key] * taken / available
        amount -= taken
    return amount
