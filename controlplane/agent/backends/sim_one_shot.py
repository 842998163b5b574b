"""One-shot models of the simulated backend: each slot runs one batch at a time, for a fixed time and one per input.

Answers are seeded: the same seed and the same input give the same embedding, whatever else is in its batch. No model
was measured: the default curve is a small encoder's order of magnitude, and the command line gives others.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import zlib
from collections import deque
from random import Random
from typing import Final

import msgspec
from msgspec import Raw, Struct

from controlplane.agent.answers import error_body
from controlplane.agent.backends.base import Sink
from controlplane.agent.backends.request import BackendRequest, Failure, TokenUsage
from controlplane.agent.embedding_batch import BYTES_PER_TOKEN, embedding_inputs
from controlplane.agent.one_shot_body import EMBEDDINGS_PATH
from controlplane.core.batching import ServiceTime

DEFAULT_CURVE: Final = ServiceTime(fixed_us=4_000, per_input_us=500)
DEFAULT_DIMENSIONS: Final = 64
NUMBERS_MAX: Final = 1 << 18

_encode = msgspec.json.Encoder().encode


class TooMuch(Exception):
    """An answer that would hold up the event loop for seconds."""


class _Asked(Struct):
    encoding_format: str | None = None
    dimensions: int | None = None


class _Tensor(Struct):
    shape: list[int] = []
    data: Raw = Raw(b"[]")


class _Tensors(Struct):
    inputs: list[_Tensor] = []


_asked = msgspec.json.Decoder(_Asked)
_tensors = msgspec.json.Decoder(_Tensors)


class OneShotSims:
    """The one-shot models of all slots of one agent."""

    def __init__(self, curve: ServiceTime, *, seed: int, speed: float) -> None:
        self.curve = curve
        self.seed = seed
        self.speed = speed
        self._slots: dict[int, OneShotSlot] = {}

    def start(self, request: BackendRequest, sink: Sink) -> OneShotRun:
        slot = self._slots.get(request.slot_id)
        if slot is None:
            slot = self._slots[request.slot_id] = OneShotSlot(self)
        run = OneShotRun(request, sink, slot)
        slot.enter(run)
        return run

    def stop(self) -> None:
        for slot in self._slots.values():
            slot.stop()


class OneShotSlot:
    """One replica: a batch runs, the others wait in order."""

    def __init__(self, sims: OneShotSims) -> None:
        self._sims = sims
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[OneShotRun] = deque()
        self._running: OneShotRun | None = None
        self._timer: asyncio.Handle | None = None

    def enter(self, run: OneShotRun) -> None:
        self._waiting.append(run)
        if self._running is None and self._timer is None:
            self._timer = self._loop.call_soon(self._next)

    def leave(self, run: OneShotRun) -> None:
        if run is self._running:
            self.stop()
            self._running = None
            self._timer = self._loop.call_soon(self._next)
        elif run in self._waiting:
            self._waiting.remove(run)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        run = self._running = self._waiting.popleft()
        run.sink.prefill_began()
        speed = self._sims.speed
        seconds = self._sims.curve.service_us(run.request.n) / 1e6 / speed if speed else 0.0
        self._timer = self._loop.call_later(seconds, self._end)

    def _end(self) -> None:
        run, self._running = self._running, None
        self._timer = self._loop.call_soon(self._next)
        if run is None:
            return
        run.ended = True
        try:
            usage, body = answer(run.request, self._sims.seed)
        except TooMuch as error:
            told = error_body(str(error), "invalid_request_error", None, "dimensions")
            run.sink.failed(Failure(str(error), retryable=False, status=400, body=told))
        else:
            run.sink.finished(usage, body)


class OneShotRun:
    """One attempt."""

    __slots__ = ("_slot", "ended", "request", "sink")

    def __init__(self, request: BackendRequest, sink: Sink, slot: OneShotSlot) -> None:
        self.request = request
        self.sink = sink
        self._slot = slot
        self.ended = False

    def cancel(self) -> None:
        if not self.ended:
            self.ended = True
            self._slot.leave(self)

    def pause(self) -> None:
        """Its answer comes at once."""

    def resume(self) -> None:
        """See `pause`."""

    def usage_so_far(self) -> TokenUsage | None:
        return None


def answer(request: BackendRequest, seed: int) -> tuple[TokenUsage, bytes]:
    """Usage and body of a finished request. Raises TooMuch."""
    if request.path == EMBEDDINGS_PATH:
        return _embeddings(request, seed)
    return TokenUsage(0, 0, 0), _scores(request, seed)


def _embeddings(request: BackendRequest, seed: int) -> tuple[TokenUsage, bytes]:
    asked, inputs = _asked.decode(request.body), embedding_inputs(request.body)
    tokens = sum(inputs.token_counts or [max(1, len(piece) // BYTES_PER_TOKEN) for piece in inputs.pieces])
    dimensions = asked.dimensions or DEFAULT_DIMENSIONS
    if len(inputs.pieces) * dimensions > NUMBERS_MAX:
        raise TooMuch(f"The simulated server makes at most {NUMBERS_MAX} numbers: ask for fewer dimensions or inputs.")
    rows = []
    for index, piece in enumerate(inputs.pieces):
        vector = unit_vector(piece, seed, dimensions)
        told = vector if asked.encoding_format != "base64" else packed(vector)
        rows.append({"object": "embedding", "index": index, "embedding": told})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    body = _encode({"object": "list", "data": rows, "model": request.model, "usage": usage})
    return TokenUsage(tokens, 0, 0), body


def unit_vector(piece: bytes, seed: int, dimensions: int) -> list[float]:
    """A direction that depends on the input's bytes and the seed only, as 32-bit floats."""
    rng = Random((seed << 32) ^ zlib.crc32(piece))  # noqa: S311  a simulation
    drawn = [rng.gauss(0.0, 1.0) for _ in range(dimensions)]
    length = math.sqrt(sum(value * value for value in drawn)) or 1.0
    form = f"<{dimensions}f"
    return list(struct.unpack(form, struct.pack(form, *(value / length for value in drawn))))


def packed(vector: list[float]) -> str:
    """Little-endian 32-bit floats as base64, OpenAI's other form."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _scores(request: BackendRequest, seed: int) -> bytes:
    """One score per row of the first tensor."""
    tensor = _tensors.decode(request.body).inputs[0]
    rows = min(tensor.shape[0] if tensor.shape else 1, 4096)
    score = zlib.crc32(bytes(tensor.data), seed & 0xFFFFFFFF) / 0xFFFFFFFF
    output = {"name": "SCORE", "datatype": "FP32", "shape": [rows, 1], "data": [score] * rows}
    return _encode({"model_name": request.model, "model_version": "1", "id": request.request_id, "outputs": [output]})
