"""Dynamic batching in front of a backend: requests of one slot that wait a moment and then run as one.

Between the engine and the backend, so that neither knows of the other's side: the engine starts attempts as always and
hears when their batch closed; the backend gets one request for all of them. What is not embeddings passes by.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from controlplane.agent.backends.base import Backend, Run, Sink
from controlplane.agent.backends.request import BackendRequest, Failure, TokenUsage
from controlplane.agent.embedding_batch import BadAnswer, Waiting, embedding_inputs, merged_body, split_answer
from controlplane.agent.one_shot_body import EMBEDDINGS_PATH
from controlplane.core.batching import Batch, Batcher, BatchPolicy, Member
from controlplane.wire.policy import PolicyDocument

log = logging.getLogger(__name__)

TIMER_LEAST_S: Final = 0.0005


def batch_policy(document: PolicyDocument) -> BatchPolicy:
    """The pool's limits of a batch. Raises ValueError for limits that cannot be."""
    batching = document.pool.batching
    return BatchPolicy(batching.max_batch_size, batching.max_wait_ms * 1000)


class BatchingBackend:
    """The backend that the engine sees."""

    def __init__(self, inner: Backend, now_us: Callable[[], int]) -> None:
        self.inner = inner
        self.cancels_promptly = inner.cancels_promptly
        self.count_prompt = inner.count_prompt
        self.set_slots = inner.set_slots
        self.open = inner.open
        self._now_us = now_us
        self._loop = asyncio.get_running_loop()
        self._policy = BatchPolicy()
        self._batchers: dict[int, Batcher] = {}
        self._waiting: dict[int, BatchedRun] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._serial = 0

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self.inner.close()

    def take_policy(self, document: PolicyDocument) -> None:
        """The limits of a revision, for batches that are open too."""
        self.inner.take_policy(document)
        policy = batch_policy(document)
        if policy == self._policy:
            return
        self._policy, now_us = policy, self._now_us()
        for batcher in self._batchers.values():
            self._close(batcher.set_policy(policy, now_us))
        self._arm()

    def gathers(self, path: str) -> bool:
        """Whether requests to that path wait for others once they are on a slot."""
        return path == EMBEDDINGS_PATH and self._policy.on and not self.inner.batches_itself

    def wait_us(self, path: str) -> int:
        """How long a request to that path may wait for others, once it is on a slot."""
        return self._policy.max_wait_us if self.gathers(path) else 0

    def shape_of(self, body: bytes, path: str) -> str:
        """What a checked request may be run together with; empty where it is not."""
        return embedding_inputs(body).shape if self.gathers(path) else ""

    def start(self, request: BackendRequest, sink: Sink) -> Run:
        if not self.gathers(request.path):
            return self.inner.start(request, sink)
        self._serial += 1
        now_us, inputs = self._now_us(), embedding_inputs(request.body)
        member = Member(self._serial, inputs.shape, now_us, len(inputs.pieces))
        run = BatchedRun(self, request, sink, Waiting(member, inputs, request.prompt_tokens))
        self._waiting[member.id] = run
        batcher = self._batchers.get(request.slot_id)
        if batcher is None:
            batcher = self._batchers[request.slot_id] = Batcher(self._policy)
        self._close(batcher.offer(member, now_us))
        self._arm()
        return run

    def leave(self, run: BatchedRun) -> None:
        """A member that still waits goes; its batch's deadline follows the next oldest."""
        if self._waiting.pop(run.waiting.member.id, None) is not None:
            self._batchers[run.request.slot_id].cancel(run.waiting.member.id)
            self._arm()

    def _close(self, batches: list[Batch]) -> None:
        for batch in batches:
            runs = [self._waiting.pop(member.id) for member in batch.members]
            # Never from within start: the engine does not know the attempt yet.
            self._loop.call_soon(self._begin, runs)

    def _begin(self, runs: list[BatchedRun]) -> None:
        runs = [run for run in runs if not run.left]
        if runs:
            RunningBatch(self.inner, runs).begin()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dues = [due for batcher in self._batchers.values() if (due := batcher.next_due_us()) is not None]
        if dues:
            wait_s = max(TIMER_LEAST_S, (min(dues) - self._now_us()) / 1e6)
            self._timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_us = self._now_us()
        for batcher in self._batchers.values():
            self._close(batcher.due(now_us))
        self._arm()


class BatchedRun:
    """One member's attempt, from its wait for a batch to its part of the answer."""

    __slots__ = ("_backend", "alone", "batch", "left", "request", "sink", "waiting")

    def __init__(self, backend: BatchingBackend, request: BackendRequest, sink: Sink, waiting: Waiting) -> None:
        self._backend = backend
        self.request = request
        self.sink = sink
        self.waiting = waiting
        self.left = False
        self.batch: RunningBatch | None = None
        self.alone: Run | None = None
        """Its own attempt, where its batch was refused and each is tried by itself."""

    def cancel(self) -> None:
        if self.left:
            return
        self.left = True
        if self.alone is not None:
            self.alone.cancel()
        elif self.batch is not None:
            self.batch.member_left()
        else:
            self._backend.leave(self)

    def pause(self) -> None:
        """An answer that is not streamed is small: it is handed out whole."""

    def resume(self) -> None:
        """See `pause`."""

    def usage_so_far(self) -> TokenUsage | None:
        return None


class RunningBatch:
    """A closed batch on the backend: the sink of one attempt, on behalf of all members that are still there."""

    def __init__(self, inner: Backend, runs: list[BatchedRun]) -> None:
        self._inner = inner
        self._runs = runs
        self._run: Run | None = None

    def begin(self) -> None:
        for run in self._runs:
            run.batch = self
            run.sink.batch_closed()
        # A member may have been ended by what its batch's closing set off.
        self._runs = [run for run in self._runs if not run.left]
        if self._runs:
            self._run = self._inner.start(self._request(), self)

    def _request(self) -> BackendRequest:
        first = self._runs[0].request
        if len(self._runs) == 1:
            return first
        requests = [run.request for run in self._runs]
        merged = first.sent_as(first.path, merged_body([run.waiting.inputs for run in self._runs]))
        merged.prompt_tokens = sum(request.prompt_tokens for request in requests)
        merged.n = sum(request.n for request in requests)
        merged.priority = min(request.priority for request in requests)
        return merged

    @property
    def _present(self) -> list[BatchedRun]:
        return [run for run in self._runs if not run.left]

    def member_left(self) -> None:
        """The others' work goes on; nobody's is stopped."""
        if self._run is not None and not self._present:
            self._run.cancel()

    # The sink of the merged attempt

    def batch_closed(self) -> None:
        """The merged attempt waits for no other."""

    def prefill_began(self) -> None:
        for run in self._present:
            run.sink.prefill_began()

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        """Embeddings are not streamed."""

    def finished(self, usage: TokenUsage, body: bytes) -> None:
        try:
            parts = split_answer(body, [run.waiting for run in self._runs])
        except BadAnswer as error:
            self._fail(Failure(str(error), retryable=False))
            return
        for run, part in zip(self._runs, parts, strict=True):
            if not run.left:
                run.left = True
                run.sink.finished(part.usage, part.body)

    def failed(self, failure: Failure) -> None:
        refused = 400 <= failure.status < 500 and not failure.retryable
        if refused and len(self._runs) > 1:
            # One input that the server refuses must not refuse those of the others.
            log.info("a batch of %d requests was refused (%d): each is tried alone", len(self._runs), failure.status)
            for run in self._present:
                run.alone = self._inner.start(run.request, run.sink)
        else:
            self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        for run in self._present:
            run.left = True
            run.sink.failed(failure)
