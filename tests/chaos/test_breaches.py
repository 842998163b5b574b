"""Interactive requests wait while batch runs on lent slots: batch stops at once there, and soon at the agent beside.

Real processes: web, controller, worker, broker and two agents on PostgreSQL; all of them started here. The suite runs
one breach; FLEXBAND_BREACHES=100 runs as many as are asked for.
"""

import asyncio
import itertools
import os
import random
import statistics
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from django.conf import settings

from controlplane.flex.models import Lend, PoolSample, Trip
from tests.agent import control_planes as cp
from tests.chaos.breach_world import Callers, Looks, at_interactive, until
from tests.chaos.cut_off_world import CANCEL_BOUND_S, DRAIN_BOUND_S, ControlPlane, Fleet, lent_fleet

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes, pytest.mark.slow]

BREACHES = int(os.environ.get("FLEXBAND_BREACHES", "1"))
LEND_P95_MS = 150
THROUGH_CONTROL_PLANE_S = 2.0
STEP_S = 0.05
"""A step of the scheduler comes with every event and at least this often while somebody waits."""
TICK_S = 1.0
"""Breaches begin anywhere in the controller's second."""
PLACES = 16
"""On the first agent's interactive slots."""
WAITING = 40
"""Enough to be a twentieth of the waits of a minute in which `PLACES` requests of each breach found a place at once."""


async def breach(fleet: Fleet, looks: Looks, fences: dict[str, int]) -> None:
    """Every interactive place of the first agent is taken and more requests wait, until all lent slots are recalled."""
    port = fleet.agents["gpu-1"].port
    running, waiting = Callers(port), Callers(port)
    try:
        running.ask(PLACES)
        await until(lambda: all_taken(fleet), 30, "every interactive place taken", looks, running)
        waiting.ask(WAITING)
        await until(lambda: looks.all_recalled(fences), 30, f"all above {fences}", looks, running, waiting)
    finally:
        # Who waits gives up first: a request that still got a place would be a long wait of the minutes to come.
        await waiting.give_up()
        await until(lambda: nobody_waits(fleet), 30, "nobody waits any more", looks, running)
        await running.give_up()


async def all_taken(fleet: Fleet) -> bool:
    return await at_interactive(fleet, "gpu-1") >= PLACES


async def nobody_waits(fleet: Fleet) -> bool:
    health = await fleet.agents["gpu-1"].health()
    return health["requests"]["present"] < PLACES + WAITING / 2


def lend_by_waits(world) -> None:
    """Whoever finds no place waits for one, and nothing else refuses so many."""
    world.pool.lend_p95_ms, world.tenant.max_concurrency = LEND_P95_MS, 1_000
    world.chat.overload, world.chat.max_queue = "queue", 4 * WAITING
    world.tenant.save()
    world.chat.save()


async def test_batch_stops_with_the_step_that_sees_the_breach_and_beside_within_two_seconds(world, tmp_path, capsys):
    plane = ControlPlane(tmp_path, broker=settings.CELERY_BROKER_URL)
    await cp.in_database(lend_by_waits)(world)
    fleet = None
    try:
        fleet = await lent_fleet(world, plane, tmp_path)
        looks, phases = Looks(fleet), random.Random(7)
        for number in range(BREACHES):
            what = f"all lent and busy before breach {number + 1}"
            fences = await until(looks.all_lent_and_busy, 120, what, looks)
            await asyncio.sleep(phases.random() * TICK_S)
            await breach(fleet, looks, fences)
        await until(cp.in_database(drained), DRAIN_BOUND_S + CANCEL_BOUND_S, "every drain told", looks)
    finally:
        if fleet is not None:
            await fleet.end()
        await plane.end()
    found = await cp.in_database(figures)()
    with capsys.disabled():
        print(found.told())
    assert looks.began == []
    assert found.trips >= BREACHES
    assert len(found.own) >= BREACHES
    assert len(found.beside) >= BREACHES
    assert max(found.own) <= STEP_S
    assert max(found.beside) <= THROUGH_CONTROL_PLANE_S
    assert len(found.drains) >= 2 * BREACHES
    assert max(found.drains) <= DRAIN_BOUND_S + 1, "the bound, and how often a look comes"


