"""`manage.py controller`: the one-second loop of flex decisions, frames and the live list; one of several leads."""

import gc
import json
import logging
import signal
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError, OperationalError, connection

from controlplane.flex.controller import Controller, Tick
from controlplane.live.burn_freeze import BurnWatch
from controlplane.live.frames import finish_telling, publish_all
from controlplane.policy import live_list
from controlplane.policy.signing import ensure_keys
from controlplane.policy.tasks import sign_live
from controlplane.tenants.models import Installation

log = logging.getLogger(__name__)
T = TypeVar("T")

PERIOD_S = 1.0
#: Rows that were written without a number are looked for this often.
SWEEP_EVERY_S = 30.0
TIDY_ALL_EVERY_S = 60.0


class Command(BaseCommand):
    help = "Runs the control loop: flex decisions once a second. Several may run; one leads, another takes over."
    requires_system_checks: list[str] = []

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
        self._watch = BurnWatch()
        self._keys_made = False
        self._swept_at = 0.0
        self._tidied_at = time.monotonic()
        self._failures: dict[str, tuple[str, int]] = {}

    def run(self, stop: threading.Event) -> None:
        # A tick makes many objects that die with it: cycles among them are looked for when it is over, not within.
        gc.disable()
        due = time.monotonic()
        while not stop.is_set():
            self._round(stop)
            self._tidy()
            due = max(due + PERIOD_S, time.monotonic())
            stop.wait(max(0.0, due - time.monotonic()))
        self._guarded("resigning", self._controller.resign)
        self._guarded("recording", finish_telling)
        gc.enable()
        self._say("stopped", {"shard": self._controller.shard.name})
        connection.close()

    def _tidy(self) -> None:
        """Frees what goes round in circles: of the last rounds each time, of all that lives once a minute."""
        now = time.monotonic()
        everything = now - self._tidied_at >= TIDY_ALL_EVERY_S
        if everything:
            self._tidied_at = now
        gc.collect(2 if everything else 1)

    def _round(self, stop: threading.Event) -> None:
        """One tick, and what follows it while this process leads; each part may fail without the others.

        Told to stop, it begins no further part: on a busy machine a round may take longer than a stop is waited for.
        """
        tick = self._guarded("tick", self._controller.tick)
        if tick is None:
            return
        self._tell(tick)
        if not tick.leads or tick.now is None:
            return
        parts: tuple[tuple[str, Callable[[datetime], object]], ...] = (
            ("live list", self._sign), ("burn watch", self._watch.look), ("frames", publish_all),
        )  # fmt: skip
        for part, work in parts:
            if stop.is_set():
                return
            self._guarded(part, partial(work, tick.now))

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
        numbers = Installation.objects.filter(pk=1).values_list("live_number", flat=True).first()
        if numbers is None:
            return
        if not self._keys_made:
            ensure_keys(now)
            self._keys_made = True
        due = time.monotonic() - self._swept_at >= SWEEP_EVERY_S
        if due or live_list.newest() < numbers:
            self._swept_at = time.monotonic()
            sign_live()

    def _guarded(self, part: str, work: Callable[[], T]) -> T | None:
        """What a part returns; None when it failed. The same failure again and again is told once, then counted."""
        try:
            done = work()
        except (OperationalError, InterfaceError) as problem:
            words = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            self._failed(part, f"database out of reach: {words}", trace=False)
        except Exception as problem:
            self._failed(part, f"{type(problem).__name__}: {problem}", trace=True)
        else:
            if failures := self._failures.pop(part, None):
                log.info("%s works again after %d failures", part, failures[1])
            return done
        self._lose()
        return None

    def _failed(self, part: str, words: str, *, trace: bool) -> None:
        told, count = self._failures.get(part, ("", 0))
        self._failures[part] = (words, count + 1)
        if words != told:
            log.error("%s failed, the next second tries again: %s", part, words, exc_info=trace)

    def _lose(self) -> None:
        try:
            connection.close()
        except DatabaseError:
            log.warning("the connection could not be closed; it is given up")
