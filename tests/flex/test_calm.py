"""A tick of a calm pool writes what the same tick decided in full would write, for any reports, jobs and instants."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from controlplane.core.flex import load_of
from controlplane.core.flex_demand import demand
from controlplane.core.flex_policy import FlexPolicy, SafeRate, exact
from controlplane.core.flex_snapshot import BatchJob
from controlplane.core.period import from_us
from controlplane.core.slot_states import BORROWED, Band, SlotState
from controlplane.fleet.band_report import ReportedClass, ReportedSlot
from controlplane.flex import evidence
from controlplane.flex.applying import Changes, Sample
from controlplane.flex.calm import backlog_of, calm_of, capacity_of, rates_of
from controlplane.flex.deciding import Memory, tick_pool
from controlplane.flex.reading import (
    AgentRow,
    Grant,
    Interval,
    PoolReading,
    PoolRow,
    SlotRow,
    Terms,
)
from controlplane.flex.restating import restate

NOW_US = 1_800_000_000_000_000
S = 1_000_000
CHAT = 1
BANDS = [Band.INTERACTIVE] * 4 + [Band.BATCH] * 2 + [Band.FLEX] * 2
QUICK = FlexPolicy(
    lend_hold_us=3 * S, return_hold_us=4 * S, min_hold_us=5 * S, cooldown_us=6 * S, decision_interval_us=2 * S,
    drain_bound_us=6 * S,
)  # fmt: skip
POLICIES = [
    QUICK,
    replace(QUICK, max_lent=1),
    replace(QUICK, lend_slack=-0.5, return_slack=0.2),
    replace(QUICK, grant_ttl_us=2 * S),
    replace(QUICK, spillover_per_week=1, lend_hold_us=0),
]
TABLES = [
    None,
    SafeRate(entries=((4, 16.0), (5, 20.0), (6, 24.0))),
    SafeRate(entries=((3, 10.1), (6, 24.3)), valid_until_us=NOW_US + 7 * S),
]


@dataclass(frozen=True)
class Said:
    """What one report says: rate, bucket of all waits (None for none) and batch work on each flex slot."""

    rate: float
    wait: int | None
    gpu_us: tuple[int, int]


# Rates on, just under and just over 0.7 of what three to six slots may take; waits around 200 ms (bucket 281).
reports = st.builds(
    Said,
    rate=st.sampled_from([0.0, 7.0, 7.07, 8.4, 11.199999999999999, 11.2, 14.0, 16.8, 17.01, 40.0]) | st.floats(0, 30),
    wait=st.sampled_from([None, 200, 279, 280, 281, 282, 300]),
    gpu_us=st.tuples(st.sampled_from([0, 5]), st.sampled_from([0, 7])),
)
# Work that two, three or four slots get done just in time, and deadlines that pass while we look.
jobs = st.lists(
    st.builds(
        BatchJob,
        name=st.just("job"),
        remaining_gpu_us=st.sampled_from([0, 1, 15 * S, 30 * S, 45 * S, 60 * S]) | st.integers(0, 200 * S),
        deadline_us=st.none() | st.integers(-2, 40).map(lambda s: NOW_US + s * S) | st.just(NOW_US - 1_798 * S),
    ),
    max_size=3,
).map(tuple)
#: (seconds that pass, what agents report, the backlog from then on); or half a minute in which nothing is new.
steps = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 4, 6]), st.none() | reports, st.none() | jobs), min_size=1, max_size=12
) | reports.map(lambda said: [(1, said, None)] * 30)
starts = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(POLICIES),
        "table": st.sampled_from(TABLES),
        "lent": st.sampled_from([(), (6,), (6, 7)]),
        "flex": st.sampled_from([True, True, True, False]),
        "agents": st.sampled_from([1, 2]),
        "efficiency": st.sampled_from([1.0, 0.85]),
        "first": reports,
        "jobs": jobs,
        "frozen": st.booleans(),
    }
)


def agent(number: int, said: Said, at_us: int, agents: int) -> AgentRow:
    waits = [] if said.wait is None else [(said.wait, 4), (said.wait - 100, 1)]
    own = [at for at in range(8) if at % agents == number]
    return AgentRow(
        agent_id=number,
        uuid=f"agent-{number}",
        counts=True,
        reported_at_us=at_us,
        report=(at_us, 1, 1),
        slots={
            at: ReportedSlot(at, "home", fence=1, running_batch=0, running_batch_gpu_us=((0,) * 6 + said.gpu_us)[at])
            for at in own
        },
        work={at: gpu_us for at, gpu_us in zip((6, 7), said.gpu_us, strict=True) if at in own and gpu_us},
        classes=[ReportedClass(class_id=CHAT, admitted_per_s_60s=said.rate / agents, wait_60s=dict(waits))],
    )  # fmt: skip


def pool(start: dict) -> PoolReading:
    policy, agents = start["policy"], start["agents"]
    bands = BANDS if start["flex"] else [Band.INTERACTIVE] * 4 + [Band.BATCH] * 4
    terms = Terms("reserved", "chat", "bulk", policy, start["table"], dict(enumerate(bands)), cancellable=True)
    row = PoolRow(30, "p", True, "chat", "bulk", policy, start["table"], start["frozen"], False)
    slots = []
    for at, band in enumerate(bands):
        lent = band is Band.FLEX and at in start["lent"]
        grant = None
        if band is Band.FLEX:
            grant = Grant(fence=1)
        if lent:
            grant = Grant(
                fence=1, action="lend", ttl_us=policy.grant_ttl_us, state=SlotState.LENT, lent_at_us=NOW_US - 2 * S,
                renewed_at_us=NOW_US - S, expires_at_us=NOW_US - S + policy.grant_ttl_us,
            )  # fmt: skip
        owner = "bulk" if lent or band is Band.BATCH else "chat"
        state = "lent" if lent else "home"
        slots.append(
            SlotRow(at, f"s{at}", band, True, at % agents, grant, False, Interval(state, owner, NOW_US - 60 * S))
        )
    return PoolReading(
        pool=row, terms=terms, slots=slots, jobs=start["jobs"], declared=start["jobs"],
        agents={at: agent(at, start["first"], NOW_US, agents) for at in range(agents)}, cancellable=True,
        batch_efficiency=start["efficiency"], valid_until_us=NOW_US + 10_000 * S,
    )  # fmt: skip


def full(reading: PoolReading, memory: Memory, now_us: int):
    changes = Changes()
    copy = replace(reading, slots=list(reading.slots), agents=dict(reading.agents))
    tick = tick_pool(
        copy, memory, changes, now_us=now_us, leading_since_us=NOW_US, interactive_classes=frozenset({CHAT})
    )
    return tick, changes


def written(changes: Changes, now_us: int, wholes: dict[int, dict]) -> tuple:
    """The rows of one pool's tick, renewals as the rows of grants that they stand for, figures made whole."""
    (sample,) = [Sample(*row) for row in changes.samples]
    figures, whole_at_us = sample.figures, sample.whole_at_us
    whole = said = json.loads(figures)
    if whole_at_us is not None:
        before = json.dumps(wholes)
        whole = evidence.made_whole(
            wholes[whole_at_us], said, at_us=now_us, p95_queue_us=sample.p95_queue_us,
            admitted_per_s=sample.admitted_per_s, telemetry_age_us=sample.telemetry_age_us,
        )  # fmt: skip
        assert json.dumps(wholes) == before
    columns = sample._asdict() | {"whole_at_us": None, "figures": whole}
    renewed = {(row["slot_id"], row["fence"], row["ttl_us"], row["expires_at"]) for row in changes.grants}
    more = changes.renewals
    renewed |= {
        (slot_id, fence, ttl_us, from_us(now_us + ttl_us))
        for slot_id, fence, ttl_us in zip(more.slot_id, more.fence, more.ttl_us, strict=True)
    }
    return columns, renewed, changes.decisions, changes.events


