"""A simulated inference server: continuous batching per slot on measured curves, KV memory, seeded and repeatable.

Each slot works in steps, as continuous-batching engines do (Orca, OSDI 2022): a step takes the prompts that have just
arrived and one token of every running request, and lasts the prefill of those prompts plus a decode step of that batch.
Tokens are words. `speed` divides all times; 0 is infinitely fast.
"""

import asyncio
import time
import zlib
from collections import deque
from random import Random
from typing import Final

from controlplane.agent.backends.base import Sink
from controlplane.agent.backends.curves import ServiceCurve
from controlplane.agent.backends.request import BackendRequest, Failure, TokenUsage
from controlplane.agent.backends.sim_one_shot import DEFAULT_CURVE, OneShotRun, OneShotSims
from controlplane.core.batching import ServiceTime
from controlplane.wire.policy import PolicyDocument

WORDS: Final = (
    "the", "flow", "of", "work", "along", "a", "line", "is", "even", "when", "every", "part", "keeps", "its",
    "own", "time", "and", "waits", "for", "none", "so", "that", "what", "comes", "in", "on", "one", "side",
    "goes", "out", "on", "the", "other", "and", "no", "heap", "is", "left",
)  # fmt: skip
BYTES_PER_TOKEN: Final = 4
UNLIMITED_KV: Final = 1 << 61


