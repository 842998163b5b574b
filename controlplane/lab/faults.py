"""What goes wrong in a simulation: slots that break, servers that come late, signals that are old or lost.

All of it is given or drawn with a seed before the run, so the same inputs give the same bytes. What runs on a slot that
breaks ends as on an agent whose inference server goes away: a request that has sent nothing is tried again within the
agent's retry budget, any other is lost with `upstream_error`; items of jobs are leased again.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final, cast

from controlplane.agent.engine import ATTEMPTS_MAX
from controlplane.core.idle_time import IdleCause
from controlplane.core.reasons import Outcome
from controlplane.core.retry_budget import RetryBudget
from controlplane.lab.calls import Call
from controlplane.lab.pool_control import Wire
from controlplane.lab.simulator import Simulator

US_PER_S: Final = 1_000_000
US_PER_HOUR: Final = 3_600 * US_PER_S
FAILURES_MAX: Final = 10_000
_FAIL: Final = re.compile(r"([^@]+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\+(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Failure:
    """A slot breaks at an instant from the start, for so long; None is for good."""

    slot: str
    at_us: int
    for_us: int | None = None


@dataclass(frozen=True, slots=True)
class Elastic:
    """Slots that are not there at first: ordered when the scaling signal asks for more, ready `lag_us` later."""

    slots: int
    lag_us: int = 300 * US_PER_S
    every_us: int = 15 * US_PER_S
    utilisation: float = 0.7
    drain_us: int = 60 * US_PER_S
    idle_us: int = 300 * US_PER_S
    """So long fewer have to be enough before one that runs nothing is given back."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which a load is run. `mtbf_us` and `mttr_us` draw failures of every slot with the seed."""

    failures: tuple[Failure, ...] = ()
    mtbf_us: int = 0
    mttr_us: int = 0
    seed: int = 0
    elastic: Elastic | None = None
    wire: Wire = field(default_factory=Wire)

    @property
    def ordinary(self) -> bool:
        """Nothing goes wrong, and signals are as old as they are anyway."""
        wrong = self.failures or self.mtbf_us or self.elastic
        return not wrong and self.wire == Wire(seed=self.wire.seed)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--fail", action="append", default=[], metavar="SLOT@S[+S]",
                        help="a slot breaks after so many seconds, for so many; without them for good")  # fmt: skip
    parser.add_argument("--mtbf-h", type=float, default=0.0, help="each slot breaks after so many hours on average")
    parser.add_argument("--mttr-min", type=float, default=10.0, help="and is back after so many minutes on average")
    parser.add_argument("--standby", type=int, default=0, help="slots more that are ordered when they are needed")
    parser.add_argument("--start-up-lag-s", type=float, default=300.0, help="from the order to the first request")
    parser.add_argument("--report-every-s", type=float, default=1.0, help="between an agent's reports")
    parser.add_argument("--report-latency-ms", type=float, default=20.0, help="from a report to its answer")
    parser.add_argument("--report-loss", type=float, default=0.0, help="share of reports that never arrive")
    parser.add_argument("--no-nudges", action="store_true", help="no broker: reports alone carry everything")
    parser.add_argument("--silent", action="append", default=[], metavar="S+S",
                        help="the control plane is out of reach after so many seconds, for so many")  # fmt: skip


def conditions_of(options: Mapping[str, Any]) -> Conditions:
    """From arguments; options that are not there are the ordinary ones. Raises ValueError that says what is wrong."""
    if "fail" not in options:
        return Conditions()
    numbers = ("mtbf_h", "mttr_min", "standby", "start_up_lag_s", "report_latency_ms")
    if any(options[name] < 0 for name in numbers) or options["report_every_s"] < 0.1:
        raise ValueError("--report-every-s is 0.1 or more, and no time or number of slots is negative")
    if not 0 <= options["report_loss"] < 1:
        raise ValueError("--report-loss is a share from 0 to under 1")
    if options["mtbf_h"] and not options["mttr_min"]:
        raise ValueError("--mttr-min is above 0 where slots break by --mtbf-h")
    wire = Wire(
        interval_us=round(options["report_every_s"] * US_PER_S), latency_us=round(options["report_latency_ms"] * 1_000),
        nudge_us=None if options["no_nudges"] else Wire().nudge_us, loss=options["report_loss"], seed=options["seed"],
        silent_us=tuple(_span(text) for text in options["silent"]),
    )  # fmt: skip
    lag_us = round(options["start_up_lag_s"] * US_PER_S)
    return Conditions(
        tuple(read_failure(text) for text in options["fail"]), round(options["mtbf_h"] * US_PER_HOUR),
        round(options["mttr_min"] * 60 * US_PER_S), options["seed"],
        Elastic(options["standby"], lag_us) if options["standby"] else None, wire,
    )  # fmt: skip


def read_failure(text: str) -> Failure:
    """`SLOT@SECONDS[+SECONDS]`. Raises ValueError that says how to write it."""
    match = _FAIL.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--fail {text}: write SLOT@SECONDS or SLOT@SECONDS+SECONDS, such as S01@600+300")
    for_us = None if match[3] is None else round(float(match[3]) * US_PER_S)
    return Failure(match[1], round(float(match[2]) * US_PER_S), for_us)


