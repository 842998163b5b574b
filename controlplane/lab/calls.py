"""A simulated request on its way, and the columns that keep what became of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from controlplane.agent.live_figures import ClassFigures
from controlplane.agent.registry import ClassEntry, TenantEntry
from controlplane.core.estimate import DemandEstimate
from controlplane.core.native import i64, native, vec
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.reservations import Reservation
from controlplane.core.slot_meter import Stay

if TYPE_CHECKING:
    from controlplane.lab.items import LeasedItem

NOT_ENDED: Final = 0
"""Code of a request that the end of the simulation found waiting or running."""


def _column(typecode: str, values: vec[i64]) -> array[int]:
    """A copy as it stands now."""
    column: array[int] = array(typecode)
    column.frombytes(np.frombuffer(memoryview(values), np.int64).astype(typecode).tobytes())
    return column


class Columns:
    """By row: when it was first dispatched, had its first token and ended (-1: never), and its code, slot and GPU time.

    Codes are those of `core.reasons`, of refusals as of ends. `served` is the class that served, -1 for none.
    """

    __slots__ = ("arrived_us", "attempts", "code", "ended_us", "first_us", "gpu_us", "output", "retry_s", "served",
                 "slot", "started_us", "wait_estimate_us")  # fmt: skip

    def __init__(self, rows: Rows) -> None:
        self.arrived_us = _column("q", rows.arrived_us)
        self.started_us = _column("q", rows.started_us)
        self.first_us = _column("q", rows.first_us)
        self.ended_us = _column("q", rows.ended_us)
        self.wait_estimate_us = _column("q", rows.wait_estimate_us)
        self.gpu_us = _column("q", rows.gpu_us)
        self.output = _column("q", rows.output)
        self.retry_s = _column("l", rows.retry_s)
        self.slot = _column("h", rows.slot)
        self.served = _column("h", rows.served)
        self.attempts = _column("h", rows.attempts)
        self.code = _column("b", rows.code)


class Rows:
    """The columns while they are filled: bare numbers of 64 bits, which compiled code writes without a call.

    Whoever writes says so by `changed`, for what `columns` made of it before.
    """

    __slots__ = ("_columns", "arrived_us", "attempts", "code", "ended_us", "first_us", "gpu_us", "output", "retry_s",
                 "served", "slot", "started_us", "wait_estimate_us")  # fmt: skip

    def __init__(self, rows: int) -> None:
        self.arrived_us = vec[i64]([-1] * rows)
        self.started_us = vec[i64]([-1] * rows)
        self.first_us = vec[i64]([-1] * rows)
        self.ended_us = vec[i64]([-1] * rows)
        self.wait_estimate_us = vec[i64]([-1] * rows)
        self.gpu_us = vec[i64]([0] * rows)
        self.output = vec[i64]([0] * rows)
        self.retry_s = vec[i64]([-1] * rows)
        self.slot = vec[i64]([-1] * rows)
        self.served = vec[i64]([-1] * rows)
        self.attempts = vec[i64]([0] * rows)
        self.code = vec[i64]([NOT_ENDED] * rows)
        self._columns: Columns | None = None

    def changed(self) -> None:
        self._columns = None

    def columns(self) -> Columns:
        """What is there by now, for numpy and for whoever reads it row by row."""
        found = self._columns
        if found is None:
            found = self._columns = Columns(self)
        return found


@native(free_list_len=1)
class Call(Stay):
    """One request between its arrival and its end; `run` tells its attempts apart, 0 while none runs.

    It is its own stay on the meter of its slot, while it runs.
    """

    __slots__ = (
        "asked", "deadline_us", "dispatched_us", "ends_us", "estimate", "expected_output", "figures", "first_us",
        "gpu_us", "item", "klass", "kv_tokens", "max_output", "may_run_lent", "output", "place", "prompt", "queued",
        "raw_us", "reservation", "row", "rows", "run", "serial", "slot_index", "stalled_us", "tenant", "waited",
    )  # fmt: skip

    queued: QueuedRequest
    reservation: Reservation
    estimate: DemandEstimate
    figures: ClassFigures
    """Of its class, where somebody reads them."""

    def __init__(
        self,
        serial: int,
        rows: Rows,
        row: int,
        klass: ClassEntry,
        tenant: TenantEntry,
        prompt: int,
        output: int,
        asked: int,
        item: LeasedItem | None = None,
    ) -> None:
        super().__init__(serial)
        self.serial = serial
        self.rows = rows
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
        self.run: i64 = 0
        self.slot_index = -1
        self.dispatched_us = self.first_us = 0
        self.ends_us: i64 = 0
        self.place: i64 = 0
        """Where it stands among what runs, for `ends` alone to change."""
        self.stalled_us = 0
        """How much prefill its slot had begun when the end of its run was last reckoned."""
        self.waited = False
