"""A pool of eight slots with scripted agents: what they report is written as their reports would write it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from django.db import connection

from controlplane.contracts.models import WorkloadClass
from controlplane.core.histogram import Histogram
from controlplane.core.period import to_us
from controlplane.fleet.models import Agent, AgentLive, Pool, Slot, SlotInterval, SlotTenure
from controlplane.flex.controller import Controller, Tick
from controlplane.flex.models import ControllerTerm, Grant
from controlplane.jobs.models import Job
from tests import factories

BANDS = {"i1": "interactive", "i2": "interactive", "i3": "interactive", "i4": "interactive",
         "b1": "batch", "b2": "batch", "f1": "flex", "f2": "flex"}  # fmt: skip
#: Ten minutes of quiet would be ten minutes of ticks: short holds, the same rules.
QUICK = {"lend_hold_s": 3, "cooldown_s": 10, "decision_interval_s": 2, "return_hold_s": 3, "min_hold_s": 2,
         "drain_bound_s": 6, "grant_ttl_s": 15}  # fmt: skip


@dataclass(frozen=True)
class Drain:
    """How an agent measured the way home of a slot that is home: microseconds after it stopped admitting."""

    last_token_us: int = 1_700_000
    home_us: int = 2_500_000

    def instants(self, now: datetime) -> dict[str, int]:
        stop_us = to_us(now) - 3_000_000
        return {"stop_admit_us": stop_us, "last_token_us": stop_us + self.last_token_us,
                "home_us": stop_us + self.home_us}  # fmt: skip


DRAIN = Drain()


@dataclass
class SaidSlot:
    """What an agent says about a slot; by default it follows the grants it is given."""

    running_batch: int = 0
    flex: str | None = None
    fence: int | None = None


@dataclass
class Band:
    """The pool, its script and its clock: `step` is one second of reports followed by one tick."""

    pool: Pool
    slots: dict[str, Slot]
    agents: list[Agent]
    chat_id: int
    now: datetime
    controller: Controller
    admitted_per_s: float = 8.0
    waits_us: list[int] = field(default_factory=lambda: [20_000] * 20)
    silent: set[int] = field(default_factory=set)
    said: dict[str, SaidSlot] = field(default_factory=dict)
    #: (job named, instant due, GPU time): batch requests of clients, that every agent says it holds.
    direct: list[tuple[str, int, int]] = field(default_factory=list)
    seq: int = 0
    _grants: dict[int, Grant] = field(default_factory=dict)

    def report(self) -> None:
        """Every agent that is not silent reports at the present instant."""
        self.seq += 1
        self._grants = {grant.slot_id: grant for grant in Grant.objects.filter(slot__pool=self.pool)}
        for agent in self.agents:
            if agent.pk not in self.silent:
                self._report(agent)

    def _report(self, agent: Agent) -> None:
        waits = Histogram()
        for us in self.waits_us:
            waits.record(us)
        own = [slot for slot in self.slots.values() if slot.agent_id == agent.pk]
        figures = {
            "at_us": 0,
            "slots": [self._slot(slot) for slot in own],
            "classes": [
                {"class_id": self.chat_id, "admitted_per_s_60s": self.admitted_per_s / len(self.agents),
                 "wait_60s": waits.to_sparse()},
                *self._batch_class(),
            ],
            "tenants": [],
        }  # fmt: skip
        AgentLive.objects.update_or_create(
            agent=agent, defaults={"epoch": 1, "seq": self.seq, "reported_at": self.now, "figures": figures}
        )

    def _batch_class(self) -> list[dict]:
        """Agents of releases before direct work was told say nothing of it."""
        row = {"class_id": _bulk(), "admitted_per_s_60s": 0.0, "wait_60s": []}
        return [row | {"direct": self.direct}] if self.direct else [row]

    def _slot(self, slot: Slot) -> dict:
        said = self.said.get(slot.name, SaidSlot())
        grant = self._grants.get(slot.pk)
        follows = "home" if grant is None or grant.action == "recall" else "lent"
        if follows == "home" and said.running_batch and slot.band == "flex":
            follows = "draining"
        return {
            "slot_id": slot.pk,
            "state": "ready",
            "flex": said.flex or follows,
            "fence": (grant.fence if grant else 0) if said.fence is None else said.fence,
            "running": said.running_batch,
            "running_batch": said.running_batch,
            "running_batch_gpu_us": said.running_batch * 1_000_000,
            "free_kv_tokens": 1,
            "total_kv_tokens": 1,
            **(DRAIN.instants(self.now) if follows == "home" else {}),
        }

    def step(self, seconds: int = 1, *, controller: Controller | None = None) -> Tick:
        """`seconds` times one second passes, the agents report and the controller ticks; the last tick."""
        tick = Tick(leads=False)
        for _ in range(seconds):
            self.now += timedelta(seconds=1)
            self.report()
            tick = (controller or self.controller).tick(self.now)
            assert tick.leads
            self.check()
        return tick

    def until_lent(self, count: int = 1, *, at_most: int = 60) -> None:
        for _ in range(at_most):
            if self.count("lent") >= count:
                return
            self.step()
        raise AssertionError(f"{count} slots were not lent within {at_most} s: {self.states()}")

    def states(self) -> dict[str, str]:
        return dict(Grant.objects.filter(slot__pool=self.pool).values_list("slot__name", "state"))

    def count(self, state: str) -> int:
        return Grant.objects.filter(slot__pool=self.pool, state=state).count()

    def grant(self, name: str) -> Grant:
        return Grant.objects.get(slot=self.slots[name])

    def restart(self) -> None:
        """Another process takes the place of the controller: nothing but rows is left."""
        ControllerTerm.objects.update(expires_at=factories.NOW - timedelta(days=400))
        self.controller = Controller()

    def check(self) -> None:
        """What must be true at every instant: intervals tile each tenure, and say what the grants say."""
        tenures = {row.slot_id: row for row in SlotTenure.objects.filter(slot__pool=self.pool)}
        by_slot = defaultdict(list)
        for row in SlotInterval.objects.filter(slot__pool=self.pool).order_by("slot_id", "started_at"):
            by_slot[row.slot_id].append(row)
        for slot_id, rows in by_slot.items():
            assert rows[0].started_at == tenures[slot_id].started_at
            for before, after in pairwise(rows):
                assert before.ended_at == after.started_at
                assert before.ended_at > before.started_at
            assert rows[-1].ended_at == tenures[slot_id].ended_at
        for grant in Grant.objects.filter(slot__pool=self.pool, slot__tenures__ended_at=None):
            assert by_slot[grant.slot_id][-1].state == grant.state


def make_band(now: datetime, *, agents: int = 2, **pool_values) -> Band:
    factories.installation()
    chat = factories.workload_class("chat")
    factories.workload_class("bulk", "batch", retry_safe=True, cancellable=True)
    pool = factories.pool(**{**QUICK, **pool_values})
    rows = [factories.agent(pool, f"gpu-{n}", enrolled_at=now) for n in range(1, agents + 1)]
    slots = {}
    for number, (name, band) in enumerate(BANDS.items()):
        slots[name] = Slot.objects.create(pool=pool, name=name, band=band, agent=rows[number % agents])
        SlotTenure.objects.create(slot=slots[name], started_at=now - timedelta(minutes=5))
    return Band(pool, slots, rows, chat.pk, now, Controller())


def add_job(band: Band, *, gpu_s: int, due_in: timedelta | None) -> Job:
    """A job whose remaining work is `gpu_s` at the pool's per-token times."""
    per_item = 1_000 * band.pool.prefill_us_per_token + 200 * band.pool.decode_us_per_token
    items = max(1, round(gpu_s * 1_000_000 / per_item))
    return Job.objects.create(
        tenant=factories.tenant(f"t{Job.objects.count()}"), workload_class_id=_bulk(), pool=band.pool, items=items,
        prompt_tokens=1_000, expected_output_tokens=200, created_by="test", created_at=band.now,
        deadline=None if due_in is None else band.now + due_in,
    )  # fmt: skip


def _bulk() -> int:
    return WorkloadClass.objects.get(slug="bulk").pk


@pytest.fixture
def band(db) -> Band:
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        now = cursor.fetchone()[0]
    return make_band(now)


@pytest.fixture
def busy(band: Band) -> Band:
    """With more batch than its floor can do in time: interactive quiet, so that slots are lent."""
    add_job(band, gpu_s=36_000, due_in=timedelta(hours=4))
    return band