class SimBackend:
    """All slots of one agent. The same seed and the same bodies give the same answers."""

    cancels_promptly = True
    batches_itself = False

    def __init__(
        self, curve: ServiceCurve, *, seed: int = 0, speed: float = 1.0, batch_curve: ServiceTime = DEFAULT_CURVE
    ) -> None:
        if speed < 0:
            raise ValueError(f"the speed is 0 (infinite) or more, not {speed}")
        self.curve = curve
        self.seed = seed
        self.speed = speed
        self._slots: dict[int, SimSlot] = {}
        self._one_shot = OneShotSims(batch_curve, seed=seed, speed=speed)

    async def open(self) -> None:
        return None

    async def close(self) -> None:
        for slot in self._slots.values():
            slot.stop()
        self._one_shot.stop()

    def take_policy(self, document: PolicyDocument) -> None:
        """Nothing of it concerns a simulated server."""

    def set_slots(self, slots: dict[int, int]) -> None:
        for slot_id, kv_tokens in slots.items():
            if slot_id in self._slots:
                self._slots[slot_id].kv_tokens = kv_tokens
            else:
                self._slots[slot_id] = SimSlot(self, kv_tokens)

    def start(self, request: BackendRequest, sink: Sink) -> "SimRun | OneShotRun":
        if request.one_shot:
            return self._one_shot.start(request, sink)
        slot = self._slots.get(request.slot_id)
        if slot is None:
            slot = self._slots[request.slot_id] = SimSlot(self, UNLIMITED_KV)
        run = SimRun(request, sink, slot, self._output_tokens(request))
        slot.enter(run)
        return run

    def count_prompt(self, serialised: bytes) -> int | None:
        return max(1, len(serialised) // BYTES_PER_TOKEN)

    def _output_tokens(self, request: BackendRequest) -> int:
        """Length of each choice: the limit with `ignore_eos`, else a seeded draw that the limit cuts off."""
        if request.ignore_eos or request.max_output_tokens <= 1:
            return request.max_output_tokens
        rng = Random((self.seed << 32) ^ zlib.crc32(request.body))  # noqa: S311  a simulation
        drawn = rng.lognormvariate(0.0, 0.5) * 0.6 * request.max_output_tokens
        return max(1, min(request.max_output_tokens, round(drawn)))


class SimRun:
    """One attempt on a slot."""

    __slots__ = ("begun", "cancelled", "kv_tokens", "made", "paused", "request", "sink", "slot", "wanted", "words")

    def __init__(self, request: BackendRequest, sink: Sink, slot: "SimSlot", wanted: int) -> None:
        self.request = request
        self.sink = sink
        self.slot = slot
        self.wanted = wanted
        self.made = 0
        self.kv_tokens = 0
        self.begun = False
        self.cancelled = False
        self.paused = False
        self.words = zlib.crc32(request.body) % len(WORDS)

    def cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self.slot.leave(self)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.slot.wake()

    def usage_so_far(self) -> TokenUsage | None:
        """It tells its usage with its end only, as most servers do."""
        return None

    def step(self) -> None:
        """One token of every choice."""
        self.made += 1
        request = self.request
        if request.stream:
            data = self._role_chunks() if self.made == 1 else b""
            self.sink.chunk(data + self._word_chunks(), request.n)
        if self.made >= self.wanted and not self.cancelled:
            self._finish()

    def _finish(self) -> None:
        self.cancelled = True
        self.slot.leave(self)
        request, output = self.request, self.wanted * self.request.n
        usage = TokenUsage(request.prompt_tokens, 0, output)
        if request.stream:
            self.sink.finished(usage, self._end_chunks(usage))
        else:
            self.sink.finished(usage, self._body(usage))

    # OpenAI's shapes

    def _head(self, kind: str) -> str:
        request = self.request
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        made = f'"id":"{prefix}{request.request_id}","object":"{kind}","created":{self.slot.created_s()}'
        return f'{{{made},"model":"{request.model}",'

    @property
    def _chat(self) -> bool:
        return self.request.path == "/v1/chat/completions"

    def _event(self, rest: str) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return f"data: {self._head(kind)}{rest}}}\n\n".encode()

    def _role_chunks(self) -> bytes:
        if not self._chat:
            return b""
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"".join(self._event(f'"choices":[{{"index":{i},{role}}}]') for i in range(self.request.n))

    def _word_chunks(self) -> bytes:
        word = self._word(self.made)
        if self._chat:
            part = f'"delta":{{"content":"{word}"}},"logprobs":null,"finish_reason":null'
        else:
            part = f'"text":"{word}","logprobs":null,"finish_reason":null'
        if self.request.n == 1:
            return self._event(f'"choices":[{{"index":0,{part}}}]')
        return b"".join(self._event(f'"choices":[{{"index":{i},{part}}}]') for i in range(self.request.n))

    def _end_chunks(self, usage: TokenUsage) -> bytes:
        part = '"delta":{}' if self._chat else '"text":""'
        ends = b"".join(
            self._event(f'"choices":[{{"index":{i},{part},"logprobs":null,"finish_reason":"{self._reason}"}}]')
            for i in range(self.request.n)
        )
        if self.request.wants_usage:
            ends += self._event(f'"choices":[],"usage":{_usage_json(usage)}')
        return ends + b"data: [DONE]\n\n"

    @property
    def _reason(self) -> str:
        return "length" if self.wanted >= self.request.max_output_tokens else "stop"

    def _word(self, position: int) -> str:
        word = WORDS[(self.words + position) % len(WORDS)]
        return word if position == 1 else " " + word

    def _body(self, usage: TokenUsage) -> bytes:
        text = "".join(self._word(position) for position in range(1, self.wanted + 1))
        if self._chat:
            kind, part = "chat.completion", f'"message":{{"role":"assistant","content":"{text}","refusal":null}}'
        else:
            kind, part = "text_completion", f'"text":"{text}"'
        choices = ",".join(
            f'{{"index":{i},{part},"logprobs":null,"finish_reason":"{self._reason}"}}' for i in range(self.request.n)
        )
        return f'{self._head(kind)}"choices":[{choices}],"usage":{_usage_json(usage)}}}'.encode()


def _usage_json(usage: TokenUsage) -> str:
    total = usage.prompt_tokens + usage.output_tokens
    return (
        f'{{"prompt_tokens":{usage.prompt_tokens},"completion_tokens":{usage.output_tokens},"total_tokens":{total},'
        f'"prompt_tokens_details":{{"cached_tokens":{usage.cached_tokens}}}}}'
    )


class SimSlot:
    """One engine replica: what waits for prefill, what decodes, and the step in progress."""

    __slots__ = ("_backend", "_due_s", "_loop", "_timer", "decoding", "kv_free_used", "kv_tokens", "waiting")

    def __init__(self, backend: SimBackend, kv_tokens: int) -> None:
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0
        self.kv_tokens = kv_tokens
        self.kv_free_used = 0
        self.waiting: deque[SimRun] = deque()
        self.decoding: list[SimRun] = []

    def created_s(self) -> int:
        return int(time.time())

    def enter(self, run: SimRun) -> None:
        self.waiting.append(run)
        self.wake()

    def leave(self, run: SimRun) -> None:
        """Cancelled or finished: its memory is free again."""
        if run in self.decoding:
            self.decoding.remove(run)
            self.kv_free_used -= run.kv_tokens
        elif run in self.waiting:
            self.waiting.remove(run)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        """Begin a step unless one is in progress or there is nothing to do."""
        if self._timer is None and (self.waiting or any(not run.paused for run in self.decoding)):
            self._timer = self._loop.call_soon(self._begin_now)

    def _begin_now(self) -> None:
        self._timer = None
        self._due_s = self._loop.time()
        self._begin()

    def _begin(self) -> None:
        prompt_tokens = self._take_in()
        stepping = sum(not run.paused for run in self.decoding)
        if not stepping:
            return
        if self._backend.speed == 0:
            self._step()
            return
        curve, us = self._backend.curve, 0.0
        fresh = sum(not run.begun for run in self.decoding)
        if prompt_tokens:
            us += curve.prefill_us(prompt_tokens)
        if stepping > fresh:
            us += curve.decode_us(stepping)
        # Steps follow each other from when they were due, so that late timers do not slow the slot down.
        self._due_s = max(self._due_s + us / 1e6 / self._backend.speed, self._loop.time() - 0.05)
        self._timer = self._loop.call_at(self._due_s, self._step)

    def _take_in(self) -> int:
        """Move what fits the memory from waiting to running; returns the prompt tokens to work on."""
        tokens = 0
        while self.waiting:
            run = self.waiting[0]
            need = run.request.prompt_tokens + run.wanted * run.request.n
            if self.decoding and self.kv_free_used + need > self.kv_tokens:
                break
            self.waiting.popleft()
            if need > self.kv_tokens:
                run.cancelled = True
                self._loop.call_soon(
                    run.sink.failed, Failure("the request is larger than the slot's memory", False, 400)
                )
                continue
            run.kv_tokens = need
            self.kv_free_used += need
            tokens += run.request.prompt_tokens
            self.decoding.append(run)
            run.sink.prefill_began()
        return tokens

    def _step(self) -> None:
        self._timer = None
        batch = [run for run in self.decoding if not run.paused]
        infinite = self._backend.speed == 0
        for run in batch:
            run.begun = True
            if infinite:
                while not run.cancelled and not run.paused:
                    run.step()
            elif not run.cancelled:
                run.step()
        if self.waiting or self.decoding:
            if infinite:
                self.wake()
            elif self._timer is None:
                self._begin()