def as_written(slot: SlotRow, grant: Grant | None) -> SlotRow:
    """The slot as its rows say after a tick."""
    slot = replace(slot, grant=grant)
    owner = "bulk" if slot.band is Band.BATCH or slot.state in BORROWED else "chat"
    assert slot.interval is not None
    return replace(slot, interval=replace(slot.interval, state=slot.state, owner_class=owner))


#: Two loans and a job that one slot less could not be spared for.
CROSSING = {
    "policy": QUICK, "table": TABLES[1], "lent": (6, 7), "flex": True, "agents": 2, "efficiency": 1.0,
    "first": Said(7.0, 200, (0, 0)), "frozen": False,
    "jobs": (BatchJob(name="job", remaining_gpu_us=300 * S, deadline_us=NOW_US + 100 * S),),
}  # fmt: skip
LESS = (BatchJob(name="job", remaining_gpu_us=299 * S, deadline_us=NOW_US + 100 * S),)
#: The load with one slot less crosses its limit and comes back, each time with other work on the slots and in the job.
THERE_AND_BACK = [
    *[(1, Said(7.0, 200, (0, 0)), None)] * 9,
    (1, Said(9.0, 201, (5, 7)), LESS),
    (1, Said(9.0, 200, (0, 7)), None),
    (2, Said(7.0, 199, (5, 0)), CROSSING["jobs"]),
    (1, None, None),
]


