"""Which reported numbers can be counted: every check runs over whole columns, and what fails goes to quarantine.

A wrong clock, an unknown tenant or a charge that the rate card does not give is set aside with its reason; totals stay
untouched by it and the agent is told how many rows were set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from controlplane.core.money import round_ratio
from controlplane.core.pricing import HOUR_US, MTOK, PPM
from controlplane.core.reasons import Outcome
from controlplane.usage.records import FIELDS, INTEGERS, Ints, Records
from controlplane.usage.rollup_keys import group_by
from controlplane.wire.report import (
    FLAG_CAPPED,
    FLAG_ESTIMATED,
    FLAG_NOT_CHARGED,
    FLAG_OUTAGE,
    FLAG_STREAMED,
    FLAG_TOKENLESS,
)

FUTURE_US = 300_000_000
MINUTE_US = 60_000_000
_INT4_MAX = 2**31 - 1
_CHARGE_MAX = 2**53
_CHARGES = slice(FIELDS.index("charge_prompt_nanos"), FIELDS.index("charge_gpu_nanos") + 1)
_FLAGS = FLAG_STREAMED | FLAG_ESTIMATED | FLAG_NOT_CHARGED | FLAG_OUTAGE | FLAG_TOKENLESS | FLAG_CAPPED
_COMPLETED = Outcome.COMPLETED.code


class Fault(IntEnum):
    """Why a record was set aside, in the order of precedence; NONE is a good record. The names are the reasons."""

    NONE = 0
    UNREADABLE = 1
    NEGATIVE_NUMBER = 2
    ABSURD_NUMBER = 3
    IMPOSSIBLE_TIMES = 4
    IN_THE_FUTURE = 5
    TOO_OLD = 6
    UNKNOWN_TENANT = 7
    UNKNOWN_CLASS = 8
    UNKNOWN_MODEL = 9
    UNKNOWN_SLOT = 10
    UNKNOWN_RATE = 11
    WRONG_CHARGE = 12
    DUPLICATE_IN_REPORT = 13

    @property
    def reason(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Card:
    """A rate card by its version, with what it is for."""

    class_slug: str
    model_id: int
    prompt_nanos_per_mtok: int
    cached_nanos_per_mtok: int
    output_nanos_per_mtok: int
    gpu_nanos_per_slot_hour: int
    discount_ppm: int


@dataclass(frozen=True)
class ClassFacts:
    slug: str
    batch: bool


@dataclass(frozen=True)
class Members:
    """Tenants and classes of one revision of one pool."""

    tenants: frozenset[int]
    classes: frozenset[int]


@dataclass
class Known:
    """What exists, by id: the slots of each pool, tenants, classes, models, rate cards, contract versions.

    `members` gives the tenants and classes of a pool's revision, or None where there is no such revision: then
    everything that exists counts as known.
    """

    slot_pools: dict[int, int] = field(default_factory=dict)
    tenants: frozenset[int] = frozenset()
    classes: dict[int, ClassFacts] = field(default_factory=dict)
    models: frozenset[int] = frozenset()
    cards: dict[int, Card] = field(default_factory=dict)
    contract_versions: frozenset[int] = frozenset()
    members: Callable[[int, int], Members | None] = lambda pool_id, revision: None


@dataclass(frozen=True)
class Bounds:
    """The instants between which a record may have ended."""

    oldest_us: int
    newest_us: int

    @classmethod
    def at(cls, now_us: int, *, spool_age_us: int) -> Bounds:
        return cls(oldest_us=now_us - spool_age_us, newest_us=now_us + FUTURE_US)


def charged_nanos(payload: object) -> int | None:
    """What records that were set aside say they were charged; None where one of them says nothing that can be true."""
    rows = payload.get("records") if isinstance(payload, dict) else None
    if not isinstance(rows, list):
        return None
    charges = [value for row in rows for value in row[_CHARGES]]
    if not all(type(value) is int and 0 <= value <= _CHARGE_MAX for value in charges):
        return None
    whole = sum(charges)
    return whole if whole < 2**63 else None


def find_faults(records: Records, known: Known, bounds: Bounds) -> NDArray[np.int8]:
    """The first `Fault` of each record.

    An attempt that stands twice in one report counts once. One that comes again in a later report is not found here:
    that would cost an index over every record of the table; it is for an audit of the stored records, once an hour.
    """
    faults = np.zeros(len(records), dtype=np.int8)
    if not len(records):
        return faults

    def mark(wrong: NDArray[np.bool_], fault: Fault) -> None:
        if wrong.any():
            faults[wrong & (faults == 0)] = fault

    _mark_numbers(records, bounds, mark)
    _mark_times(records, bounds, mark)
    _mark_unknown(records, known, mark)
    _mark_charges(records, known, faults, mark)
    _mark_duplicates(records, faults)
    return faults


Mark = Callable[[NDArray[np.bool_], Fault], None]
Limits = dict[str, tuple[int, int]]


def _limits(bounds: Bounds) -> Limits:
    """The least and the greatest value of each column; a value under the least is negative, over it absurd."""
    longest_us = bounds.newest_us - bounds.oldest_us
    limits: Limits = dict.fromkeys(INTEGERS, (0, _INT4_MAX))
    limits |= {name: (-1, longest_us) for name in INTEGERS if name.endswith("_us")}
    limits |= {name: (0, _CHARGE_MAX) for name in INTEGERS if name.startswith("charge_")}
    limits |= {
        "arrived_us": (-(2**62), 2**62),
        "ended_us": (-(2**62), 2**62),
        "gpu_us": (0, 64 * longest_us),
        "estimated_gpu_us": (0, 64 * longest_us),
        "slot_id": (-1, _INT4_MAX),
        "attempt": (0, 10_000),
        "outcome": (1, 31),
        "status": (0, 999),
        "flags": (0, _FLAGS),
    }
    return limits


def _mark_numbers(records: Records, bounds: Bounds, mark: Mark) -> None:
    # One look at each column's extremes: only a column that has a wrong value is gone through.
    least, greatest = records.integers.min(axis=1).tolist(), records.integers.max(axis=1).tolist()
    for at, (name, (low, high)) in enumerate(_limits(bounds).items()):
        if least[at] < low:
            mark(records.column(name) < low, Fault.NEGATIVE_NUMBER)
        if greatest[at] > high:
            mark(records.column(name) > high, Fault.ABSURD_NUMBER)
    mark(records.column("cached_tokens") > records.column("prompt_tokens"), Fault.ABSURD_NUMBER)


def _mark_times(records: Records, bounds: Bounds, mark: Mark) -> None:
    arrived, ended = records.column("arrived_us"), records.column("ended_us")
    mark((ended < arrived) | (arrived <= 0), Fault.IMPOSSIBLE_TIMES)
    mark(ended > bounds.newest_us, Fault.IN_THE_FUTURE)
    # judged by the end: a long request that ends now is a legitimate one
    mark(ended < bounds.oldest_us, Fault.TOO_OLD)


def _mark_unknown(records: Records, known: Known, mark: Mark) -> None:
    names = ("tenant_id", "class_id", "asked_class_id", "model_id")
    tenant, klass, asked, model = (_Column(records.column(name)) for name in names)
    pools, revisions = records.pool_ids, records.column("revision")
    mark(tenant.outside(known.tenants), Fault.UNKNOWN_TENANT)
    for pool_id, revision in group_by([pools, revisions]).keys.T.tolist():
        members = known.members(pool_id, revision)
        if members is None:
            continue
        here = (pools == pool_id) & (revisions == revision)
        mark(here & tenant.outside(members.tenants), Fault.UNKNOWN_TENANT)
        mark(here & klass.outside(members.classes), Fault.UNKNOWN_CLASS)
    mark(klass.outside(known.classes) | asked.outside(known.classes), Fault.UNKNOWN_CLASS)
    mark(model.outside(known.models), Fault.UNKNOWN_MODEL)
    groups = group_by([pools, records.column("slot_id")])
    foreign = [slot != -1 and known.slot_pools.get(slot) != pool for pool, slot in groups.keys.T.tolist()]
    mark(np.array(foreign, dtype=bool)[groups.of], Fault.UNKNOWN_SLOT)


class _Column:
    """A column of ids with its distinct values, so that each is looked up once."""

    def __init__(self, ids: Ints) -> None:
        groups = group_by([ids])
        self._distinct = groups.keys[0].tolist()
        self._of = groups.of

    def outside(self, known: Container[int]) -> NDArray[np.bool_]:
        """True where the id is not among the known."""
        outside = [identity not in known for identity in self._distinct]
        if not any(outside):
            return np.zeros(len(self._of), dtype=bool)
        return np.array(outside, dtype=bool)[self._of]


def _mark_charges(records: Records, known: Known, faults: NDArray[np.int8], mark: Mark) -> None:
    charges = records.rows("charge_prompt_nanos", "charge_gpu_nanos")
    charged = (charges != 0).any(axis=0)
    free = (records.column("flags") & FLAG_NOT_CHARGED) != 0
    mark(free & charged, Fault.WRONG_CHARGE)
    groups = group_by([records.column(name) for name in ("rate_version", "class_id", "model_id")])
    sound = faults == 0
    for number, (version, class_id, model_id) in enumerate(groups.keys.T.tolist()):
        here = sound & (groups.of == number)
        if not here.any():
            continue
        card, facts = known.cards.get(version), known.classes[class_id]
        if version == 0:
            mark(here & charged, Fault.WRONG_CHARGE)
        elif card is None or card.class_slug != facts.slug or card.model_id != model_id:
            mark(here, Fault.UNKNOWN_RATE)
        else:
            at = np.flatnonzero(here & ~free)
            wrong = np.zeros(len(records), dtype=bool)
            wrong[at] = _differs(records, at, card, facts.batch)
            mark(wrong, Fault.WRONG_CHARGE)


def _mark_duplicates(records: Records, faults: NDArray[np.int8]) -> None:
    """Marks every sound record whose report has the same request and attempt before it."""
    sound = np.flatnonzero(faults == Fault.NONE)
    halves = np.ascontiguousarray(records.request_ids[sound]).view(np.int64)
    # ids are random: mostly half of one tells all of them apart
    ordered = np.sort(halves[:, 1])
    if not (ordered[1:] == ordered[:-1]).any():
        return
    groups = group_by([records.source[sound], halves[:, 0], halves[:, 1], records.column("attempt")[sound]])
    first = np.zeros(len(sound), dtype=bool)
    first[np.unique(groups.of, return_index=True)[1]] = True
    faults[sound[~first]] = Fault.DUPLICATE_IN_REPORT


def _differs(records: Records, at: Ints, card: Card, batch: bool) -> NDArray[np.bool_]:
    """True where a charge is not what the card gives.

    A completed request is charged each line exactly, up to its reservation; one that ended otherwise may be charged
    less, never more: only what was delivered is paid for.
    """
    prompt, cached = records.column("prompt_tokens")[at], records.column("cached_tokens")[at]
    output, gpu_us = records.column("output_tokens")[at], records.column("gpu_us")[at]
    keep_ppm = PPM - card.discount_ppm if batch else PPM
    due = np.stack(
        [
            _rounded(prompt - cached, card.prompt_nanos_per_mtok * keep_ppm, MTOK * PPM),
            _rounded(cached, card.cached_nanos_per_mtok * keep_ppm, MTOK * PPM),
            _rounded(output, card.output_nanos_per_mtok * keep_ppm, MTOK * PPM),
            _rounded(gpu_us, card.gpu_nanos_per_slot_hour * keep_ppm, HOUR_US * PPM),
        ]
    )
    charged = records.rows("charge_prompt_nanos", "charge_gpu_nanos")[:, at]
    exact = (records.column("outcome")[at] == _COMPLETED) & ((records.column("flags")[at] & FLAG_CAPPED) == 0)
    return np.where(exact, (charged != due).any(axis=0), (charged > due).any(axis=0))


def _rounded(quantity: Ints, numerator: int, denominator: int) -> Ints:
    """quantity x numerator / denominator, rounded half-even once, exactly (`core.money.round_ratio` over a column)."""
    divisor = int(np.gcd(numerator, denominator)) if numerator < 2**62 else 1
    numerator, denominator = numerator // divisor, denominator // divisor
    largest = int(quantity.max(initial=0))
    if largest * numerator >= 2**61 or 2 * denominator >= 2**61:
        exact = [round_ratio(value * numerator, denominator) for value in quantity.tolist()]
        return np.array([min(value, 2**62) for value in exact], dtype=np.int64)
    whole, rest = np.divmod(quantity * numerator, denominator)
    up = (2 * rest > denominator) | ((2 * rest == denominator) & (whole & 1 == 1))
    return whole + up
