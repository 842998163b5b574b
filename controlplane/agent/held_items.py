"""Batch items that are leased to this process: what waits in which order, what is queued or runs."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from controlplane.wire.report import Item, ItemJob

if TYPE_CHECKING:
    from controlplane.agent.api_fields import ApiBody
    from controlplane.agent.call import Call

BEST_EFFORT_US: Final = 1 << 61
MARGIN_US: Final = 10_000_000
"""Before its lease ends an item that has not begun is handed back, so that its next lease is no new attempt."""
LEARNT_ENDS: Final = 20
JOBS_KEPT: Final = 256


class ItemPhase(StrEnum):
    """Where an item is on this agent: in its own queue, in the queue of its class, or on a slot."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    GONE = "gone"


class HeldJob:
    """A job of which items were leased to this process, with what one of them has cost so far."""

    __slots__ = ("ended", "gpu_us", "items", "job", "unpaid_since_us")

    def __init__(self, job: ItemJob) -> None:
        self.job = job
        self.items: dict[int, HeldItem] = {}
        """By fence."""
        self.ended = 0
        self.gpu_us = 0
        self.unpaid_since_us: int | None = None
        """Since when nothing pays for its items."""

    def learn(self, gpu_us: int) -> None:
        """An item completed."""
        self.ended += 1
        self.gpu_us += gpu_us

    @property
    def mean_gpu_us(self) -> int | None:
        """None while too few have completed."""
        return self.gpu_us // self.ended if self.ended >= LEARNT_ENDS else None


class HeldItem:
    """One item and its lease; `expires_us` is on the boot clock."""

    __slots__ = ("attempt", "body", "call", "cancelled", "expires_us", "fence", "job", "lane", "line", "margin_us",
                 "parsed", "phase", "prompt_tokens")  # fmt: skip

    def __init__(self, item: Item, job: HeldJob, lane: Lane, *, sent_boot_us: int) -> None:
        self.job = job
        self.lane = lane
        self.line = item.line
        self.attempt = item.attempt
        self.fence = item.fence
        self.body = bytes(item.body)
        self.prompt_tokens = item.prompt_tokens
        self.expires_us = sent_boot_us + item.lease_us
        self.margin_us = min(MARGIN_US, item.lease_us // 4)
        self.phase = ItemPhase.WAITING
        self.cancelled = False
        self.call: Call | None = None
        self.parsed: ApiBody | None = None

    def may_begin(self, boot_us: int) -> bool:
        """Whether enough of its lease is left."""
        return boot_us < self.expires_us - self.margin_us


def due_of(item: HeldItem) -> int:
    """The deadline that orders an item among others; best effort comes last."""
    due_us = item.job.job.deadline_us
    return BEST_EFFORT_US if due_us is None else due_us


class Lane:
    """What waits of one tenant and key: the earliest deadline first, in the order of leases where it is equal."""

    __slots__ = ("_heap", "queued", "retry_us", "tenant_id", "waiting")

    def __init__(self, tenant_id: int) -> None:
        self.tenant_id = tenant_id
        self.queued = 0
        """Of its items, those in the queue of their class."""
        self.waiting = 0
        self.retry_us = 0
        """Not tried before that: something stood in the way of its first item."""
        self._heap: list[tuple[int, int, HeldItem]] = []

    def push(self, item: HeldItem) -> None:
        heappush(self._heap, (due_of(item), item.fence, item))
        self.waiting += 1

    def first(self) -> HeldItem | None:
        """The item that goes next; it stays."""
        while self._heap and self._heap[0][2].phase is not ItemPhase.WAITING:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Take out the first."""
        heappop(self._heap)
        self.waiting -= 1

    def remove(self, item: HeldItem) -> None:
        """An item ends here without having begun: it is passed over when it comes to the front."""
        item.phase = ItemPhase.GONE
        self.waiting -= 1


class HeldItems:
    """All items of this process."""

    def __init__(self) -> None:
        self.by_fence: dict[int, HeldItem] = {}
        self.jobs: dict[int, HeldJob] = {}
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.bytes = 0

    def know(self, job: ItemJob) -> None:
        """A job that the items beside it belong to."""
        known = self.jobs.get(job.job_id)
        if known is None:
            self.jobs[job.job_id] = HeldJob(job)
        else:
            known.job = job

    def take(self, item: Item, *, sent_boot_us: int) -> HeldItem | None:
        """Hold a leased item; None when its job was not told."""
        job = self.jobs.get(item.job_id)
        if job is None:
            return None
        place = job.job.tenant_id, job.job.key_id
        lane = self.lanes.get(place)
        if lane is None:
            lane = self.lanes[place] = Lane(job.job.tenant_id)
        held = HeldItem(item, job, lane, sent_boot_us=sent_boot_us)
        self.by_fence[held.fence] = job.items[held.fence] = held
        self.bytes += len(held.body)
        lane.push(held)
        return held

    def let_go(self, item: HeldItem) -> None:
        """An item is no longer this agent's."""
        if item.phase is ItemPhase.WAITING:
            item.lane.remove(item)
        del self.by_fence[item.fence]
        del item.job.items[item.fence]
        item.call = None
        self.bytes -= len(item.body)

    def forget_ended_jobs(self) -> None:
        """Drop jobs and lanes without items, when there are many: the next lease names its job again."""
        if len(self.jobs) < JOBS_KEPT and len(self.lanes) < JOBS_KEPT:
            return
        self.jobs = {job_id: job for job_id, job in self.jobs.items() if job.items}
        used = {id(item.lane) for item in self.by_fence.values()}
        self.lanes = {place: lane for place, lane in self.lanes.items() if id(lane) in used}

    def of_phase(self, *phases: ItemPhase) -> list[HeldItem]:
        return [item for item in self.by_fence.values() if item.phase in phases]

    def counts(self) -> Iterator[tuple[int, ItemPhase]]:
        """Class id and phase of every item."""
        return ((item.job.job.class_id, item.phase) for item in self.by_fence.values())

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self.lanes.values())