@dataclass
class Figures:
    """Seconds, of every breach that was stored."""

    trips: int = 0
    own: list[float] = field(default_factory=list)
    """From the trip until the slot of the same agent took no batch any more."""
    beside: list[float] = field(default_factory=list)
    """From the trip until that of the other agent took none: `decided` and `taken` one after the other."""
    decided: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    since_wait: list[float] = field(default_factory=list)
    """From the arrival of the request that waited too long until neither slot took any."""
    seen: list[float] = field(default_factory=list)
    """From the instant at which it had waited too long until that was seen."""
    drains: list[float] = field(default_factory=list)
    between_ticks: list[float] = field(default_factory=list)

    def add(self, trip: Trip, ended: list[Lend]) -> None:
        self.trips += 1
        waited_s = (trip.value or 0) / 1e6
        stops = []
        for loan in ended:
            assert loan.stop_admit_at is not None, f"{loan.slot.name} never told when it stopped"
            assert not (loan.overdue or loan.lost), f"{loan.slot.name} under fence {loan.fence}"
            stops.append((loan.stop_admit_at - trip.at).total_seconds())
            if loan.slot_id == trip.slot_id:
                self.own.append(max(0.0, stops[-1]))
            else:
                self.beside.append(max(0.0, stops[-1]))
                self.decided.append((loan.recalled_at - trip.at).total_seconds())
                self.taken.append((loan.stop_admit_at - loan.recalled_at).total_seconds())
            if loan.drain_us is not None:
                self.drains.append(loan.drain_us / 1e6)
        if trip.reason == "oldest_waiting":
            self.seen.append(waited_s - LEND_P95_MS / 1e3)
            self.since_wait.append(max([0.0, *stops]) + waited_s)

    def told(self) -> str:
        return "\n".join(
            [
                f"\n  {self.trips} breaches ended {len(self.own) + len(self.beside)} loans",
                f"  seen {told_of(self.seen)} s after {LEND_P95_MS} ms of waiting (a step comes every {STEP_S} s)",
                f"  on the agent itself: batch stopped {told_of(self.own)} s after that was seen (promise: its step)",
                f"  through the control plane: {told_of(self.beside)} s after it (promise {THROUGH_CONTROL_PLANE_S});",
                f"    decided {told_of(self.decided)} s after it, taken {told_of(self.taken)} s after that;",
                f"    between two ticks {told_of(self.between_ticks)} s",
                f"  neither took batch {told_of(self.since_wait)} s after the first wait began",
                f"  {len(self.drains)} drains took {told_of(self.drains)} s (bound {DRAIN_BOUND_S})",
            ]
        )


def figures() -> Figures:
    """Each trip with the loans that it ended."""
    found = Figures()
    ticks = list(PoolSample.objects.order_by("at").values_list("at", flat=True))
    found.between_ticks = [(after - before).total_seconds() for before, after in itertools.pairwise(ticks)]
    trips = list(Trip.objects.order_by("at"))
    for trip, after in zip(trips, [*trips[1:], None], strict=True):
        until_at = trip.at + timedelta(days=1) if after is None else after.at
        ended = Lend.objects.filter(lent_at__lt=trip.at, recalled_at__gte=trip.at, recalled_at__lt=until_at)
        found.add(trip, list(ended.select_related("slot")))
    return found


def drained() -> bool:
    return Lend.objects.filter(drain_us__isnull=False).count() >= 2 * BREACHES


def told_of(seconds: list[float]) -> str:
    if not seconds:
        return "nothing"
    return f"median {statistics.median(seconds):.3f}, longest {max(seconds):.3f}"
