"""Any order of leases, repeats, cancellations, time, drains, preemptions and reports: each lease ends once."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.agent.reporting import cut_report
from controlplane.core.reasons import Outcome
from controlplane.wire.report import ItemsCancelled, Report
from tests.agent import worlds
from tests.agent.leased_items import item, job, last_reports, lease, with_boot_clock

JOBS = [job(1), job(2, tenant_id=1, key_id=11), job(3, deadline_us=1)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.integers(1, 6), st.integers(1, 3)),
        st.tuples(st.just("again"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("time"), st.integers(1, 60), st.just(0)),
        st.tuples(st.just("run"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("requeue"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("displace"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("epoch"), st.just(0), st.just(0)),
        st.tuples(st.just("report"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


class Life:
    """One agent that is told things; counts how often each lease was told to have ended."""

    def __init__(self, agent: worlds.Agent) -> None:
        self.agent = agent
        self.clock = with_boot_clock(agent)
        self.next_fence = 1
        self.leased: dict[int, int] = {}

    async def take(self, what: str, number: int, more: int) -> None:
        agent, engine = self.agent, self.agent.engine
        if what == "lease":
            fences = range(self.next_fence, self.next_fence + number)
            self.next_fence += number
            self.leased |= dict.fromkeys(fences, more)
            lease(agent, [item(fence, more, lease_s=120) for fence in fences], jobs=JOBS)
        elif what == "again" and engine.items.through:
            fences = [fence for fence in self.leased if fence > self.next_fence - 1 - number]
            lease(agent, [item(fence, self.leased[fence], lease_s=120) for fence in fences], jobs=JOBS)
        elif what == "cancel":
            lease(agent, [], jobs=JOBS, cancelled=[ItemsCancelled(number, list(self.leased)[-3:] if more else [])])
        elif what == "time":
            self.clock.ahead_us += number * 1_000_000
            engine.items._sweep()
        elif what == "run":
            await asyncio.sleep(number / 1000)
        elif what in ("requeue", "displace"):
            self._disturb(what, number)
        elif what == "epoch":
            engine.items.new_epoch()
            engine.items.through = self.next_fence - 1
        elif what == "report":
            cut_report(engine, agent.spool, agent.policy, agent.live)
        self.check()

    def _disturb(self, what: str, number: int) -> None:
        engine = self.agent.engine
        calls = [call for call in engine.calls.values() if call.running == (what == "requeue")]
        if number < len(calls):
            if what == "requeue":
                engine.requeue(calls[number])
                engine.pump(engine.clock.now_us())
            else:
                engine.close(calls[number], Outcome.DISPLACED)

    def check(self) -> None:
        items, engine = self.agent.engine.items, self.agent.engine
        held = items.held
        phases = Counter(each.phase.value for each in held.by_fence.values())
        assert items.queued == phases["queued"] == sum(lane.queued for lane in held.lanes.values())
        assert held.waiting == phases["waiting"]
        assert sum(each.call is not None for each in held.by_fence.values()) == len(engine.calls)
        assert all(lane.queued <= 2 + len(engine.calls) for lane in held.lanes.values())
        assert held.bytes == sum(len(each.body) for each in held.by_fence.values())
        assert all(room.items >= 0 for room in items.room(engine.clock.now_us()))


async def live(steps, state_dir: Path) -> None:
    keys = [worlds.live_key(), worlds.batch_key()]
    doc = worlds.document(pool={"slots": [worlds.slot(2, "batch", places=2)]})
    agent = worlds.Agent(state_dir, worlds.sim(speed=50.0), doc, keys)
    try:
        story = Life(agent)
        for step in steps:
            await story.take(*step)
        engine = agent.engine
        await agent.until(lambda: not engine.items.held.by_fence)
        agent.assert_nothing_held()
        cut_report(engine, agent.spool, agent.policy, agent.live)
        reports = [
            msgspec.json.decode(agent.spool.body_of(stored), type=Report) for stored in agent.spool.state.reports
        ]
        told = Counter(done.fence for report in reports for done in report.items_done)
        assert set(told) <= set(story.leased) and set(told.values()) <= {1}
        assert len(told) + engine.items.lapsed == len(story.leased), "every lease ends: told, or dropped as lapsed"
        for report in reports:
            rows = {row.request_id: row for row in report.records}
            for done in report.items_done:
                if done.outcome != Outcome.CANCELLED_BY_DRAIN.code:
                    assert rows[done.request_id].outcome == done.outcome
        after_kill = [done.fence for report in last_reports(state_dir) for done in report.items_done]
        assert Counter(after_kill) == told, "the next process would tell the same"
    finally:
        await agent.close()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_every_lease_ends_once(steps):
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(steps, Path(folder)))
