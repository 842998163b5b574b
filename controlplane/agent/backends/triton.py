"""Triton Inference Server over HTTP v2 (the KServe inference protocol): tensors pass, embeddings become tensors.

One-shot work only: `/v2/models/{model}/infer` passes as it is, `/v1/embeddings` is put into a text tensor and read from
a float tensor. Triton batches by itself (`dynamic_batching` of the model's config.pbtxt, which the policy compiles to),
so nothing waits for a batch here. Each request carries its class's priority level: 1 is the highest, larger is later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import Raw

from controlplane.agent.answers import error_body
from controlplane.agent.backends.base import Run, Sink
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.backends.request import BackendRequest, Failure, TokenUsage
from controlplane.agent.backends.triton_embeddings import (
    BadTensor,
    EmbeddingTensors,
    NotOffered,
    asked_embeddings,
    embeddings_answer,
    text_tensors,
)
from controlplane.agent.one_shot_body import EMBEDDINGS_PATH, one_shot_for_upstream
from controlplane.core.engine_priority import priority_levels
from controlplane.wire.policy import PolicyDocument

log = logging.getLogger(__name__)

NOT_LOADED: Final = frozenset({404})
DETAIL_CHARS: Final = 300


@dataclass(frozen=True, kw_only=True)
class TritonOptions:
    """Names of the tensors that an embeddings model takes and gives."""

    text_input: str = "TEXT"
    embedding_output: str = "EMBEDDING"


@dataclass(slots=True)
class _Levels:
    """Priority level by class priority, as the revision in force has it."""

    by_priority: Mapping[int, int] = field(default_factory=dict)

    def of(self, priority: int) -> int:
        """The level; 0, Triton's default, for a class that the revision in force does not know."""
        return self.by_priority.get(priority, 0)


class TritonBackend:
    """All slots share one Triton; which slot runs what bounds how much it is given."""

    cancels_promptly = False
    """A closed connection ends the request's wait, not its execution."""
    batches_itself = True

    def __init__(self, url: str, options: TritonOptions | None = None) -> None:
        self._http = OpenAIBackend(url, as_they_are=True)
        self._options = options or TritonOptions()
        self._levels = _Levels()
        self.open = self._http.open
        self.close = self._http.close

    def set_slots(self, slots: dict[int, int]) -> None:
        """Slots bound what is sent; instances are the server's own (`instance_group`)."""

    def take_policy(self, document: PolicyDocument) -> None:
        self._levels.by_priority = priority_levels(row.priority for row in document.classes)

    def count_prompt(self, serialised: bytes) -> int | None:
        return None

    def start(self, request: BackendRequest, sink: Sink) -> Run:
        if request.path == EMBEDDINGS_PATH:
            return self._start_embeddings(request, sink)
        if not request.one_shot:
            return self._refuse(sink, "This server runs embeddings and tensors only: text is not generated here.")
        level = self._levels.of(request.priority)
        body = one_shot_for_upstream(request.body, request.path, level or None)
        # The path is made anew from the model that was checked, so that nothing else of the client's is asked for.
        return self._http.start(request.sent_as(_infer_path(request.model), body), InferSink(sink))

    def _start_embeddings(self, request: BackendRequest, sink: Sink) -> Run:
        try:
            asked = asked_embeddings(request.body)
        except NotOffered as error:
            return self._refuse(sink, str(error), error.param)
        tensors = EmbeddingTensors(self._options.text_input, self._options.embedding_output)
        body = text_tensors(asked, tensors, level=self._levels.of(request.priority), request_id=request.request_id)
        sent = request.sent_as(_infer_path(request.model), body)
        return self._http.start(sent, EmbeddingsSink(sink, request, asked.encoding_format, asked.dimensions, tensors))

    def _refuse(self, sink: Sink, message: str, param: str | None = None) -> Run:
        body = error_body(message, "invalid_request_error", None, param)
        run = Refused()
        self._http.loop.call_soon(run.tell, sink, Failure(message, retryable=False, status=400, body=body))
        return run


def _infer_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/infer"


class Refused:
    """A request that was not sent."""

    def __init__(self) -> None:
        self._cancelled = False

    def tell(self, sink: Sink, failure: Failure) -> None:
        if not self._cancelled:
            sink.failed(failure)

    def cancel(self) -> None:
        self._cancelled = True

    def pause(self) -> None:
        """There is nothing to pause."""

    def resume(self) -> None:
        """See `pause`."""

    def usage_so_far(self) -> TokenUsage | None:
        return None


class InferSink:
    """Hands a tensor request's answer on; only a server without the model is told apart from a client's mistake."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def batch_closed(self) -> None:
        """Triton does not tell when its batch closed."""

    def prefill_began(self) -> None:
        self._sink.prefill_began()

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        """Not streamed."""

    def finished(self, usage: TokenUsage, body: bytes) -> None:
        self._sink.finished(usage, body)

    def failed(self, failure: Failure) -> None:
        self._sink.failed(_away(failure) or failure)


class EmbeddingsSink(InferSink):
    """Makes embeddings in OpenAI's form of the tensor that comes back."""

    def __init__(
        self,
        sink: Sink,
        request: BackendRequest,
        encoding_format: str,
        dimensions: int | None,
        tensors: EmbeddingTensors,
    ) -> None:
        super().__init__(sink)
        self._request = request
        self._format = encoding_format
        self._dimensions = dimensions
        self._tensors = tensors

    def finished(self, usage: TokenUsage, body: bytes) -> None:
        """Triton counts no tokens: the agent's own count is recorded and flagged."""
        request = self._request
        try:
            answer = embeddings_answer(
                body,
                self._tensors,
                inputs=request.n,
                model=request.model,
                encoding_format=self._format,
                dimensions=self._dimensions,
                prompt_tokens=request.prompt_tokens,
            )
        except NotOffered as error:
            told = error_body(str(error), "invalid_request_error", None, error.param)
            self._sink.failed(Failure(str(error), retryable=False, status=400, body=told))
        except BadTensor as error:
            self._sink.failed(Failure(str(error), retryable=False))
        else:
            self._sink.finished(TokenUsage(request.prompt_tokens, 0, 0, estimated=True), answer)

    def failed(self, failure: Failure) -> None:
        away = _away(failure)
        if away is not None:
            self._sink.failed(away)
        elif 400 <= failure.status < 500:
            message = _triton_error(failure.body) or failure.detail
            told = error_body(message, "invalid_request_error", None)
            self._sink.failed(Failure(failure.detail, failure.retryable, failure.status, told))
        else:
            self._sink.failed(failure)


def _away(failure: Failure) -> Failure | None:
    """The model is not there: no mistake of the client's, who was let in for it."""
    if failure.status not in NOT_LOADED:
        return None
    why = _triton_error(failure.body)
    log.warning("the Triton server does not have the model: %s", why or failure.detail)
    return Failure("the Triton server does not have the model loaded", retryable=False)


class _Error(msgspec.Struct):
    error: Raw = Raw(b'""')


def _triton_error(body: bytes) -> str:
    """Triton's own words, `{"error": "..."}`; empty where there are none."""
    try:
        told = msgspec.json.decode(msgspec.json.decode(body, type=_Error).error, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return told[:DETAIL_CHARS]
