"""Service models beside the engine that agents simulate: long prompts hold up what else runs on their slot."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from controlplane.agent.backends.curves import CURVES
from controlplane.agent.backends.request import BackendRequest
from controlplane.agent.backends.sim import SimBackend
from controlplane.lab.policies import bands, document_of
from controlplane.lab.service import Constants, Tables
from controlplane.lab.simulator import Simulator
from controlplane.lab.workload import Workload
from controlplane.wire.policy import SizeBounds
from tests.lab.agent_driver import VirtualLoop

H100 = CURVES["h100"]
PLACES = 8


def requests(count: int, longest: int, *, seed: int = 3) -> list[tuple[int, int]]:
    """(prompt, output) of each."""
    rng = Random(seed)
    return [(rng.randint(200, longest), rng.randint(20, 400)) for _ in range(count)]


class Ends:
    """A sink that starts the next request in its place, as a scheduler with a full queue does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def prefill_began(self) -> None: ...

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None: ...

    def finished(self, usage, body) -> None:
        self.engine.ended()


class Engine:
    """One slot of the agent's simulated engine, kept full from a queue."""

    def __init__(self, queue: list[tuple[int, int]]) -> None:
        self.backend = SimBackend(H100)
        self.backend.set_slots({1: 1 << 40})
        self.queue = queue[::-1]
        self.left = len(queue)
        self.done = asyncio.Event()

    def next(self) -> None:
        if self.queue:
            prompt, output = self.queue.pop()
            self.backend.start(
                BackendRequest(f"r{len(self.queue)}", "/v1/chat/completions", b"{}", "m", 1, False, False, prompt,
                               output, 1, 0, ignore_eos=True),
                Ends(self),
            )  # fmt: skip

    def ended(self) -> None:
        self.left -= 1
        self.next()
        if not self.left:
            self.done.set()


def engine_s(queue: list[tuple[int, int]]) -> float:
    """How long the agent's simulated engine takes for all of them."""
    loop = VirtualLoop()

    async def whole() -> float:
        engine = Engine(queue)
        for _ in range(PLACES):
            engine.next()
        await engine.done.wait()
        return loop.time()

    try:
        return loop.run_until_complete(whole())
    finally:
        loop.close()


def simulated(queue: list[tuple[int, int]], service) -> Simulator:
    """All of them at the start, on one slot, in their order."""
    bound = {"max_queue": 10_000, "max_wait_ms": 10**9, "max_prompt_tokens": 10**6, "max_output_tokens": 10**4,
             "stage_timeout_s": 10_000}  # fmt: skip
    document = document_of(
        bands(1, 0, 0), ["acme"], places=PLACES, isolation="dedicated", sizes=SizeBounds([10**8, 2 * 10**8], 10**6, 10),
        interactive=bound, max_concurrency=10_000,
    )  # fmt: skip
    work = Workload(("interactive",), ("acme",))
    for prompt, output in queue:
        for column, value in zip(
            (work.at_us, work.class_of, work.tenant_of, work.prompt, work.output, work.asked),
            (0, 0, 0, prompt, output, output), strict=True,
        ):  # fmt: skip
            column.append(value)
    simulator = Simulator(document, work, service)
    simulator.run()
    return simulator


def last_end_s(simulator: Simulator) -> float:
    assert not simulator.refused and len(simulator.outcomes) == 1
    return (max(simulator.columns.ended_us) - simulator.start_us) / 1e6


@pytest.mark.parametrize("longest", [1_000, 12_000, 60_000])
def test_a_slot_takes_as_long_as_the_agents_simulated_engine(longest: int):
    queue = requests(120, longest)
    ours, engines = last_end_s(simulated(queue, Tables(H100))), engine_s(queue)
    assert ours == pytest.approx(engines, rel=0.08)


def test_prefills_of_a_slot_follow_each_other_and_stop_what_is_decoded():
    queue = [(8_192, 100), (8_192, 100)]
    columns = simulated(queue, Tables(H100)).columns
    prefill_us, first_us, last_us = 844_900, min(columns.first_us), max(columns.first_us)
    assert last_us - first_us == prefill_us
    started = min(columns.started_us)
    alone_us = prefill_us + 100 * round(H100.decode_us(1))
    assert min(columns.ended_us) - started == alone_us + prefill_us
    assert max(columns.ended_us) - started == 2 * prefill_us + 100 * round(H100.decode_us(2))


def test_constants_hold_whatever_runs_beside_it():
    columns = simulated([(8_192, 100)] * PLACES, Constants(1_000, 10, 100)).columns
    assert {end - start for end, start in zip(columns.ended_us, columns.started_us, strict=True)} == {92_920}