def _span(text: str) -> tuple[int, int]:
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--silent {text}: write SECONDS+SECONDS, such as 600+120")
    begin_us = round(float(match[1]) * US_PER_S)
    return begin_us, begin_us + round(float(match[2]) * US_PER_S)


def drawn(slots: Iterable[str], *, mtbf_us: int, mttr_us: int, until_us: int, seed: int) -> list[Failure]:
    """Failures of every slot until an instant: exponential times to fail and to be back, by seed and slot."""
    found = []
    for slot in slots:
        rng, at_us = Random(f"{seed}:{slot}"), 0.0  # noqa: S311  a simulation
        while (at_us := at_us + rng.expovariate(1 / mtbf_us)) < until_us:
            for_us = rng.expovariate(1 / mttr_us)
            found.append(Failure(slot, round(at_us), max(1, round(for_us))))
            at_us += for_us
            if len(found) > FAILURES_MAX:
                raise ValueError(f"that is more than {FAILURES_MAX:,} failures: raise --mtbf-h")
    return sorted(found, key=lambda failure: (failure.at_us, failure.slot))


class Faults:
    """Breaks slots of one simulation as planned, and keeps what came of it. Make it before the simulation runs."""

    def __init__(self, simulator: Simulator, failures: Sequence[Failure]) -> None:
        self._simulator = simulator
        self._retries = RetryBudget()
        self.broken = 0
        """Slots that broke while they worked."""
        self.retried = 0
        self.lost = 0
        self._down: dict[str, int] = {}
        """How many failures hold a slot down now: they may overlap."""
        self._slots = {slot.spec.name: slot for slot in simulator.scheduler.slots}
        for failure in failures:
            if failure.slot not in self._slots:
                known = ", ".join(sorted(self._slots))
                raise ValueError(f"--fail {failure.slot}: there is no such slot; there are {known}")
            simulator.at(simulator.start_us + failure.at_us, partial(self._break, failure))
        simulator.on_admitted = self._retries.count_request

    def _break(self, failure: Failure) -> None:
        simulator, slot = self._simulator, self._slots[failure.slot]
        now_us = simulator.now_us()
        if failure.for_us is not None:
            simulator.at(now_us + failure.for_us, partial(self._mend, failure.slot))
        down = self._down[failure.slot] = self._down.get(failure.slot, 0) + 1
        if down > 1 or not slot.ready:
            # Down already, or not there yet: it has nothing to lose.
            return
        self.broken += 1
        simulator.scheduler.set_slot(failure.slot, now_us, ready=False)
        for request in sorted(slot.running.values(), key=lambda request: request.order):
            self._fail(cast(Call, request.call), now_us)
        simulator.timeline.away(slot.index, IdleCause.BROKEN, now_us)
        simulator.pump(now_us)

    def _fail(self, call: Call, now_us: int) -> None:
        """As `agent.engine` does when a backend fails: what has sent nothing is tried again within the budget."""
        sent = not call.klass.is_batch and call.first_us <= now_us
        if not sent and call.queued.attempt < ATTEMPTS_MAX and self._retries.try_retry(now_us):
            self.retried += 1
            self._simulator.requeue(call, preempted=False)
        else:
            self.lost += 1
            self._simulator.close(call, Outcome.UPSTREAM_ERROR)

    def _mend(self, name: str) -> None:
        simulator, slot = self._simulator, self._slots[name]
        self._down[name] -= 1
        if self._down[name] or simulator.timeline.cause_away(slot.index) is not IdleCause.BROKEN:
            return
        now_us = simulator.now_us()
        simulator.timeline.away(slot.index, None, now_us)
        simulator.scheduler.set_slot(name, now_us, ready=True)
        simulator.pump(now_us)

    def told(self) -> dict[str, int]:
        """For a report."""
        return {"slots_broken": self.broken, "requests_retried": self.retried, "requests_lost": self.lost}


def planned(conditions: Conditions, slots: Sequence[str], until_us: int) -> list[Failure]:
    """The failures that were named, and those that are drawn."""
    found = list(conditions.failures)
    if conditions.mtbf_us:
        found += drawn(
            slots, mtbf_us=conditions.mtbf_us, mttr_us=conditions.mttr_us, until_us=until_us, seed=conditions.seed
        )
    return found


def told(conditions: Conditions) -> dict[str, Any]:
    """The conditions as an answer states them."""
    elastic, wire = conditions.elastic, conditions.wire
    return {
        "failures": [
            {"slot": one.slot, "at_s": one.at_us / US_PER_S, "for_s": one.for_us and one.for_us / US_PER_S}
            for one in conditions.failures
        ],
        "mtbf_h": conditions.mtbf_us / US_PER_HOUR or None,
        "mttr_min": conditions.mttr_us / US_PER_S / 60 if conditions.mtbf_us else None,
        "standby": 0 if elastic is None else elastic.slots,
        "start_up_lag_s": None if elastic is None else elastic.lag_us / US_PER_S,
        "report_every_s": wire.interval_us / US_PER_S, "report_latency_ms": wire.latency_us / 1_000,
        "report_loss": wire.loss, "nudges": wire.nudge_us is not None,
        "silent_s": [[begin / US_PER_S, end / US_PER_S] for begin, end in wire.silent_us],
    }  # fmt: skip
