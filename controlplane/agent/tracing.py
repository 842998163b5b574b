"""One trace per request, put together from what is known when it ends: a request that is not traced pays nothing.

The trace's id is the client's (W3C Trace Context) or the request's own, so that either leads to it. Ended requests wait
in a bounded queue for the exporter's thread; what it has no room for is counted and forgotten.
"""

from __future__ import annotations

import random
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from controlplane.agent.api_body import CHAT_PATH, TEXT_PATH
from controlplane.core.reasons import Outcome, Reason, answer_for

if TYPE_CHECKING:
    from controlplane.agent.call import Call
    from controlplane.wire.report import UsageRow

WAITING_MAX: Final = 2_048
"""Ended requests that may wait for the exporter."""
BATCH_MAX: Final = 64
"""Requests whose spans go in one export."""
EXPORT_EVERY_S: Final = 1.0
OPERATIONS: Final = {CHAT_PATH: "chat", TEXT_PATH: "text_completion", "/v1/embeddings": "embeddings"}
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_RANDOM_BITS: Final = 56
"""Bits at the end of a trace id that are random (W3C Trace Context, level 2); a UUIDv7 keeps that too."""
_random = random.Random()  # noqa: S311  ids have to differ, not to be secret


@dataclass(frozen=True, slots=True)
class Parent:
    """What a `traceparent` header says."""

    trace_id: int
    span_id: int
    sampled: bool


def parse_traceparent(header: bytes) -> Parent | None:
    """The parent, or None for a header that is none (W3C Trace Context, section 3.2)."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return Parent(trace_id, span_id, bool(int(match[4], 16) & 1)) if trace_id and span_id else None


def new_span_id() -> int:
    """Random and never 0."""
    return _random.getrandbits(64) or 1


@dataclass(slots=True)
class AttemptTrace:
    """One attempt on a slot; instants are Unix microseconds, 0 is never."""

    span_id: int
    slot: str
    dispatched_us: int
    batched_us: int = 0
    prefill_us: int = 0
    first_us: int = 0
    last_us: int = 0
    ended_us: int = 0
    ended_by: str = ""


@dataclass(slots=True)
class Trace:
    """What a traced request collects on its way."""

    trace_id: int
    span_id: int
    parent_id: int | None
    attempts: list[AttemptTrace] = field(default_factory=list)

    def dispatched(self, slot: str, now_us: int) -> bytes:
        """An attempt begins; returns the `traceparent` of what it asks of a backend."""
        attempt = AttemptTrace(new_span_id(), slot, now_us)
        self.attempts.append(attempt)
        return b"00-%032x-%016x-01" % (self.trace_id, attempt.span_id)

    def attempt_ended(self, call: Call, now_us: int, ended_by: str) -> None:
        """The last attempt ended, before its instants are taken off the call."""
        if not self.attempts or self.attempts[-1].ended_us:
            return
        attempt = self.attempts[-1]
        attempt.prefill_us, attempt.first_us, attempt.last_us = call.prefill_us, call.first_us, call.last_us
        attempt.batched_us = (call.batched_us or now_us) if call.gathers else 0
        attempt.ended_us, attempt.ended_by = now_us, ended_by


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request as its spans are made of it: names and numbers, nothing that a client wrote."""

    trace: Trace
    request_id: str
    operation: str
    model: str
    tenant: str
    asked_class: str
    served_class: str
    revision: int
    stream: bool
    choices: int
    max_output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str
    status: int
    arrived_us: int
    parsed_us: int
    admitted_us: int
    ended_us: int


class SpanSink(Protocol):
    """Sends the spans of ended requests somewhere; called from the exporter's thread and may take its time."""

    def export(self, ended: Sequence[EndedRequest]) -> bool:
        """Whether they were taken."""

    def shutdown(self) -> None:
        """Nothing is exported after this."""


class Tracer:
    """Samples requests, and hands ended ones to a thread that exports them."""

    def __init__(self, sink: SpanSink, *, rate: float) -> None:
        self._sink = sink
        self._bound = round(rate * 2**_RANDOM_BITS)
        self._waiting: deque[EndedRequest] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self.exported = 0
        """Traces that were taken, since the start."""
        self.dropped = 0
        """Traces that found the queue full."""
        self.failed = 0
        """Traces that the endpoint did not take."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    # on the event loop

    def begin(self, request_id: str, traceparent: bytes) -> Trace | None:
        """The trace of a request, or None when it is not sampled.

        A client that traces decides by its flag that there is no trace; the rate bounds how many there are.
        """
        parent = parse_traceparent(traceparent) if traceparent else None
        if parent is None:
            trace_id, parent_id = int(request_id.replace("-", ""), 16), None
        elif parent.sampled:
            trace_id, parent_id = parent.trace_id, parent.span_id
        else:
            return None
        if trace_id & (1 << _RANDOM_BITS) - 1 >= self._bound:
            return None
        return Trace(trace_id, new_span_id(), parent_id)

    def ended(self, call: Call, row: UsageRow, outcome: Outcome) -> None:
        """An admitted request ended, with its record."""
        if call.trace is not None:
            call.trace.attempt_ended(call, row.ended_us, outcome.value)
            tokens = row.prompt_tokens, row.cached_tokens, row.output_tokens
            self._put(
                _ended(call, call.trace, outcome.value, row.status, row.ended_us, model=call.model, tokens=tokens)
            )

    def refused(self, call: Call, reason: Reason, now_us: int) -> None:
        """Admission refused a request; its model is what a client wrote, so it is left out."""
        if call.trace is not None:
            status = answer_for(reason).status
            self._put(_ended(call, call.trace, reason.value, status, now_us, model="", tokens=(0, 0, 0)))

    def _put(self, ended: EndedRequest) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            return
        self._waiting.append(ended)
        if len(self._waiting) >= BATCH_MAX:
            self._wake.set()

    # in the thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(EXPORT_EVERY_S)
            self._wake.clear()
            while self._waiting and not self._stopping:
                self._export()
        while self._waiting:
            if not self._export():
                break
        self._sink.shutdown()

    def _export(self) -> bool:
        batch = [self._waiting.popleft() for _ in range(min(BATCH_MAX, len(self._waiting)))]
        taken = self._sink.export(batch)
        if taken:
            self.exported += len(batch)
        else:
            self.failed += len(batch)
        return taken

    def close(self, within_s: float) -> None:
        """Export what waits, within a bound; blocks. What is left after it is lost with the process."""
        self._stopping = True
        self._wake.set()
        self._thread.join(within_s)


def _ended(
    call: Call, trace: Trace, outcome: str, status: int, now_us: int, *, model: str, tokens: tuple[int, int, int]
) -> EndedRequest:
    prompt_tokens, cached_tokens, output_tokens = tokens
    known = call.klass.policy.id and call.asked.policy.id
    return EndedRequest(
        trace=trace,
        request_id=call.request_id,
        operation=OPERATIONS.get(call.path, "other"),
        model=model,
        tenant=call.tenant.policy.slug,
        asked_class=call.asked.policy.slug if known else "",
        served_class=call.klass.policy.slug if known else "",
        revision=call.revision,
        stream=call.stream,
        choices=call.n,
        max_output_tokens=call.max_output_tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        outcome=outcome,
        status=status,
        arrived_us=call.arrived_us,
        parsed_us=call.parsed_us,
        admitted_us=call.admitted_us,
        ended_us=now_us,
    )
