"""Group commit: reports that arrive within a few milliseconds are one transaction, acknowledged after its commit."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Generic, TypeVar

import psycopg
from psycopg import errors

from controlplane.exchange.composition import Result, commit_as_poisoned, commit_group
from controlplane.exchange.database import connection
from controlplane.exchange.messages import Incoming
from controlplane.usage.cursors import CursorMoved
from controlplane.usage.partitions import ensure_day

log = logging.getLogger(__name__)

WINDOW_S = 0.005
ROWS_MAX = 10_000
ITEMS_MAX = 500
"""Reports of one group: the last one waits for the answers of all before it."""
FLUSHERS = 2
RETRIES = 4

TURN = (errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable, CursorMoved)
# What a report can cause by what it says; everything else is ours (a lost server, a missing table, a fault of the code)
# and must never put good reports aside.
POISON = (psycopg.DataError, psycopg.IntegrityError, ValueError, ArithmeticError)


class NotStored(Exception):
    """The database could not take the report now; the agent keeps it and sends it again."""


Outcome = Result | NotStored
Commit = Callable[[Sequence[Incoming], datetime], list[Outcome]]


def store_group(group: Sequence[Incoming], now: datetime) -> list[Outcome]:
    """Commits a group; when it fails, each report alone, so that a bad one never takes others with it."""
    try:
        return list(_with_turns(group, now))
    except (psycopg.OperationalError, psycopg.InterfaceError, OSError) as error:
        log.warning("reports were not stored, their agents send them again: %s", error)
        return [NotStored(str(error))] * len(group)
    except POISON as error:
        if len(group) == 1:
            return [_store_poisoned(group[0], error, now)]
        log.warning("a group of %d reports failed, taking each alone: %s", len(group), error)
    except Exception as error:
        if len(group) == 1:
            log.error("a report was not stored, its agent sends it again", exc_info=error)
            return [NotStored(str(error))]
    return [outcome for incoming in group for outcome in store_group([incoming], now)]


def _with_turns(group: Sequence[Incoming], now: datetime) -> list[Result]:
    """Commits a group, again after a pause when another transaction was in its way."""
    for attempt in range(RETRIES):
        try:
            with connection() as held:
                ensure_day(held.cursor(), now)
                return commit_group(held, group, now)
        except TURN as error:
            log.info("a group of reports takes another turn: %s", error)
            time.sleep(random.uniform(0.005, 0.02) * 2**attempt)  # noqa: S311 - jitter, not a secret
    raise psycopg.OperationalError("other transactions were in the way too often")


def _store_poisoned(incoming: Incoming, error: Exception, now: datetime) -> Outcome:
    log.error(
        "the report %s of agent %s epoch %s goes to quarantine",
        incoming.envelope.seq,
        incoming.envelope.agent_id,
        incoming.envelope.epoch,
        exc_info=error,
    )
    try:
        with connection() as held:
            return commit_as_poisoned(held, incoming, f"{type(error).__name__}: {error}", now)
    except (psycopg.Error, OSError) as second:
        log.error("the quarantine failed too, the agent keeps the report", exc_info=second)
        return NotStored(str(second))


Item = TypeVar("Item")
Answer = TypeVar("Answer")
Work = Callable[[Sequence[Item], datetime], Sequence[Answer]]


class Groups(Generic[Item, Answer]):
    """Coalesces what one process is given to do. Of one key at most one item is worked on at a time.

    `work` runs on a thread and answers every item of a group; `failed` answers for it when it raises.
    """

    def __init__(
        self,
        work: Work[Item, Answer],
        *,
        key: Callable[[Item], Hashable],
        weight: Callable[[Item], int],
        failed: Callable[[Exception], Answer],
        window_s: float = WINDOW_S,
        rows_max: int = ROWS_MAX,
        items_max: int = ITEMS_MAX,
        flushers: int = FLUSHERS,
    ) -> None:
        self._work = work
        self._key = key
        self._weight = weight
        self._failed = failed
        self._window_s = window_s
        self._rows_max = rows_max
        self._items_max = items_max
        self._flushers = flushers
        self._threads = ThreadPoolExecutor(flushers, thread_name_prefix="exchange-commit")
        self._waiting: deque[_Waiting[Item, Answer]] = deque()
        self._rows = 0
        self._busy: set[Hashable] = set()
        self._running = 0
        self._timer: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, item: Item, done: Callable[[Answer], None]) -> None:
        """Takes an item; `done` is called with its answer, on the event loop."""
        weight = self._weight(item)
        self._waiting.append((item, self._key(item), weight, done))
        self._rows += weight
        if self._rows >= self._rows_max:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._window_s, self._flush)

    def close(self) -> None:
        """Ends the threads when what they do is done."""
        self._threads.shutdown()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._running < self._flushers and (batch := self._take()):
            self._running += 1
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _take(self) -> list[_Waiting[Item, Answer]]:
        batch: list[_Waiting[Item, Answer]] = []
        left: list[_Waiting[Item, Answer]] = []
        rows = 0
        while self._waiting and rows < self._rows_max and len(batch) < self._items_max:
            waiting = self._waiting.popleft()
            if waiting[1] in self._busy:
                left.append(waiting)
                continue
            self._busy.add(waiting[1])
            batch.append(waiting)
            rows += waiting[2]
        self._waiting.extendleft(reversed(left))
        self._rows -= rows
        return batch

    async def _run(self, batch: list[_Waiting[Item, Answer]]) -> None:
        loop = asyncio.get_running_loop()
        group = [waiting[0] for waiting in batch]
        try:
            answers = await loop.run_in_executor(self._threads, self._work, group, datetime.now(UTC))
        except Exception as error:
            log.error("a group of reports could not be handled", exc_info=error)
            answers = [self._failed(error)] * len(batch)
        finally:
            self._running -= 1
            self._busy.difference_update([waiting[1] for waiting in batch])
        # the next group begins before this one is answered: its answers bring new ones
        if self._waiting and self._timer is None:
            self._timer = loop.call_soon(self._flush)
        for waiting, answer in zip(batch, answers, strict=True):
            try:
                waiting[3](answer)
            except Exception as error:
                log.error("a report's answer could not be given", exc_info=error)


_Waiting = tuple[Item, Hashable, int, Callable[[Answer], None]]
"""An item, its key and weight, and what is called with its answer."""


class GroupCommit(Groups[Incoming, Outcome]):
    """Coalesces reports of one process into transactions, of an epoch at most one at a time."""

    def __init__(self, commit: Commit = store_group, *, window_s: float = WINDOW_S) -> None:
        super().__init__(
            commit, key=_key, weight=_weight, failed=lambda error: NotStored(str(error)), window_s=window_s
        )

    async def submit(self, incoming: Incoming) -> Result:
        """The result once it is committed. Raises NotStored when it could not be stored now."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.offer(incoming, partial(_settle, future))
        outcome = await future
        if isinstance(outcome, NotStored):
            raise outcome
        return outcome


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


def _key(incoming: Incoming) -> tuple[int, int]:
    return incoming.envelope.agent_id, incoming.envelope.epoch


def _weight(incoming: Incoming) -> int:
    return 1 + len(incoming.rows) + len(incoming.report.items_done)
