"""One request on this agent, from its last byte to its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from controlplane.agent.api_body import TOKEN_PATHS
from controlplane.agent.api_fields import ApiBody
from controlplane.agent.journal_entries import Begun
from controlplane.agent.objectives import Judge
from controlplane.agent.registry import FREE_CARD, ClassEntry, KeyEntry, TenantEntry
from controlplane.core.pricing import RateCard
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.reservations import Reservation

if TYPE_CHECKING:
    from controlplane.agent.agent_slot import AgentSlot
    from controlplane.agent.attempt import Attempt
    from controlplane.agent.held_items import HeldItem
    from controlplane.agent.sliding import Flow
    from controlplane.agent.tracing import Trace
    from controlplane.core.estimate import DemandEstimate


class Exchange(Protocol):
    """The client's side of a request as the gateway holds it. After the client is gone every call does nothing."""

    path: str
    body: bytes
    bearer: bytes
    asked_class: str
    job: str
    client_request_id: str
    traceparent: bytes
    call: Call | None

    def respond(
        self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json"
    ) -> None:
        """The whole answer at once; `headers` are whole lines."""

    def begin_stream(self, headers: bytes, data: bytes) -> None:
        """Status 200, the head of an event stream and its first bytes, at once."""

    def write(self, data: bytes) -> None:
        """Bytes of the stream."""

    def write_chunks(self, chunks: bytes) -> None:
        """Whole chunks of the stream as HTTP/1.1 frames them."""

    def end_stream(self, data: bytes, *, close: bool = False) -> None:
        """Its last bytes, and the stream is whole; with `close` the connection ends with it."""


class Call:
    """Everything about one request; times are `Clock.now_us()`, 0 is not yet."""

    __slots__ = (
        "admitted_us", "arrived_us", "asked", "asked_output", "attempt", "batched_us", "body", "bound_nanos", "card",
        "closed", "deadline_us", "dispatched_us", "downgraded", "estimate", "estimated_wait_us", "exchange",
        "expected_output", "first_dispatch_us", "first_us", "fits_drain", "flow", "gathers", "gpu_us", "head_sent",
        "ignore_eos", "item", "judges", "key", "klass", "kv_tokens", "last_us", "lease_deadline_us",
        "max_output_tokens", "model", "n", "one_shot", "opened", "output_tokens", "parsed_us", "path", "preemptible",
        "prefill_us", "prompt_bytes", "prompt_tokens", "queued", "raw_gpu_us", "request_id", "reservation", "revision",
        "serial", "slot", "stream", "tenant", "trace", "wants_usage",
    )  # fmt: skip

    def __init__(
        self,
        serial: int,
        request_id: str,
        exchange: Exchange,
        parsed: ApiBody,
        *,
        key: KeyEntry,
        tenant: TenantEntry,
        klass: ClassEntry,
        arrived_us: int,
    ) -> None:
        # What each event of a stream asks for comes first: in compiled code attributes lie in the order of these lines,
        # and with thousands of streams no call is in a near cache when its next event comes.
        self.serial = serial
        self.exchange = exchange
        self.attempt: Attempt | None = None
        self.slot: AgentSlot | None = None
        self.closed = self.head_sent = False
        self.output_tokens = self.first_us = self.last_us = 0
        self.request_id = request_id
        self.path = exchange.path
        self.body = exchange.body
        self.key = key
        self.tenant = tenant
        self.klass = klass
        self.asked = klass
        self.arrived_us = arrived_us
        self.stream = bool(parsed.stream)
        options = parsed.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self.ignore_eos = bool(parsed.ignore_eos)
        self.model = parsed.model
        self.n = parsed.n or 1
        self.one_shot = exchange.path not in TOKEN_PATHS
        self.gathers = False
        """Waits for others to run with, once it is on a slot."""
        self.prompt_bytes = 0
        self.prompt_tokens = 0
        asked = parsed.max_completion_tokens if parsed.max_completion_tokens is not None else parsed.max_tokens
        self.asked_output = 0 if asked is None else asked
        self.max_output_tokens = self.asked_output
        self.kv_tokens = self.gpu_us = 0
        self.preemptible = self.fits_drain = False
        self.deadline_us: int | None = None
        self.expected_output = 0
        self.estimate: DemandEstimate | None = None
        self.raw_gpu_us = 0
        self.card: RateCard = FREE_CARD
        self.bound_nanos = 0
        self.revision = 0
        self.judges: tuple[Judge, ...] = ()
        self.reservation: Reservation | None = None
        self.queued: QueuedRequest | None = None
        self.flow: Flow | None = None
        self.trace: Trace | None = None
        """Set for requests that are traced."""
        self.item: HeldItem | None = None
        """The batch item that it runs, if it is for one."""
        self.downgraded = False
        self.opened: Begun | None = None
        self.estimated_wait_us: int | None = 0
        self.lease_deadline_us = 0
        self.parsed_us = self.admitted_us = self.first_dispatch_us = self.dispatched_us = 0
        self.batched_us = self.prefill_us = 0

    @property
    def tokenless(self) -> bool:
        """Whether the work is not made of tokens at all: tensors in, tensors out."""
        return self.one_shot and not self.prompt_bytes

    @property
    def running(self) -> bool:
        return self.slot is not None
