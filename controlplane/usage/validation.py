"""Which reported numbers can be counted: every check runs over whole columns, and what fails goes to quarantine.

A wrong clock, an unknown tenant or a charge that the rate card does not give is set aside with its reason; totals stay
untouched by it and the agent is told how many rows were set aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from controlplane.core.money import round_ratio
from controlplane.core.pricing import HOUR_US, MTOK, PPM
from controlplane.core.reasons import Outcome
from controlplane.usage.records import Ints, Records
from controlplane.wire.report import FLAG_ESTIMATED, FLAG_NOT_CHARGED, FLAG_STREAMED

FUTURE_US = 300_000_000
MINUTE_US = 60_000_000
_INT4_MAX = 2**31 - 1
_CHARGE_MAX = 2**53
_FLAGS = FLAG_STREAMED | FLAG_ESTIMATED | FLAG_NOT_CHARGED
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


def find_faults(records: Records, known: Known, bounds: Bounds) -> NDArray[np.int8]:
    """The first `Fault` of each record."""
    faults = np.zeros(len(records), dtype=np.int8)
    if not len(records):
        return faults

    def mark(wrong: NDArray[np.bool_], fault: Fault) -> None:
        faults[wrong & (faults == 0)] = fault

    _mark_numbers(records, bounds, mark)
    _mark_times(records, bounds, mark)
    _mark_unknown(records, known, mark)
    _mark_charges(records, known, faults, mark)
    return faults


Mark = Callable[[NDArray[np.bool_], Fault], None]


def _mark_numbers(records: Records, bounds: Bounds, mark: Mark) -> None:
    counts = records.rows("prompt_tokens", "output_tokens")
    stages = records.rows("admission_us", "ttft_us")
    gpu = records.rows("gpu_us", "estimated_gpu_us")
    charges = records.rows("charge_prompt_nanos", "charge_gpu_nanos")
    ids = records.integers
    column = records.column
    mark((counts < 0).any(axis=0) | (stages < -1).any(axis=0) | (gpu < 0).any(axis=0), Fault.NEGATIVE_NUMBER)
    mark((charges < 0).any(axis=0) | (column("attempt") < 0) | (column("slot_id") < -1), Fault.NEGATIVE_NUMBER)
    longest_us = bounds.newest_us - bounds.oldest_us
    absurd = (counts > _INT4_MAX).any(axis=0) | (stages > longest_us).any(axis=0) | (gpu > 64 * longest_us).any(axis=0)
    absurd |= (charges > _CHARGE_MAX).any(axis=0) | (column("cached_tokens") > column("prompt_tokens"))
    absurd |= (column("attempt") > 10_000) | (column("outcome") < 1) | (column("outcome") > 31)
    absurd |= (column("status") < 0) | (column("status") > 999) | ((column("flags") & ~_FLAGS) != 0)
    for name in ("slot_id", "tenant_id", "key_id", "class_id", "asked_class_id", "model_id", "revision"):
        absurd |= np.abs(column(name)) > _INT4_MAX
    absurd |= (column("rate_version") < 0) | (column("rate_version") > _INT4_MAX)
    absurd |= (ids == np.iinfo(np.int64).min).any(axis=0)
    mark(absurd, Fault.ABSURD_NUMBER)


def _mark_times(records: Records, bounds: Bounds, mark: Mark) -> None:
    arrived, ended = records.column("arrived_us"), records.column("ended_us")
    mark((ended < arrived) | (arrived <= 0), Fault.IMPOSSIBLE_TIMES)
    mark(ended > bounds.newest_us, Fault.IN_THE_FUTURE)
    # judged by the end: a long request that ends now is a legitimate one
    mark(ended < bounds.oldest_us, Fault.TOO_OLD)


def _mark_unknown(records: Records, known: Known, mark: Mark) -> None:
    tenants, classes, asked = records.column("tenant_id"), records.column("class_id"), records.column("asked_class_id")
    pools, revisions = records.pool_ids, records.column("revision")
    mark(~np.isin(tenants, list(known.tenants)), Fault.UNKNOWN_TENANT)
    pairs = np.unique(np.stack([pools, revisions]), axis=1).T.tolist()
    for pool_id, revision in pairs:
        members = known.members(pool_id, revision)
        if members is None:
            continue
        here = (pools == pool_id) & (revisions == revision)
        mark(here & ~np.isin(tenants, list(members.tenants)), Fault.UNKNOWN_TENANT)
        mark(here & ~np.isin(classes, list(members.classes)), Fault.UNKNOWN_CLASS)
    mark(~np.isin(classes, list(known.classes)) | ~np.isin(asked, list(known.classes)), Fault.UNKNOWN_CLASS)
    mark(~np.isin(records.column("model_id"), list(known.models)), Fault.UNKNOWN_MODEL)
    slots = records.column("slot_id")
    own = np.zeros(len(records), dtype=bool)
    for pool_id in np.unique(pools).tolist():
        slots_here = [slot for slot, pool in known.slot_pools.items() if pool == pool_id]
        own |= (pools == pool_id) & np.isin(slots, slots_here)
    mark((slots != -1) & ~own, Fault.UNKNOWN_SLOT)


def _mark_charges(records: Records, known: Known, faults: NDArray[np.int8], mark: Mark) -> None:
    versions, classes, models = records.column("rate_version"), records.column("class_id"), records.column("model_id")
    charges = records.rows("charge_prompt_nanos", "charge_gpu_nanos")
    free = (records.column("flags") & FLAG_NOT_CHARGED) != 0
    mark(free & (charges != 0).any(axis=0), Fault.WRONG_CHARGE)
    sound = faults == 0
    triples = np.unique(np.stack([versions[sound], classes[sound], models[sound]]), axis=1).T.tolist()
    for version, class_id, model_id in triples:
        here = sound & (versions == version) & (classes == class_id) & (models == model_id)
        card = known.cards.get(version)
        facts = known.classes[class_id]
        if version == 0:
            mark(here & (charges != 0).any(axis=0), Fault.WRONG_CHARGE)
        elif card is None or card.class_slug != facts.slug or card.model_id != model_id:
            mark(here, Fault.UNKNOWN_RATE)
        else:
            at = np.flatnonzero(here & ~free)
            wrong = np.zeros(len(records), dtype=bool)
            wrong[at] = _differs(records, at, card, facts.batch)
            mark(wrong, Fault.WRONG_CHARGE)


def _differs(records: Records, at: Ints, card: Card, batch: bool) -> NDArray[np.bool_]:
    """True where a charge is not what the card gives.

    A completed request is charged each line exactly; one that ended otherwise may be charged less, never more: only
    what was delivered is paid for.
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
    completed = records.column("outcome")[at] == _COMPLETED
    return np.where(completed, (charged != due).any(axis=0), (charged > due).any(axis=0))


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
