"""`manage.py controller`: the one-second loop of flex decisions, frames and the live list; one of several leads."""

import json
import logging
import signal
import threading
import time
from argparse import ArgumentParser
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError, OperationalError, connection

from controlplane.flex.controller import Controller, Tick
from controlplane.policy import live_list
from controlplane.policy.signing import SigningKeyMissing, ensure_keys
from controlplane.policy.tasks import sign_live
from controlplane.tenants.queries import installation

log = logging.getLogger(__name__)

PERIOD_S = 1.0
#: Rows that were written without a number are looked for this often.
SWEEP_EVERY_S = 30.0


class Command(BaseCommand):
    help = "Runs the control loop: flex decisions once a second. Several may run; one leads, another takes over."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--shard", default="main", help="main, or N/M for the N-th of M parts of the pools")
        parser.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *, shard: str, json: bool, **_: Any) -> None:
        try:
            controller = Controller(shard)
        except ValueError as problem:
            raise CommandError(str(problem), returncode=2) from None
        stop = threading.Event()
        before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            Loop(controller, self._line if not json else self._json_line).run(stop)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _line(self, event: str, facts: dict[str, Any]) -> None:
        self.stdout.write(" ".join([f"controller {event}", *(f"{name}={value}" for name, value in facts.items())]))
        self.stdout.flush()

    def _json_line(self, event: str, facts: dict[str, Any]) -> None:
        self.stdout.write(json.dumps({"event": event, **facts}))
        self.stdout.flush()


class Loop:
    """Ticks once a second until it is told to stop; an error costs the tick, never the loop."""

    def __init__(self, controller: Controller, say: Any) -> None:
        self._controller = controller
        self._say = say
        self._led: bool | None = None
        self._keys_made = False
        self._swept_at = 0.0
        self._publish = _publisher()

    def run(self, stop: threading.Event) -> None:
        due = time.monotonic()
        while not stop.is_set():
            self._guarded(self._tick)
            due = max(due + PERIOD_S, time.monotonic())
            stop.wait(max(0.0, due - time.monotonic()))
        self._guarded(self._controller.resign)
        self._say("stopped", {"shard": self._controller.shard.name})
        connection.close()

    def _tick(self) -> None:
        tick = self._controller.tick()
        self._tell(tick)
        if not tick.leads or tick.now is None:
            return
        self._sign(tick.now)
        if self._publish is not None:
            self._publish(tick.now)

    def _tell(self, tick: Tick) -> None:
        if tick.leads != self._led:
            self._led = tick.leads
            word = "leads" if tick.leads else "stands by"
            self._say(word, {"shard": self._controller.shard.name, "holder": self._controller.leadership.holder,
                             "term": tick.term})  # fmt: skip
        for pool_id, decision in tick.decisions.items():
            if decision.acts:
                done = [f"{action.kind}:{action.slot}:{action.fence}" for action in decision.actions]
                log.info("pool %s: %s", pool_id, " ".join(done))

    def _sign(self, now: datetime) -> None:
        """An installation without a worker converges too: what the bell would have started is done here if it lags."""
        if not self._keys_made:
            ensure_keys(now)
            self._keys_made = True
        due = time.monotonic() - self._swept_at >= SWEEP_EVERY_S
        if not due and live_list.newest() >= installation().live_number:
            return
        self._swept_at = time.monotonic()
        try:
            sign_live()
        except SigningKeyMissing as problem:
            log.error("the live list was not signed: %s", problem)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except (OperationalError, InterfaceError) as problem:
            log.error("database out of reach, trying again: %s", str(problem).strip().split("\n")[0])
            self._lose()
        except DatabaseError:
            log.exception("the database refused a tick; the next one tries again")
            self._lose()
        except Exception:
            log.exception("a tick failed; the next one tries again")
            self._lose()

    def _lose(self) -> None:
        try:
            connection.close()
        except DatabaseError:
            log.warning("the connection could not be closed; it is given up")


def _publisher() -> Any:
    """Frames for the live pages, where this installation has them."""
    if find_spec("controlplane.live.frames") is None:
        return None
    return getattr(import_module("controlplane.live.frames"), "publish_all", None)
