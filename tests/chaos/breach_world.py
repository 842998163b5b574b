"""Requests that take every interactive place of an agent, more that wait for one, and what is told if a slot stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.flex.models import Decision, Lend, PoolSample, Trip
from tests.agent import control_planes as cp
from tests.agent.wire_client import WireClient, chat_body, post
from tests.chaos.cut_off_world import Fleet

AGAIN_S = 0.3


@dataclass
class Callers:
    """Clients of one agent, each with a request that stays: refused or answered, it asks again until given up."""

    port: int
    ends: Counter[str] = field(default_factory=Counter)
    """What came back so far."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def ask(self, count: int) -> None:
        self.tasks += [asyncio.create_task(self._ask()) for _ in range(count)]

    async def _ask(self) -> None:
        while True:
            try:
                client = await WireClient.connect(self.port)
                try:
                    client.send(post(chat_body(max_tokens=2_000, ignore_eos=True), key=cp.SECRET))
                    answer = await client.answer(60)
                    code = answer.json["error"]["code"] if answer.status != 200 else "answered"
                    self.ends[f"{answer.status} {code}"] += 1
                finally:
                    client.abort()
            except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
                self.ends[repr(error)] += 1
            await asyncio.sleep(AGAIN_S)

    async def give_up(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()


@dataclass
class Looks:
    """What the agents told of their flex slots at each look, and where batch began on a slot on its way home."""

    fleet: Fleet
    last: dict[str, dict] = field(default_factory=dict)
    began: list[str] = field(default_factory=list)

    async def look(self) -> dict[str, dict]:
        seen = await self.fleet.flex()
        for name, slot in seen.items():
            before = self.last.get(name, slot)
            same_way = slot["fence"] - before["fence"] in (0, 1) and before["flex"] == slot["flex"] == "draining"
            if same_way and slot["running"] > before["running"]:
                self.began.append(f"{name}: {before} became {slot}")
        self.last = seen
        return seen

    async def all_lent_and_busy(self) -> dict[str, int] | None:
        """The fences of all loans, once every flex slot is lent and runs batch."""
        seen = await self.look()
        if len(seen) == len(self.fleet.agents) and all(s["flex"] == "lent" and s["running"] for s in seen.values()):
            return {name: slot["fence"] for name, slot in seen.items()}
        return None

    async def all_recalled(self, fences: dict[str, int]) -> bool:
        seen = await self.look()
        return all(slot["fence"] > fences[name] for name, slot in seen.items())


async def at_interactive(fleet: Fleet, name: str) -> int:
    """Requests that run on an agent's interactive slots."""
    slots = (await fleet.agents[name].health())["slots"]
    return sum(slot["running"] for slot_name, slot in slots.items() if slot_name.startswith("i"))


async def until(condition: Callable, within_s: float, what: str, looks: Looks, *callers: Callers):
    """`cp.until` that tells everything that is known when it did not happen."""
    try:
        return await cp.until(condition, within_s)
    except AssertionError:
        ends = [dict(one.ends) for one in callers]
        agents = [await process.health() for process in looks.fleet.agents.values()]
        requests = [(agent["requests"], agent["slots"]) for agent in agents]
        stored = await cp.in_database(_stored)()
        lines = [f"not within {within_s} s: {what}", f"callers got {ends}", *map(str, requests), *stored]
        raise AssertionError("\n".join(lines)) from None


def _stored() -> list[str]:
    """Trips, loans, the last seconds and the checks that held last, as the control plane stored them."""
    trips = Trip.objects.order_by("-at").values_list("slot__name", "fence", "at", "reason", "value", "handled_at")
    lends = Lend.objects.order_by("-lent_at")
    lent = lends.values_list(
        "slot__name", "fence", "lent_at", "recalled_at", "recall_reason", "stop_admit_at", "home_at"
    )
    samples = PoolSample.objects.order_by("-at")
    seconds = samples.values_list("at", "p95_queue_us", "admitted_per_s", "telemetry_age_us", "slack")
    decision = Decision.objects.order_by("-at").first()
    held = [] if decision is None else [check["name"] for check in decision.checks if check["held"]]
    return [
        *(_line("trip", row) for row in trips[:4]),
        *(_line("loan", row) for row in lent[:4]),
        *(_line("second", row) for row in seconds[:10]),
        f"held last: {', '.join(held)}; did {None if decision is None else decision.actions}",
    ]


def _line(kind: str, row: tuple) -> str:
    return " ".join([kind, *(value.strftime("%T.%f") if hasattr(value, "strftime") else str(value) for value in row)])
