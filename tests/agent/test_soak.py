"""Storms and long runs: what an agent counts is, at every look, what a recount of its requests finds.

`FLEXBAND_SOAK_SECONDS=86400` makes a day of it; `FLEXBAND_SOAK_SEED` repeats one. Without them it is a few seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

from controlplane.agent.reporting import cut_report
from controlplane.core.reasons import Outcome
from controlplane.wire.packed import read_report
from controlplane.wire.report import Lease
from tests.agent import worlds
from tests.agent.wire_client import WireClient, chat_body, post

SECONDS = float(os.environ.get("FLEXBAND_SOAK_SECONDS", "6"))
SEED = int(os.environ.get("FLEXBAND_SOAK_SEED", "0")) or random.randrange(1, 2**31)
LOOK_S = 0.05 if SECONDS < 600 else 60.0
CLIENTS = 40
MAX_QUEUE = 8
BUDGET = 10**15


def storm_document():
    """A small pool with bounds that a storm meets: places, queue, concurrency, and a hard budget."""
    tenants = [
        worlds.tenant_policy(hard_budget=True, max_concurrency=20),
        worlds.tenant_policy("delta", id=2, max_concurrency=6),
    ]
    return worlds.document(tenants=tenants)


class Told:
    """What the reports of the run had: how many records, and what those of the tenant with a hard budget cost."""

    def __init__(self) -> None:
        self.records = self.nanos = 0

    def report(self, agent: worlds.Agent) -> None:
        """The next report is cut, read and taken."""
        spool = agent.spool
        cut_report(agent.engine, spool, agent.policy, agent.live)
        stored = spool.state.reports[0]
        rows = read_report(spool.body_of(stored)).records
        self.records += len(rows)
        self.nanos += sum(row.charge_prompt_nanos + row.charge_output_nanos for row in rows if row.tenant_id == 1)
        spool.accept(stored.seq, agent.engine.clock.now_us())
        spool.drop_accepted(agent.engine.clock.now_us(), keep_us=0)


def recounted(agent: worlds.Agent, told: Told) -> dict[str, tuple[object, object]]:
    """What is counted beside what a recount finds, by name."""
    engine = agent.engine
    scheduler, calls = engine.scheduler, list(engine.calls.values())
    by_tenant = Counter(call.tenant.policy.id for call in calls)
    by_key = Counter(call.key.live.id for call in calls)
    running = [request for slot in scheduler.slots for request in slot.running.values()]
    found: dict[str, tuple[object, object]] = {
        "requests": (len(scheduler.requests), len(calls)),
        "running": (sum(queue.running for queue in scheduler.classes), len(running)),
        "queued": (sum(queue.queued for queue in scheduler.classes), len(calls) - len(running)),
        "reserved": (engine.leases.reserved_nanos, sum(reserved_of(call) for call in calls)),
        "opened": (len(agent.spool.state.opened), len(calls)),
        "ended": (sum(engine.outcomes.values()), told.records + len(agent.spool.state.closed)),
        "offered": (
            engine.offered,
            sum(engine.outcomes.values()) + len(calls) + sum(engine.desk.log.refused.values()) + waiting(agent),
        ),
    }
    for tenant_id, tenant in engine.registry.tenants.items():
        found[f"tenant {tenant_id}"] = tenant.view.concurrency.held, by_tenant[tenant_id]
    for key_id, key in engine.registry.keys.items():
        found[f"key {key_id}"] = key.view.concurrency.held, by_key[key_id]
    for slot in scheduler.slots:
        on_slot = list(slot.running.values())
        found[f"memory of {slot.spec.name}"] = slot.kv_tokens - slot.kv_free, sum(r.kv_tokens for r in on_slot)
        found[f"work on {slot.spec.name}"] = slot.outstanding_gpu_us, sum(r.gpu_us for r in on_slot)
    return found


def reserved_of(call) -> int:
    reservation = call.reservation
    return 0 if reservation is None or reservation.purse is None else reservation.amount_nanos


def waiting(agent: worlds.Agent) -> int:
    return sum(len(calls) for calls in agent.engine.desk.waiting.values())


async def misbehave(port: int, rng: random.Random) -> None:
    """One client: whole answers and streams, aborts at any point, slow reading, keys that are none, other classes."""
    while True:
        client = await WireClient.connect(port)
        try:
            for _ in range(rng.randint(1, 6)):
                stream = rng.random() < 0.6
                key = rng.choice([worlds.SECRET, worlds.SECRET, worlds.BATCH_SECRET, "fb_live_nobody"])
                body = chat_body(max_tokens=rng.randint(1, 120), ignore_eos=True, stream=stream)
                client.send(post(body, key=key))
                fate = rng.random()
                if fate < 0.25:
                    await asyncio.sleep(rng.random() * 0.1)
                    client.writer.transport.abort()
                    break
                if fate < 0.35:
                    client.writer.write_eof()
                    await client.reader.read(rng.randint(0, 4_000))
                    break
                await client.answer(within_s=30)
        except (OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
            pass
        finally:
            client.writer.close()
        await asyncio.sleep(rng.random() * 0.02)


async def test_counters_are_what_a_recount_finds_through_a_storm(make_agent):
    """More than the pool can serve, half of it leaving early: counted = recounted at each look, nothing at the end."""
    print(f"seed {SEED}, {SECONDS:g} s")
    agent = await make_agent(storm_document(), speed=4.0)
    engine, loop = agent.engine, asyncio.get_running_loop()
    now_us = engine.clock.now_us()
    lease = Lease(5, 1, BUDGET, now_us + int((SECONDS + 600) * 1e6))
    engine.leases.apply([lease], [], asked_us=now_us, now_us=now_us)
    clients = [asyncio.create_task(misbehave(agent.port, random.Random(SEED + n))) for n in range(CLIENTS)]
    told, looks, busy, end = Told(), 0, 0, loop.time() + SECONDS
    while loop.time() < end:
        await asyncio.sleep(LOOK_S)
        found = recounted(agent, told)
        wrong = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
        assert not wrong, (SEED, wrong)
        assert all(queue.queued <= MAX_QUEUE for queue in engine.scheduler.classes), SEED
        looks, busy = looks + 1, busy + bool(engine.calls)
        told.report(agent)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await agent.until(lambda: not engine.calls and not agent.front.connections, within_s=60)
    agent.assert_nothing_held()
    outcomes = {outcome.value: count for outcome, count in engine.outcomes.items() if count}
    print(f"{engine.offered} offered in {looks} looks, {busy} of them busy: {outcomes}")
    assert busy > looks // 2 and {"completed", "cancelled_by_client"} <= set(outcomes)
    told.report(agent)
    assert told.records == sum(engine.outcomes.values())
    assert {row.lease_id: row.spent_nanos for row in engine.leases.spends()} == {5: told.nanos}
    assert Outcome.LOST.value not in outcomes
