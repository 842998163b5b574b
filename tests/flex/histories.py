"""What can happen to pools between two ticks, as steps that Hypothesis strings together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from django.db.models import F
from hypothesis import strategies as st

from controlplane.audit.actors import Actor
from controlplane.budgets.models import Budget
from controlplane.contracts.models import WorkloadClass
from controlplane.core.period import to_us
from controlplane.fleet.actions import retire_agent
from controlplane.fleet.models import Agent, AgentLive, Pool, Slot
from controlplane.flex import actions
from controlplane.flex.models import Grant, Trip
from controlplane.jobs.models import BatchEfficiency, Job
from controlplane.tenants.models import Installation
from tests.flex.conftest import Band, SaidSlot, add_job

ONCALL = Actor(id=None, name="ona", role="oncall")
Step = Callable[[Band], None]


def waits(us: int | None) -> Step:
    def step(band: Band) -> None:
        band.waits_us = [] if us is None else [us] * 20

    return step


def rate(per_s: float) -> Step:
    def step(band: Band) -> None:
        band.admitted_per_s = per_s

    return step


def silence(number: int) -> Step:
    def step(band: Band) -> None:
        band.silent ^= {band.agents[number % len(band.agents)].pk}

    return step


def runs(slot: str, running: int) -> Step:
    def step(band: Band) -> None:
        band.said[slot] = SaidSlot(running_batch=running)

    return step


def direct(seconds: int | None) -> Step:
    def step(band: Band) -> None:
        band.direct = [] if seconds is None else [("", to_us(band.now) + seconds * 1_000_000, 90_000_000)]

    return step


def recall(slot: str) -> Step:
    def step(band: Band) -> None:
        if slot in band.slots and band.grant(slot).state == "lent":
            actions.recall_slot(slot_id=band.slots[slot].pk, actor=ONCALL, now=band.now, reason="a test of it")

    return step


def freeze(seconds: int, *, recalls: bool = False) -> Step:
    def step(band: Band) -> None:
        act = actions.freeze_and_recall if recalls else actions.freeze
        until = band.now + timedelta(seconds=seconds)
        act(pool_id=band.pool.pk, actor=ONCALL, now=band.now, reason="a test of it", until=until)

    return step


def trip(slot: str) -> Step:
    def step(band: Band) -> None:
        fence = band.grant(slot).fence if slot in band.slots else 0
        if fence and not Trip.objects.filter(slot=band.slots[slot], fence=fence).exists():
            Trip.objects.create(slot=band.slots[slot], fence=fence, at=band.now, reason="queue_p95", value=1.0)

    return step


def job(gpu_s: int, seconds: int | None) -> Step:
    def step(band: Band) -> None:
        add_job(band, gpu_s=gpu_s, due_in=None if seconds is None else timedelta(seconds=seconds))

    return step


def items(completed: int) -> Step:
    """Every job goes on, one that has an item left."""

    def step(band: Band) -> None:
        for row in Job.objects.filter(state="running"):
            row.items_completed = min(row.items, row.items_completed + completed)
            row.gpu_us_done += completed * 1_300_000
            row.save(update_fields=["items_completed", "gpu_us_done"])

    return step


def ended(band: Band) -> None:
    Job.objects.filter(state="running").update(state="cancelled")


def bounded(band: Band) -> None:
    """A hard budget, that pays for a few items of each job."""
    Job.objects.update(admission={"bound_nanos": 1_000_000})
    for row in Job.objects.all():
        Budget.objects.update_or_create(
            tenant=row.tenant, name="plan",
            defaults={"period": "month", "zone": "UTC", "limit_nanos": 999_000 + 1_000_000 // row.items, "hard": True,
                      "created_at": band.now, "updated_at": band.now},
        )  # fmt: skip


def budget(limit_nanos: int) -> Step:
    def step(band: Band) -> None:
        Budget.objects.update(limit_nanos=limit_nanos)

    return step


def policy(**values) -> Step:
    def step(band: Band) -> None:
        Pool.objects.filter(pk=band.pool.pk).update(**values)

    return step


def table(seconds: int | None) -> Step:
    def step(band: Band) -> None:
        entries = {"3": 10.1, "6": 24.3}
        until = None if seconds is None else (band.now + timedelta(seconds=seconds)).isoformat()
        Pool.objects.filter(pk=band.pool.pk).update(
            safe_rate={"entries": entries, "valid_until": until} if seconds else {}
        )

    return step


def moved(slot: str, kind: str) -> Step:
    def step(band: Band) -> None:
        Slot.objects.filter(pool=band.pool, name=slot).update(band=kind)

    return step


def drained(number: int) -> Step:
    """An agent is asked to drain, or no longer."""

    def step(band: Band) -> None:
        agent = Agent.objects.get(pk=band.agents[number % len(band.agents)].pk)
        agent.drain_requested_at = None if agent.drain_requested_at else band.now
        agent.save(update_fields=["drain_requested_at"])

    return step


def retired(band: Band) -> None:
    if len(band.agents) > 1:
        gone = band.agents.pop()
        retire_agent(agent_id=gone.pk, actor=ONCALL, now=band.now, reason="a test of it")
        band.slots = {name: slot for name, slot in band.slots.items() if slot.agent_id != gone.pk}


def worth(efficiency: float, minutes: int) -> Step:
    def step(band: Band) -> None:
        BatchEfficiency.objects.update_or_create(
            pool_id=band.pool.pk,
            defaults={"efficiency": efficiency, "work_us": 1, "metered_us": 1,
                      "measured_at": band.now - timedelta(minutes=minutes)},
        )  # fmt: skip

    return step


def zone(name: str) -> Step:
    def step(band: Band) -> None:
        Installation.objects.update(billing_zone=name)

    return step


def cancellable(band: Band) -> None:
    for row in WorkloadClass.objects.filter(slug="bulk"):
        row.cancellable = not row.cancellable
        row.save(update_fields=["cancellable"])


def crashed(band: Band) -> None:
    """The database came back without its unlogged table."""
    AgentLive.objects.all().delete()


def foreign(band: Band) -> None:
    """Somebody at the database's prompt; a fence that went back would lend under one that was used."""
    Grant.objects.filter(slot__name="f2").update(fence=F("fence") + 40, state="home")


