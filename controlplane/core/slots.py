"""The slots of one agent as the scheduler sees them, and which of them may serve which class.

The isolation design of the pool decides: `shared` lets any slot serve any class, `dedicated` each slot its home class
only, `reserved` keeps interactive floor and flex slots at home for interactive, batch floor and lent flex slots for
batch. A slot that is draining, cancelling, overdue, lost or not ready admits nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from controlplane.core.queued_request import QueuedRequest
from controlplane.core.slot_states import Band, SlotState

UNBOUNDED_KV: Final = 1 << 61
"""KV tokens of a slot whose backend has no KV memory to run short of."""
NO_END_US: Final = 1 << 61
"""The first end of a slot on which nothing runs."""


class Isolation(StrEnum):
    """The isolation design of a pool."""

    SHARED = "shared"
    DEDICATED = "dedicated"
    RESERVED = "reserved"


class ClassKind(StrEnum):
    """The two kinds of workload class; interactive goes before batch."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """A slot as enrolled: its places (concurrency), KV memory in tokens (None: none to run short of) and home."""

    name: str
    places: int
    band: Band
    kv_tokens: int | None = None
    home_class: str | None = None

    def __post_init__(self) -> None:
        if self.places < 1:
            raise ValueError(f"slot {self.name!r} needs at least one place, got {self.places}")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise ValueError(f"slot {self.name!r} needs KV memory or None, got {self.kv_tokens}")


def serves(
    isolation: Isolation, *, band: Band, state: SlotState, home_class: str | None, class_slug: str, kind: ClassKind
) -> bool:
    """Whether a ready slot in that state admits requests of that class."""
    if state not in (SlotState.HOME, SlotState.LENT):
        return False
    if isolation is Isolation.SHARED:
        return True
    if isolation is Isolation.DEDICATED:
        return home_class == class_slug if home_class is not None else band.value == kind.value
    if band is Band.FLEX:
        return (kind is ClassKind.BATCH) == (state is SlotState.LENT)
    return band.value == kind.value


class RunningSlot:
    """One slot with what runs on it; KV memory is held at a request's prompt plus expected output.

    `bit` is its own in masks of slots, `mask` has a bit per class that it serves now; `on_loan` says that it is a flex
    slot lent to batch in a `reserved` pool, which takes only what can be home within the drain bound. `first_end_us` is
    when the first running request is expected to end.
    """

    __slots__ = (
        "bit",
        "class_counts",
        "first_end_us",
        "index",
        "kv_free",
        "kv_tokens",
        "mask",
        "on_loan",
        "open_batches",
        "outstanding_gpu_us",
        "places",
        "ready",
        "reserved_for",
        "running",
        "spec",
        "state",
    )

    def __init__(self, spec: SlotSpec, index: int, classes: int) -> None:
        self.spec = spec
        self.index = index
        self.bit = 1 << index
        self.places = spec.places
        self.kv_tokens = UNBOUNDED_KV if spec.kv_tokens is None else spec.kv_tokens
        self.kv_free = self.kv_tokens
        self.ready = True
        self.state = SlotState.HOME
        self.mask = 0
        self.on_loan = False
        self.running: dict[str | int, QueuedRequest] = {}
        self.class_counts = [0] * classes
        self.outstanding_gpu_us = 0
        self.reserved_for: QueuedRequest | None = None
        self.first_end_us = NO_END_US
        self.open_batches: set[str] = set()
        """Shapes of which requests on the slot wait for others to run with (`batching`)."""

    def start(self, request: QueuedRequest, now_us: int) -> bool:
        """Take a request onto the slot; whether its last place is taken now."""
        running, counts, gpu_us, index = self.running, self.class_counts, request.gpu_us, request.class_index
        running[request.id] = request
        # Compiled code adds to a number in a list through the interpreter, unless it is written like this.
        counts[index] = counts[index] + 1
        self.kv_free -= request.kv_tokens
        self.outstanding_gpu_us += gpu_us
        # A request's gpu_us is its share of the slot; its residence grows with those beside it.
        taken = len(running)
        request.expected_end_us = end_us = now_us + gpu_us * taken
        if end_us < self.first_end_us:
            self.first_end_us = end_us
        return taken >= self.places

    def stop(self, request: QueuedRequest) -> bool:
        """Take a request off the slot; whether a place is free now."""
        del self.running[request.id]
        counts, index = self.class_counts, request.class_index
        counts[index] = counts[index] - 1
        self.kv_free += request.kv_tokens
        self.outstanding_gpu_us -= request.gpu_us
        if request.expected_end_us <= self.first_end_us:
            # Only where the first one leaves: over the places of one slot, which is less than a heap of all costs.
            first_us = NO_END_US
            for other in self.running.values():
                if other.expected_end_us < first_us:
                    first_us = other.expected_end_us
            self.first_end_us = first_us
        return len(self.running) < self.places

    def memory_free_at_us(self, kv_tokens: int) -> int | None:
        """When `kv_tokens` are expected to be free, by the running requests' estimates; None if never."""
        free, at_us = self.kv_free, 0
        if kv_tokens > self.kv_tokens:
            return None
        for request in sorted(self.running.values(), key=lambda r: (r.expected_end_us, r.order)):
            if free >= kv_tokens:
                break
            free += request.kv_tokens
            at_us = request.expected_end_us
        return at_us
