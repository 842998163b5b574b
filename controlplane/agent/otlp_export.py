"""Spans of ended requests over OTLP/HTTP, with OpenTelemetry's SDK (the extra `tracing`).

Attributes are those of the GenAI semantic conventions, and `flexband.*` for what these have no name for. Headers for
the collector, a token for example, come from the environment (`OTEL_EXPORTER_OTLP_HEADERS`), as everywhere with OTLP.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import requests
import urllib3
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from controlplane.agent.tracing import AttemptTrace, EndedRequest, new_span_id
from controlplane.agent.version import SOFTWARE

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 64 * 1024
ANSWER_WITHIN_S: Final = 1.0
HEAD_WITHIN_S: Final = EXPORT_TIMEOUT_S
COMPLAIN_EVERY_S: Final = 60.0
SCOPE: Final = InstrumentationScope("controlplane.agent.tracing")
Attributes = Mapping[str, str | bool | int]


class _HeadInTime:
    """A connection whose answer has its status and headers in time: a timeout of each read would let them drip."""

    sock: socket.socket | None
    _overdue = False

    def getresponse(self) -> Any:
        """Raises TimeoutError at the deadline: the headers that came until then would pass for all of them."""
        self._overdue = False
        timer = threading.Timer(HEAD_WITHIN_S, self._cut_off)
        timer.daemon = True
        timer.start()
        try:
            answer = super().getresponse()  # type: ignore[misc]
        finally:
            timer.cancel()
        if self._overdue:
            raise TimeoutError(f"no whole head of an answer within {HEAD_WITHIN_S} s")
        return answer

    def _cut_off(self) -> None:
        self._overdue = True
        if self.sock is not None:
            # What waits for a byte of it, in another thread, finds its end.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


class _Connection(_HeadInTime, urllib3.connection.HTTPConnection):
    pass


class _SecureConnection(_HeadInTime, urllib3.connection.HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class CollectorSession(requests.Session):
    """Takes of an answer its status: whatever a collector sends behind it costs neither memory nor more than a moment.

    A redirect is no success: nothing was taken where the spans went.
    """

    def __init__(self) -> None:
        super().__init__()
        # As for the control plane: no proxy of the environment, the collector is named on the command line.
        self.trust_env = False
        for scheme in ("http://", "https://"):
            adapter = requests.adapters.HTTPAdapter()
            adapter.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
            self.mount(scheme, adapter)

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Raises TooManyRedirects for a redirect, else what requests raises."""
        response = super().send(request, **{**options, "stream": True})
        if not _ends_soon(response.raw):
            # Its connection would carry the rest of this answer.
            response.close()
        if 300 <= response.status_code < 400:
            raise requests.exceptions.TooManyRedirects(f"{request.url} answers {response.status_code}")
        return response


def _ends_soon(answer: urllib3.HTTPResponse) -> bool:
    """Read the answer away, undecoded; False when it is too long, too slow or broken."""
    size, until_s = 0, time.monotonic() + ANSWER_WITHIN_S
    try:
        while part := answer.read1(ANSWER_BYTES_MAX, decode_content=False):
            size += len(part)
            if size > ANSWER_BYTES_MAX or time.monotonic() > until_s:
                return False
    except (urllib3.exceptions.HTTPError, OSError):
        return False
    return True


