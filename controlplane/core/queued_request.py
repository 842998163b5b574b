"""One admitted request on its way through the scheduler."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from controlplane.core.fairness import FairTenant, LinearWork
from controlplane.core.native import native


class Phase(IntEnum):
    """Where the request is; it only ends once."""

    NEW = 0
    QUEUED = 1
    RUNNING = 2
    ENDED = 3


NEW: Final = Phase.NEW
QUEUED: Final = Phase.QUEUED
RUNNING: Final = Phase.RUNNING
ENDED: Final = Phase.ENDED


@native(free_list_len=1)
class QueuedRequest:
    """What the scheduler needs of a request, and what it keeps about it.

    `kv_tokens` is prompt plus expected output, `gpu_us` the estimated share of a slot. `preemptible` says that the
    class is retry_safe and the backend cancels promptly; `fits_drain` that the estimate at the bias's upper bound fits
    the drain bound, so that a lent slot may take it. `streamed` requests report output as it is produced; of others
    only the total is known, and it is charged linearly. `cached_tokens` is the cached prefix by slot name;
    `batch_shape` names what it may be run together with, empty for nothing.
    """

    __slots__ = (
        "arrival_us",
        "attempt",
        "batch_shape",
        "blocked_since_us",
        "bytes_sent",
        "cached_tokens",
        "call",
        "charged_work",
        "class_index",
        "class_slug",
        "deadline_us",
        "enqueued_us",
        "expected_end_us",
        "fair",
        "fits_drain",
        "gpu_us",
        "id",
        "kv_tokens",
        "linear",
        "output_tokens",
        "phase",
        "preemptible",
        "prompt_tokens",
        "reclaiming",
        "reserved_slot_index",
        "size_class",
        "slot_index",
        "started_us",
        "streamed",
        "tenant",
    )

    def __init__(
        self,
        id: str | int,
        tenant: str,
        class_slug: str,
        arrival_us: int,
        *,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        kv_tokens: int = 0,
        gpu_us: int = 0,
        deadline_us: int | None = None,
        preemptible: bool = False,
        fits_drain: bool = False,
        streamed: bool = True,
        cached_tokens: dict[str, int] | None = None,
        batch_shape: str = "",
    ) -> None:
        self.id = id
        self.tenant = tenant
        self.class_slug = class_slug
        self.arrival_us = arrival_us
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.kv_tokens = kv_tokens
        self.gpu_us = gpu_us
        self.deadline_us = deadline_us
        self.preemptible = preemptible
        self.fits_drain = fits_drain
        self.streamed = streamed
        self.cached_tokens = cached_tokens
        self.batch_shape = batch_shape
        self.call: object = None
        """What its caller keeps of it, so that nobody has to be looked up; the caller takes it out at the end."""
        self.attempt = 1
        self.phase: Phase = NEW
        self.class_index = -1
        self.size_class = 0
        self.enqueued_us = arrival_us
        self.started_us = 0
        self.expected_end_us = 0
        self.blocked_since_us: int | None = None
        self.bytes_sent = False
        self.reclaiming = False
        self.charged_work = 0
        self.fair: FairTenant | None = None
        self.linear: LinearWork | None = None
        self.slot_index = -1
        self.reserved_slot_index = -1

    @property
    def order(self) -> tuple[int, str | int]:
        """(arrival, id)"""
        return self.arrival_us, self.id

    @property
    def may_run_lent(self) -> bool:
        """Whether a lent slot may take it: it can be cancelled at once, or it fits the drain bound."""
        return self.preemptible or self.fits_drain
