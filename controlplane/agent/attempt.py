"""One attempt of a call on a backend: what comes back is handed to the client and noted with its instant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controlplane.agent.backends.base import Run
from controlplane.agent.backends.request import Failure, TokenUsage
from controlplane.agent.call_headers import call_headers
from controlplane.core.reasons import Outcome

if TYPE_CHECKING:
    from controlplane.agent.call import Call
    from controlplane.agent.engine import Engine


CHARGED_TOGETHER: Final = 8
"""Output of a stream that is charged at once while it repeats: who is next hears of it that much later."""


class Attempt:
    """The sink of one attempt. What an abandoned attempt still says is not listened to."""

    __slots__ = ("_uncharged", "call", "engine", "run", "serial")

    def __init__(self, engine: Engine, call: Call, serial: int) -> None:
        self.engine = engine
        self.call = call
        self.serial = serial
        self.run: Run | None = None
        self._uncharged = 0
        """Output that was handed on and not charged yet; the end of a call charges what there was in all."""

    @property
    def live(self) -> bool:
        return self.call.attempt is self and not self.call.closed

    def batch_closed(self) -> None:
        if self.live:
            self.engine.batch_closed(self.call, self.serial)

    def prefill_began(self) -> None:
        call = self.call
        if call.attempt is self and not call.closed:
            call.prefill_us = self.engine.clock.now_us()

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        call = self.call
        if call.attempt is not self or call.closed:
            return
        engine = self.engine
        if framed:
            call.exchange.write_chunks(data)
        elif call.head_sent:
            call.exchange.write(data)
        else:
            call.head_sent = True
            call.exchange.begin_stream(call_headers(call), data)
        if tokens:
            now_us = engine.clock.now_us()
            if not call.first_us:
                call.first_us = now_us
                if call.slot is not None:
                    call.slot.metered.delivered(self.serial)
            call.last_us = now_us
            call.output_tokens += tokens
        uncharged = self._uncharged + tokens
        if framed and uncharged < CHARGED_TOGETHER:
            self._uncharged = uncharged
        else:
            self._uncharged = 0
            engine.scheduler.produced(call.serial, uncharged)
        if tokens and engine.flex.any_draining and call.slot is not None:
            engine.flex.token_seen(call.slot.policy.name)

    def finished(self, usage: TokenUsage, body: bytes) -> None:
        call = self.call
        if call.attempt is self and not call.closed:
            self.engine.close(call, Outcome.COMPLETED, usage=usage, body=body)

    def failed(self, failure: Failure) -> None:
        if self.live:
            self.engine.fail(self.call, failure)

    def cancel(self) -> None:
        if self.run is not None:
            self.run.cancel()
