"""Whether the inference server behind this agent takes work, and what follows from it for the agent's slots."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from controlplane.agent.agent_slot import BROKEN, READY, WARMING

if TYPE_CHECKING:
    from controlplane.agent.engine import Engine
    from controlplane.agent.engine_watch import EngineWatch

log = logging.getLogger(__name__)

FAILURES_MAX: Final = 3
"""Checks in a row that a busy server may leave unanswered."""


class Health:
    """Readiness from checks: ready with one good check, broken with several bad ones or one that is proof."""

    def __init__(self) -> None:
        self.state = WARMING
        self.why = "the inference server was not asked yet"
        self._failures = 0

    def good(self) -> None:
        self.state, self.why, self._failures = READY, "", 0

    def bad(self, why: str, *, proof: bool) -> None:
        """A check failed; `proof` when nothing listens there. A server that was never ready is still warming up."""
        self._failures += 1
        if self.state != READY or proof or self._failures >= FAILURES_MAX:
            self.state = WARMING if self.state == WARMING else BROKEN
            self.why = why


class SlotReadiness:
    """All slots of an agent stand on one inference server; without a watch they are ready."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.watch: EngineWatch | None = None
        self.state = READY

    def follow(self, watch: EngineWatch) -> None:
        """From now on slots are as ready as that server."""
        self.watch = watch
        watch.on_change = self._changed
        self.state = watch.health.state
        self.apply()

    @property
    def why(self) -> str:
        """Why no slot takes work; empty when they do."""
        return "" if self.watch is None or self.state == READY else self.watch.health.why

    def _changed(self) -> None:
        assert self.watch is not None
        was, self.state = self.state, self.watch.health.state
        if was != self.state:
            log.log(
                logging.INFO if self.state == READY else logging.WARNING,
                "the inference server is %s%s",
                self.state,
                f": {self.why}" if self.why else "",
            )
            self.apply()

    def apply(self) -> None:
        """Tell slots and scheduler; what runs goes on, because only its own end is proof of it."""
        engine = self._engine
        now_us = engine.clock.now_us()
        for slot in engine.slots.values():
            slot.state = self.state
        for running in engine.scheduler.slots:
            if running.ready != (self.state == READY):
                engine.scheduler.set_slot(running.spec.name, now_us, ready=self.state == READY)
        engine.pump(now_us)
