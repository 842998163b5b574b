"""The life of a batch item: its states, what may follow what, and what a reported result makes of it.

Pure: the caller gives the item as it is stored and what was reported, and applies the answer under its lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from controlplane.core.reasons import OUTCOME_CODES, Outcome

FAILURES_MOST: Final = 3
"""So many failed attempts park an item."""
ATTEMPTS_MOST: Final = 20
"""So many attempts park an item whose leases lapse again and again: it may be what ends its agents."""


UNPAID: Final = "It waits for money"
"""How an agent's reason begins when it hands back an item that no budget pays for."""


class ItemState(IntEnum):
    """The codes stand in the database and are never given to another meaning."""

    WAITING = 0
    LEASED = 1
    DONE = 2
    PARKED = 3
    CANCELLED = 4


FOLLOWS: Final[dict[ItemState, frozenset[ItemState]]] = {
    ItemState.WAITING: frozenset({ItemState.LEASED, ItemState.DONE, ItemState.CANCELLED}),
    ItemState.LEASED: frozenset({ItemState.WAITING, ItemState.DONE, ItemState.PARKED, ItemState.CANCELLED}),
    ItemState.DONE: frozenset(),
    ItemState.PARKED: frozenset({ItemState.WAITING, ItemState.CANCELLED}),
    ItemState.CANCELLED: frozenset(),
}
"""What may follow each state. WAITING to DONE: a result that came after its lease had lapsed and before the next."""


class Refused(StrEnum):
    """Why a reported result was not taken. Its usage is work that was repeated: nobody is charged for it."""

    UNKNOWN_ITEM = "unknown_item"
    NEVER_LEASED = "never_leased"
    HAS_RESULT = "has_result"
    ENDED = "ended"
    LAPSED = "lapsed"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as it stands. `fence` is the newest lease it was given, 0 before the first."""

    state: ItemState
    attempt: int
    failures: int
    fence: int
    cancelled: bool
    """Whether its job was cancelled."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The end of an attempt: the lease it ran under, the code of its outcome and the engine's status."""

    fence: int
    outcome: int
    status: int


@dataclass(frozen=True, slots=True)
class Judged:
    """What becomes of the item. `charged`: whether the attempt's usage is charged; `result`: whether it is stored."""

    state: ItemState
    attempt: int
    failures: int
    charged: bool
    result: bool
    refused: Refused | None = None


_COMPLETED = OUTCOME_CODES[Outcome.COMPLETED]
_CANCELLED = OUTCOME_CODES[Outcome.CANCELLED_BY_CLIENT]
_HANDED_BACK = frozenset({OUTCOME_CODES[Outcome.CANCELLED_BY_DRAIN], OUTCOME_CODES[Outcome.DISPLACED]})
_TRIED_AGAIN = frozenset({408, 409, 429})


def judge(item: StoredItem, reported: Reported) -> Judged:
    """What a reported end of an attempt makes of an item. The first accepted result wins, whoever brings it."""
    if not 0 < reported.fence <= item.fence:
        return _refused(item, Refused.NEVER_LEASED)
    if item.state is ItemState.DONE:
        return _refused(item, Refused.HAS_RESULT)
    if item.state in (ItemState.PARKED, ItemState.CANCELLED):
        return _refused(item, Refused.ENDED)
    if reported.outcome == _COMPLETED and 200 <= reported.status < 300:
        return Judged(ItemState.DONE, item.attempt, item.failures, charged=True, result=True)
    if item.state is not ItemState.LEASED or reported.fence != item.fence:
        return _refused(item, Refused.LAPSED)
    return _not_done(item, reported)


def _not_done(item: StoredItem, reported: Reported) -> Judged:
    if item.cancelled:
        # its owner ended it: what ran until then is paid for
        charged = reported.outcome == _CANCELLED
        return Judged(ItemState.CANCELLED, item.attempt, item.failures, charged=charged, result=False)
    if reported.outcome in _HANDED_BACK:
        return Judged(ItemState.WAITING, item.attempt, item.failures, charged=False, result=False)
    failures = item.failures + 1
    if is_verdict(reported.status):
        return Judged(ItemState.PARKED, item.attempt, failures, charged=False, result=True)
    if failures >= FAILURES_MOST:
        return Judged(ItemState.PARKED, item.attempt, failures, charged=False, result=True)
    return Judged(ItemState.WAITING, item.attempt + 1, failures, charged=False, result=False)


def is_verdict(status: int) -> bool:
    """Whether a status speaks about the request itself, so that trying again would end the same."""
    return 400 <= status < 500 and status not in _TRIED_AGAIN


def lapse(item: StoredItem) -> Judged:
    """What the end of a lease without a result makes of a leased item: it is no failure of the request."""
    if item.cancelled:
        return Judged(ItemState.CANCELLED, item.attempt, item.failures, charged=False, result=False)
    if item.attempt >= ATTEMPTS_MOST:
        return Judged(ItemState.PARKED, item.attempt, item.failures, charged=False, result=False)
    return Judged(ItemState.WAITING, item.attempt + 1, item.failures, charged=False, result=False)


def _refused(item: StoredItem, why: Refused) -> Judged:
    return Judged(item.state, item.attempt, item.failures, charged=False, result=False, refused=why)
