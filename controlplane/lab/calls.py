"""A simulated request on its way, and the columns that keep what became of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from controlplane.agent.registry import ClassEntry, TenantEntry
from controlplane.core.estimate import DemandEstimate
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.reservations import Reservation

if TYPE_CHECKING:
    from controlplane.lab.items import LeasedItem

NOT_ENDED = 0
"""Code of a request that the end of the simulation found waiting or running."""


class Columns:
    """By row: when it was first dispatched, had its first token and ended (-1: never), and its code, slot and GPU time.

    Codes are those of `core.reasons`, of refusals as of ends. `served` is the class that served, -1 for none.
    """

    __slots__ = ("arrived_us", "attempts", "code", "ended_us", "first_us", "gpu_us", "output", "retry_s", "served",
                 "slot", "started_us", "wait_estimate_us")  # fmt: skip

    def __init__(self, rows: int) -> None:
        unknown = array("q", [-1]) * rows
        self.arrived_us = array("q", unknown)
        self.started_us = array("q", unknown)
        self.first_us = array("q", unknown)
        self.ended_us = array("q", unknown)
        self.wait_estimate_us = array("q", unknown)
        self.gpu_us = array("q", bytes(8 * rows))
        self.output = array("q", bytes(8 * rows))
        self.retry_s = array("l", [-1]) * rows
        self.slot = array("h", [-1]) * rows
        self.served = array("h", [-1]) * rows
        self.attempts = array("h", bytes(2 * rows))
        self.code = array("b", bytes(rows))


class Call:
    """One request between its arrival and its end; `run` tells its attempts apart, 0 while none runs."""

    __slots__ = (
        "asked", "columns", "deadline_us", "dispatched_us", "estimate", "expected_output", "first_us", "gpu_us", "item",
        "klass", "kv_tokens", "max_output", "may_run_lent", "output", "prompt", "queued", "raw_us", "reservation",
        "row", "run", "serial", "slot_index", "stalled_us", "tenant", "waited",
    )  # fmt: skip

    queued: QueuedRequest
    reservation: Reservation
    estimate: DemandEstimate

    def __init__(
        self,
        serial: int,
        columns: Columns,
        row: int,
        klass: ClassEntry,
        tenant: TenantEntry,
        prompt: int,
        output: int,
        asked: int,
        item: LeasedItem | None = None,
    ) -> None:
        self.serial = serial
        self.columns = columns
        self.row = row
        self.klass = klass
        self.tenant = tenant
        self.prompt = prompt
        self.output = output
        self.asked = asked
        self.max_output = 0
        self.item = item
        self.deadline_us: int | None = None
        self.may_run_lent = False
        self.raw_us = self.gpu_us = self.expected_output = self.kv_tokens = 0
        self.run = 0
        self.slot_index = -1
        self.dispatched_us = self.first_us = 0
        self.stalled_us = 0
        """How much prefill its slot had begun when the end of its run was last reckoned."""
        self.waited = False