def nothing(band: Band) -> None:
    pass


steps = st.one_of(
    st.just(nothing),
    st.sampled_from([20_000, 190_000, 250_000, None]).map(waits),
    st.sampled_from([3.0, 8.0, 8.4, 11.2, 13.0]).map(rate),
    st.integers(0, 1).map(silence),
    st.builds(runs, st.sampled_from(["f1", "f2"]), st.integers(0, 2)),
    st.sampled_from([None, 60, 4_000]).map(direct),
    st.sampled_from(["f1", "f2"]).map(recall),
    st.builds(freeze, st.sampled_from([3, 600]), recalls=st.booleans()),
    st.sampled_from(["f1", "f2"]).map(trip),
    st.builds(job, st.sampled_from([40, 400, 36_000]), st.sampled_from([None, 8, 600, 14_400])),
    st.sampled_from([1, 30]).map(items),
    st.sampled_from([ended, bounded, retired, cancellable, crashed, foreign]),
    st.sampled_from([1, 10**12]).map(budget),
    st.sampled_from([
        {"load_limit": 0.55}, {"cooldown_s": 2}, {"spillover_per_week": 1, "spillover_action": "block"},
        {"isolation": "dedicated"}, {"isolation": "reserved"}, {"isolation": "shared"}, {"lend_slack": -0.5},
        {"decode_us_per_token": 90}, {"max_lent": 1},
    ]).map(lambda values: policy(**values)),
    st.sampled_from([None, 4, 4_000]).map(table),
    st.builds(moved, st.sampled_from(["f2", "b2"]), st.sampled_from(["flex", "batch", "interactive"])),
    st.integers(0, 1).map(drained),
    st.builds(worth, st.sampled_from([0.8, 1.3]), st.sampled_from([1, 119])),
    st.sampled_from(["UTC", "Pacific/Auckland"]).map(zone),
)  # fmt: skip
"""One thing that happens."""

histories = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 1, 2, 4, 7]), st.lists(steps, max_size=2), st.sampled_from([False] * 9 + [True])
    ),
    min_size=4,
    max_size=30,
)
"""(seconds that pass, what happens then, whether another leads from then on), one a tick."""