@settings(max_examples=400, deadline=None)
@example(CROSSING, THERE_AND_BACK)
@given(starts, steps)
def test_a_short_tick_writes_what_a_full_one_would(start, steps):
    reading, now_us, calm, memory = pool(start), NOW_US, None, Memory()
    short, restated, wholes = 0, 0, {}
    for seconds, said, work in [(1, None, None), *steps]:
        now_us += seconds * S
        if said is not None:
            count = len(reading.agents)
            reading.agents = {at: agent(at, said, now_us - 1, count) for at in range(count)}
        stays = True
        if work is not None:
            reading.jobs = reading.declared = work
            stays = calm is None or calm.work(reading, now_us)
        ticked = calm
        if ticked is not None and ticked.flex:
            memory = replace(memory, marks=replace(memory.marks, ticked_at_us=ticked.ticked_us))
        before = replace(reading, slots=[s if ticked is None else ticked.kept(s) for s in reading.slots])
        tick, expected = full(before, memory, now_us)
        found = Changes()
        seen = json.loads(Sample(*expected.samples[0]).figures)
        if (
            calm is not None
            and stays
            and calm.step(
                reading, found.samples, found.renewals, now_us=now_us, heard=said is not None,
                interactive_classes=frozenset({CHAT}),
            )
        ):  # fmt: skip
            short += 1
            rows, renewed, decisions, events = written(expected, now_us, wholes)
            assert not decisions and not events
            assert written(found, now_us, wholes)[:2] == (rows, renewed)
            assert tick.settled
            continue
        if calm is not None and stays and calm.crossed:
            again = restate(calm, reading, memory, found, now_us=now_us)
            assert (again is None) is tick.decision.acts
            if again is not None:
                restated += 1
                assert written(found, now_us, wholes) == written(expected, now_us, wholes)
                assert again.decision == tick.decision and again.memory == tick.memory
                assert tick.settled
                memory = again.memory
                continue
            assert not found.samples and not found.decisions and not found.renewals.slot_id
        reading = before
        memory = tick.memory
        wholes[now_us] = seen
        reading.slots = [as_written(slot, tick.grants.get(slot.slot_id, slot.grant)) for slot in reading.slots]
        calm = calm_of(reading, tick)
    event(f"{min(restated, 3)} restated")
    event(f"{min(short, 6)} short ticks" + ("" if start["flex"] else " without a band"))