class OtlpSink:
    """Exports to one endpoint, blocking for as long as `EXPORT_TIMEOUT_S`; trouble is logged once in a minute."""

    def __init__(self, url: str, *, agent: str, timeout_s: float = EXPORT_TIMEOUT_S) -> None:
        self._exporter = OTLPSpanExporter(
            endpoint=url, timeout=timeout_s, compression=Compression.Gzip, session=CollectorSession()
        )
        # Its own complaints come with each batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._url = url
        self._spans = SpanMaker(agent)
        self._complained_s = -COMPLAIN_EVERY_S

    def export(self, ended: Sequence[EndedRequest]) -> bool:
        try:
            spans = [span for request in ended for span in self._spans.spans_of(request)]
            taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            # A fault here must not end the thread, and with it all later traces.
            log.exception("spans could not be made or sent")
            return False
        now_s = time.monotonic()
        if not taken and now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            log.warning("%s does not take traces: requests go on, their traces are lost", self._url)
        return taken

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class SpanMaker:
    """Makes the spans of a request: one for it, one per stage, one per attempt with its stages under it."""

    def __init__(self, agent: str) -> None:
        self._resource = Resource(
            {"service.name": "flexband-agent", "service.instance.id": agent, "service.version": SOFTWARE}
        )

    def spans_of(self, ended: EndedRequest) -> list[ReadableSpan]:
        """The span of the request first, then its parts in time."""
        trace = ended.trace
        parent = None if trace.parent_id is None else _context(trace.trace_id, trace.parent_id, remote=True)
        root = self._span(
            f"{ended.operation} {ended.model}".strip(),
            _context(trace.trace_id, trace.span_id),
            parent,
            (ended.arrived_us, ended.ended_us),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(ended),
            failed=ended.outcome if ended.status >= 500 else "",
        )
        own = _context(trace.trace_id, trace.span_id)
        spans = [root]
        spans += [self._stage(name, own, began, until) for name, began, until in _stages(ended)]
        for number, attempt in enumerate(trace.attempts, start=1):
            spans += self._attempt(ended, attempt, number, own)
        return spans

    def _attempt(
        self, ended: EndedRequest, attempt: AttemptTrace, number: int, parent: SpanContext
    ) -> Iterator[ReadableSpan]:
        context = _context(parent.trace_id, attempt.span_id)
        failed = attempt.ended_by in ("failed", "upstream_error", "stage_timeout", "lost")
        yield self._span(
            f"attempt {number}",
            context,
            parent,
            (attempt.dispatched_us, attempt.last_us or attempt.ended_us),
            kind=SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": ended.operation,
                "gen_ai.request.model": ended.model,
                "flexband.attempt": number,
                "flexband.slot": attempt.slot,
                "flexband.ended_by": attempt.ended_by,
            },
            failed=attempt.ended_by if failed else "",
        )
        for name, began, until in _attempt_stages(attempt, stream=ended.stream):
            yield self._stage(name, context, began, until)

    def _stage(self, name: str, parent: SpanContext, began_us: int, until_us: int) -> ReadableSpan:
        return self._span(name, _context(parent.trace_id, new_span_id()), parent, (began_us, until_us))

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        between_us: tuple[int, int],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        failed: str = "",
    ) -> ReadableSpan:
        began_us, until_us = between_us
        attributes = {**(attributes or {}), **({"error.type": failed} if failed else {})}
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=began_us * 1000,
            end_time=max(began_us, until_us) * 1000,
            instrumentation_scope=SCOPE,
        )


def _context(trace_id: int, span_id: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))


Stage = tuple[str, int, int]


def _stages(ended: EndedRequest) -> Iterator[Stage]:
    """Stages under the request itself: reading it, admission, each wait in the queue, handing out the end."""
    parsed_us = ended.parsed_us or ended.ended_us
    yield "preprocess", ended.arrived_us, parsed_us
    yield "admission", parsed_us, ended.admitted_us or ended.ended_us
    if not ended.admitted_us:
        return
    waiting_us = ended.admitted_us
    for attempt in ended.trace.attempts:
        yield "queue", waiting_us, attempt.dispatched_us
        waiting_us = attempt.ended_us
    last = ended.trace.attempts[-1] if ended.trace.attempts else None
    if last is None:
        yield "queue", waiting_us, ended.ended_us
    elif last.ended_us < ended.ended_us:
        # Its last attempt was taken off its slot, and the request ended in the queue.
        yield "queue", waiting_us, ended.ended_us
    elif last.last_us:
        yield "return", last.last_us, ended.ended_us


def _attempt_stages(attempt: AttemptTrace, *, stream: bool) -> Iterator[Stage]:
    """Stages of an attempt up to its last token; one that was not reached has no span.

    Of an answer that is not streamed nobody sees the first token: prefill and decode are one stage.
    """
    batched_us = attempt.batched_us or attempt.dispatched_us
    if attempt.batched_us:
        yield "batch_wait", attempt.dispatched_us, batched_us
    began_us = max(attempt.prefill_us, batched_us)
    yield "preprocess", batched_us, began_us
    yield "prefill" if stream else "upstream", began_us, attempt.first_us or attempt.ended_us
    if attempt.first_us:
        yield "decode", attempt.first_us, attempt.last_us


def _request_attributes(ended: EndedRequest) -> Attributes:
    known: dict[str, str | bool | int] = {
        "gen_ai.operation.name": ended.operation,
        "gen_ai.provider.name": "flexband",
        "gen_ai.request.stream": ended.stream,
        "gen_ai.request.choice.count": ended.choices,
        "gen_ai.request.max_tokens": ended.max_output_tokens,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "http.request.method": "POST",
        "http.response.status_code": ended.status,
        "flexband.request_id": ended.request_id,
        "flexband.outcome": ended.outcome,
        "flexband.attempts": len(ended.trace.attempts),
        "flexband.policy_revision": ended.revision,
    }
    named = {
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model if ended.output_tokens else "",
        "flexband.tenant": ended.tenant,
        "flexband.asked_class": ended.asked_class,
        "flexband.class": ended.served_class,
    }
    return {**known, **{name: value for name, value in named.items() if value}}