@settings(max_examples=500, deadline=None)
@given(
    limit=st.sampled_from([0.7, 0.55, 1.0, 0.123]),
    entries=st.sampled_from([((4, 16.0), (6, 24.0)), ((1, 0.3),), ((2, 7.7), (3, 8.1))]),
    slots=st.integers(-1, 8),
    near=st.integers(-3, 3),
)
def test_the_rate_at_which_load_crosses_its_limit_is_exact(limit, entries, slots, near):
    """The neighbour below is under the limit and the rate itself is not, as the decision compares decimals."""
    table, policy = SafeRate(entries=entries), replace(QUICK, load_limit=limit)
    rates = rates_of(policy, table, slots, 0.0)
    for edge in {rates.below, rates.least} - {math.inf, 0.0}:
        rate = edge
        for _ in range(abs(near)):
            rate = math.nextafter(rate, math.inf if near > 0 else -math.inf)
        around = rates_of(policy, table, slots, rate)
        assert around.least <= rate < around.below
        for count in (slots, slots - 1):
            crossed = [load_of(x, table, count) < exact(limit) for x in (rate, max(around.least, 0.0))]
            assert crossed[0] == crossed[1]


BUSY = {
    "policy": replace(QUICK, grant_ttl_us=2 * S), "table": TABLES[1], "lent": (6,), "flex": True, "agents": 1,
    "efficiency": 1.0, "first": Said(7.0, 200, (0, 0)), "frozen": False,
    "jobs": (BatchJob(name="job", remaining_gpu_us=900 * S, deadline_us=NOW_US + 100 * S),),
}  # fmt: skip


@pytest.mark.parametrize(("seconds", "goes_on"), [(1, True), (2, False), (4, False)])
def test_a_gap_as_long_as_a_grant_ends_the_calm(seconds, goes_on):
    """Nobody renewed it meanwhile: at its instant it has ended, and the slot has to be recalled."""
    reading = pool(BUSY)
    calm = calm_of(reading, full(reading, Memory(), NOW_US)[0])
    assert calm is not None
    now_us, changes = NOW_US + seconds * S, Changes()
    reading.agents = {0: agent(0, BUSY["first"], now_us, 1)}
    stepped = calm.step(
        reading, changes.samples, changes.renewals, now_us=now_us, heard=True, interactive_classes=frozenset({CHAT})
    )
    assert stepped is goes_on
    assert changes.renewals.slot_id == ([6] if goes_on else [])


@pytest.mark.parametrize(("lent", "until_s"), [((), 10), ((6, 7), 20 - 15 / (3 * 0.65))])
def test_calm_ends_before_time_alone_takes_slack_over_a_limit(lent, until_s):
    """15 GPU-s due in 20 s. At 10 s they need the 1.5 slots of two at which slack is 0.25 (`lend_slack`); without one
    of two loans there are three slots, and 1.95 at which slack is 0.35 (`return_slack`).
    """
    work = (BatchJob(name="job", remaining_gpu_us=15 * S, deadline_us=NOW_US + 20 * S),)
    snapshot = full(pool({**BUSY, "lent": lent, "jobs": work}), Memory(), NOW_US)[0].snapshot
    now = demand(work, snapshot.slots, now_us=NOW_US, missed_grace_us=QUICK.missed_grace_us)
    capacity = capacity_of(snapshot.slots, QUICK, now.available_exact, flex=True)
    backlog = backlog_of(work, capacity, QUICK.missed_grace_us, NOW_US)
    assert backlog.verdicts == ([False, True] if lent else [False]), "of a loan, and of a return"
    assert backlog.until_us == NOW_US + math.floor(until_s * S)
    assert backlog_of(work, capacity, QUICK.missed_grace_us, backlog.until_us - 1).verdicts == backlog.verdicts
    assert backlog_of(work, capacity, QUICK.missed_grace_us, backlog.until_us + 2).verdicts != backlog.verdicts
