"""The controller over scripted reports: loans, renewals, recalls for each reason, drains, silence, restarts."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest

from controlplane.audit.actors import Actor
from controlplane.budgets.models import Budget
from controlplane.contracts.models import WorkloadClass
from controlplane.core.period import to_us
from controlplane.fleet.actions import retire_agent
from controlplane.fleet.models import Agent, Pool, Slot, SlotInterval, SlotTenure
from controlplane.flex import actions, queries, telemetry
from controlplane.flex.leadership import Shard
from controlplane.flex.models import Decision, Grant, Lend, PoolSample, Trip
from controlplane.jobs.models import Job
from controlplane.jobs.queries import backlog, pool_slack
from tests import factories
from tests.flex.conftest import Band, Drain, SaidSlot, add_job

ONCALL = Actor(id=None, name="ona", role="oncall")


def test_quiet_and_no_backlog_lends_nothing(band: Band):
    band.step(8)
    assert band.states() == {"f1": "home", "f2": "home"}
    assert not Lend.objects.exists()


def test_lends_one_slot_then_the_next_and_renews(busy: Band):
    busy.until_lent()
    lent = busy.grant("f1")
    assert (lent.state, lent.action, lent.fence) == ("lent", "lend", 1)
    assert lent.expires_at == busy.now + timedelta(seconds=15)
    assert busy.states()["f2"] == "home", "at most one slot a decision interval"
    busy.until_lent(2)
    busy.step(1)
    assert busy.grant("f1").expires_at == busy.now + timedelta(seconds=15), "all loans of a pool end together"
    busy.step(4)
    assert busy.grant("f1").expires_at == busy.now + timedelta(seconds=11), "a third of the TTL has not passed"
    busy.step(1)
    assert busy.grant("f1").expires_at == busy.grant("f2").expires_at == busy.now + timedelta(seconds=15)
    assert busy.grant("f1").fence == 1, "a renewal keeps its fence"
    assert [loan.slot for loan in queries.lend_ledger(busy.pool.pk)] == ["f2", "f1"]
    interval = SlotInterval.objects.get(slot=busy.slots["f1"], ended_at__isnull=True)
    assert (interval.owner_class, interval.reason, interval.fence) == ("bulk", "lend", 1)


def test_the_hold_time_has_to_pass(busy: Band):
    busy.waits_us = [250_000] * 20
    busy.step(10)
    busy.waits_us = [20_000] * 20
    busy.step(3)
    assert busy.count("lent") == 0
    busy.step(1)
    assert busy.count("lent") == 1


RECALLS = ["interactive_p95", "interactive_load", "telemetry_stale", "manual", "tripwire"]


@pytest.mark.parametrize("reason", RECALLS)
def test_every_interactive_reason_recalls_every_slot(busy: Band, reason: str):
    busy.until_lent(2)
    fences = {name: busy.grant(name).fence for name in ("f1", "f2")}
    breach(busy, reason)
    for name in ("f1", "f2"):
        grant = busy.grant(name)
        if reason in ("manual", "tripwire") and name == "f2":
            assert grant.state == "lent", "only the slot that was asked for"
            continue
        assert (grant.state, grant.action, grant.reason) == ("draining", "recall", reason)
        assert grant.fence == fences[name] + 1
    loan = Lend.objects.get(slot=busy.slots["f1"])
    assert loan.recall_reason == reason
    assert {"kind": "recall", "slot": "f1", "reason": reason, "fence": 2}.items() <= loan.recall_decision.actions[
        0
    ].items()
    busy.silent.clear()
    busy.step(1)
    assert busy.grant("f1").state == "home"
    loan.refresh_from_db()
    assert loan.home_at == busy.now
    assert loan.drain_us == 2_500_000
    assert loan.drained_at - loan.stop_admit_at == timedelta(microseconds=loan.drain_us)
    assert loan.last_token_at - loan.stop_admit_at == timedelta(seconds=1.7)
    assert loan.lent_at <= loan.stop_admit_at <= loan.home_at


@pytest.mark.parametrize("instants", [
    {"stop_admit_us": 1, "last_token_us": 2, "home_us": 3},
    {"stop_admit_us": 2**62, "last_token_us": None, "home_us": 2**62 + 5},
    {"stop_admit_us": None, "last_token_us": None, "home_us": None},
    "out of order",
])  # fmt: skip
def test_instants_that_cannot_be_are_not_measured(busy: Band, instants, monkeypatch):
    """A wrong clock is no reason for a wrong figure, nor for a tick that fails."""
    if instants == "out of order":
        now_us = to_us(busy.now)
        instants = {"stop_admit_us": now_us, "last_token_us": now_us - 1, "home_us": now_us + 1}
    monkeypatch.setattr(Drain, "instants", lambda self, now: instants)
    busy.until_lent()
    busy.waits_us = [250_000] * 20
    busy.step(2)
    loan = Lend.objects.get()
    assert loan.home_at is not None
    assert (loan.stop_admit_at, loan.last_token_at, loan.drained_at, loan.drain_us) == (None, None, None, None)
    claim = queries.week_review(busy.pool, busy.now).claim
    assert (claim.measured, claim.unmeasured) == (0, ("f1 under fence 1",))


def breach(band: Band, reason: str) -> None:
    if reason == "interactive_p95":
        band.waits_us = [250_000] * 20
    elif reason == "interactive_load":
        band.admitted_per_s = 12.0
    elif reason == "telemetry_stale":
        band.silent = {band.agents[0].pk}
        band.step(4)
        assert band.count("lent") == 2
    elif reason == "manual":
        actions.recall_slot(slot_id=band.slots["f1"].pk, actor=ONCALL, now=band.now, reason="testing a node")
    elif reason == "tripwire":
        Trip.objects.create(
            slot=band.slots["f1"], fence=band.grant("f1").fence, at=band.now, reason="queue_p95", value=2e5
        )
    band.step(1)


def test_a_grant_that_ran_out_while_no_controller_ticked_is_recalled(busy: Band):
    busy.until_lent()
    busy.now += timedelta(seconds=15)
    busy.step(1)
    assert busy.grant("f1").reason == "grant_expired"


def test_batch_returns_the_slot_that_it_does_not_need(busy: Band):
    busy.until_lent(2)
    busy.said = {"f1": SaidSlot(running_batch=3), "f2": SaidSlot(running_batch=1)}
    Job.objects.update(items=1)
    busy.step(3)
    assert busy.count("lent") == 2, "slack has to stay above the limit for the return hold"
    busy.step(1)
    assert busy.grant("f2").reason == "batch_slack", "the one with the least running batch work, alone"
    assert busy.grant("f1").state == "lent"
    busy.step(1)
    assert busy.grant("f1").reason == "batch_slack"


def test_the_cooldown_follows_a_recall(busy: Band):
    busy.until_lent()
    busy.waits_us = [250_000] * 20
    busy.step(1)
    busy.waits_us = [20_000] * 20
    recalled = busy.now
    busy.until_lent()
    assert busy.now - recalled == timedelta(seconds=10)
    assert busy.grant("f1").fence == 3


def test_a_drain_past_its_bound_is_cancelled_then_overdue_then_home(busy: Band):
    busy.until_lent()
    busy.said["f1"] = SaidSlot(running_batch=2)
    busy.waits_us = [250_000] * 20
    busy.step(1)
    busy.step(5)
    assert busy.grant("f1").state == "draining"
    busy.step(1)
    assert busy.grant("f1").state == "cancelling"
    busy.step(10)
    assert busy.grant("f1").state == "overdue"
    assert [slot.name for slot in queries.overdue_slots()] == ["f1"]
    busy.said.clear()
    busy.step(1)
    assert busy.grant("f1").state == "home"
    assert Lend.objects.get().overdue
    review = queries.week_review(busy.pool, busy.now)
    assert review.overdue == 1, "counted"
    assert (review.claim.measured, review.claim.overdue) == (0, ("f1 under fence 1",)), "and left out by name"
    states = SlotInterval.objects.filter(slot=busy.slots["f1"]).order_by("started_at").values_list("state", flat=True)
    assert list(states) == ["home", "lent", "draining", "cancelling", "overdue", "home"]


def test_work_that_cannot_be_cancelled_is_overdue_at_the_bound(busy: Band):
    WorkloadClass.objects.filter(slug="bulk").update(retry_safe=False)
    busy.until_lent()
    busy.said["f1"] = SaidSlot(running_batch=2)
    busy.waits_us = [250_000] * 20
    busy.step(7)
    assert busy.grant("f1").state == "overdue"


def test_an_old_report_does_not_bring_a_slot_home(busy: Band):
    busy.until_lent()
    busy.said["f1"] = SaidSlot(flex="home", fence=1)
    busy.waits_us = [250_000] * 20
    busy.step(3)
    assert busy.grant("f1").state == "draining"


def test_a_silent_agent_is_lost_and_comes_back(busy: Band):
    busy.until_lent()
    owner = busy.slots["f1"].agent_id
    busy.silent = {owner}
    busy.step(5)
    assert busy.grant("f1").reason == "telemetry_stale"
    busy.step(6)
    assert busy.grant("f1").state == "lost", "unreachable at its drain bound"
    busy.step(4)
    lost = {slot.name for slot in queries.lost_slots()}
    assert lost == {slot.name for slot in busy.slots.values() if slot.agent_id == owner}
    open_now = SlotInterval.objects.filter(slot=busy.slots["i1"], ended_at__isnull=True).get()
    assert (open_now.state, open_now.owner_class, open_now.reason) == ("lost", "", "agent_silent")
    busy.silent.clear()
    busy.said["f1"] = SaidSlot(running_batch=1)
    busy.step(1)
    assert busy.grant("f1").state == "draining", "busy slots drain, they are not lent by coming back"
    assert not queries.lost_slots()
    busy.said.clear()
    busy.step(1)
    assert busy.grant("f1").state == "home"
    loan = Lend.objects.get(slot=busy.slots["f1"])
    assert loan.lost and loan.home_at is not None


def test_nothing_is_lent_while_an_agent_is_lost_and_again_when_it_was_retired(busy: Band):
    """On-call's way out when the machine is gone: without the agent the pool's telemetry is whole again."""
    busy.until_lent()
    owner = busy.slots["f1"].agent
    other = next(agent for agent in busy.agents if agent.pk != owner.pk)
    busy.silent = {owner.pk}
    busy.step(20)
    assert busy.states() == {"f1": "lost", "f2": "home"}
    sample = PoolSample.objects.latest("at")
    assert sample.telemetry_age_us >= 15_000_000, "the oldest report counts, not the freshest"
    busy.step(30)
    assert busy.count("lent") == 0, "long after the cooldown"
    retire_agent(agent_id=owner.pk, actor=ONCALL, now=busy.now, reason="burnt down")
    busy.slots = {name: slot for name, slot in busy.slots.items() if slot.agent_id == other.pk}
    busy.agents = [other]
    busy.admitted_per_s = 2.0  # what is left serves less
    busy.until_lent(at_most=15)
    assert busy.states()["f2"] == "lent"
    assert not queries.lost_slots(), "its slots left the fleet with it"
    loan = Lend.objects.get(slot__name="f1")
    assert loan.lost and loan.home_at is None and loan.drain_us is None


def test_a_lent_slot_whose_agent_is_retired_is_recalled_and_then_lost(busy: Band):
    busy.until_lent()
    owner = busy.slots["f1"].agent
    retire_agent(agent_id=owner.pk, actor=ONCALL, now=busy.now, reason="sold")
    busy.slots = {name: slot for name, slot in busy.slots.items() if slot.agent_id != owner.pk}
    busy.agents = [agent for agent in busy.agents if agent.pk != owner.pk]
    busy.step(1)
    grant = Grant.objects.get(slot__name="f1")
    assert (grant.state, grant.action, grant.fence) == ("draining", "recall", 2)
    busy.step(1)
    assert Grant.objects.get(slot__name="f1").state == "lost"


def test_an_agent_that_never_reported_is_unknown_not_quiet(busy: Band):
    busy.silent = {agent.pk for agent in busy.agents}
    busy.step(3)
    sample = PoolSample.objects.latest("at")
    assert (sample.p95_queue_us, sample.admitted_per_s, sample.telemetry_age_us) == (None, None, None)
    assert busy.count("lent") == 0
    busy.step(13)
    assert len(queries.lost_slots()) == 8


def test_nobody_waiting_is_zero(band: Band):
    band.waits_us = []
    band.step(1)
    assert PoolSample.objects.latest("at").p95_queue_us == 0


def test_freeze_stops_new_loans_and_ends_by_itself(busy: Band):
    busy.step(1)
    actions.freeze(
        pool_id=busy.pool.pk, actor=ONCALL, now=busy.now, reason="incident", until=busy.now + timedelta(seconds=20)
    )
    number = Pool.objects.get().live_number
    assert number > 0
    busy.step(19)
    assert busy.count("lent") == 0
    busy.step(2)
    pool = Pool.objects.get()
    assert pool.frozen_since is None and pool.live_number > number
    assert busy.count("lent") == 1


def test_freeze_lets_loans_run_and_freeze_and_recall_does_not(busy: Band):
    busy.until_lent()
    actions.freeze(pool_id=busy.pool.pk, actor=ONCALL, now=busy.now, reason="incident")
    busy.step(4)
    assert busy.states() == {"f1": "lent", "f2": "home"}
    actions.freeze_and_recall(pool_id=busy.pool.pk, actor=ONCALL, now=busy.now, reason="burn")
    busy.step(1)
    assert busy.grant("f1").reason == "manual"


def test_a_draining_agent_gives_its_lent_slot_back(busy: Band):
    busy.until_lent()
    agent = busy.slots["f1"].agent
    agent.drain_requested_at = busy.now
    agent.save(update_fields=["drain_requested_at"])
    busy.step(1)
    assert busy.grant("f1").reason == "manual"


def test_a_trip_is_answered_once(busy: Band):
    busy.until_lent()
    Trip.objects.create(slot=busy.slots["f1"], fence=1, at=busy.now, reason="refused", value=1)
    busy.step(2)
    assert Trip.objects.get().handled_at is not None
    busy.until_lent()
    assert busy.grant("f1").fence == 3


def test_twenty_restarts_keep_fences_growing_and_the_band_whole(busy: Band):
    fences = {"f1": 0, "f2": 0}
    for number in range(20):
        busy.restart()
        busy.waits_us = [250_000 if number % 4 == 3 else 20_000] * 20
        busy.step(4)
        for name, fence in fences.items():
            assert busy.grant(name).fence >= fence
            fences[name] = busy.grant(name).fence
    assert fences["f1"] >= 3
    loans = list(Lend.objects.values_list("slot__name", "fence"))
    assert len(set(loans)) == len(loans)
    assert Lend.objects.filter(home_at__isnull=True).count() == busy.count("lent") + busy.count("draining")


def test_a_restart_remembers_hold_and_cooldown(busy: Band):
    busy.step(3)
    busy.restart()
    busy.step(1)
    assert busy.count("lent") == 1, "the hold time goes on across a restart without a gap"
    busy.waits_us = [250_000] * 20
    busy.step(1)
    busy.waits_us = [20_000] * 20
    busy.restart()
    busy.step(9)
    assert busy.count("lent") == 0, "the cooldown too"
    busy.step(1)
    assert busy.count("lent") == 1


def test_the_week_counts_from_monday_and_blocks(busy: Band):
    Pool.objects.update(spillover_per_week=1, spillover_action="block")
    busy.until_lent()
    busy.step(6)
    assert busy.count("lent") == 1
    check = [c for c in Decision.objects.latest("id").checks if c["name"] == "lends_this_week"]
    assert check[0]["value"] == 1 and check[0]["held"] is False


def test_best_effort_work_is_no_reason_to_lend(band: Band):
    add_job(band, gpu_s=1_000_000, due_in=None)
    band.step(8)
    assert band.count("lent") == 0


def test_another_isolation_never_lends_and_brings_home_what_is_lent(busy: Band):
    busy.until_lent()
    Pool.objects.update(isolation="dedicated")
    busy.step(1)
    assert busy.grant("f1").reason == "manual"
    busy.step(20)
    assert busy.count("lent") == 0


def test_the_backlog_is_that_of_the_jobs_page(busy: Band):
    add_job(busy, gpu_s=500, due_in=None)
    add_job(busy, gpu_s=100, due_in=timedelta(minutes=-10))
    add_job(busy, gpu_s=100, due_in=timedelta(hours=-2))
    busy.report()
    reading = telemetry.read(Shard(), busy.now).pools[busy.pool.pk]
    seen = sorted((job.remaining_gpu_us, job.deadline_us or 0) for job in reading.jobs)
    told = sorted((us, to_us(at) if at else 0) for us, at in backlog(busy.pool.pk, busy.now))
    assert seen == told and len(seen) == 3


def test_requests_of_clients_loops_are_backlog_too(band: Band):
    """40 GPU-hours due in four hours, and no job: with two slots of the floor there is no slack."""
    band.direct = [("", to_us(band.now) + 4 * 3_600_000_000, 20 * 3_600_000_000)]
    band.until_lent()
    decided = Decision.objects.filter(actions__contains=[{"kind": "lend"}]).latest("id")
    (check,) = (row for row in decided.checks if row["name"] == "slack")
    assert check["value"] < -3.9 and queries.recomputes(decided)
    band.direct = []
    band.step(8)
    assert band.count("lent") == 0, "with the requests the reason is gone"


def test_no_slot_is_lent_for_work_that_a_hard_budget_does_not_pay_for(busy: Band):
    """The job needs 2.5 slots in time and waits for money: a slot that was lent for it would stand idle."""
    job = Job.objects.get()
    Job.objects.filter(pk=job.pk).update(admission={"bound_nanos": 1_000 * job.items})
    budget = Budget.objects.create(
        tenant=job.tenant, name="plan", period="month", zone="UTC", limit_nanos=999, hard=True, created_at=busy.now,
        updated_at=busy.now,
    )  # fmt: skip
    busy.step(8)
    assert busy.count("lent") == 0
    Budget.objects.filter(pk=budget.pk).update(limit_nanos=2_000 * job.items)
    busy.until_lent()
    Budget.objects.filter(pk=budget.pk).update(limit_nanos=999)
    busy.step(12)
    assert busy.count("lent") == 0 and busy.grant("f1").reason == "batch_slack", "its money is gone, and so is the loan"


def test_of_direct_requests_only_those_count_that_no_running_job_counts(band: Band):
    add_job(band, gpu_s=100, due_in=timedelta(hours=4))
    job = Job.objects.get()
    due_us, ended = to_us(band.now) + 3_600_000_000, uuid.uuid4()
    band.direct = [(str(job.uuid), due_us, 5_000_000), (str(ended), due_us, 7_000_000), ("", due_us + 1, 9_000_000)]
    band.step(1)
    reading = telemetry.read(Shard(), band.now).pools[band.pool.pk]
    job_us = reading.jobs[0].remaining_gpu_us
    agents = len(band.agents)
    seen = [(row.remaining_gpu_us, row.deadline_us) for row in reading.jobs[1:]]
    assert seen == [(7_000_000, due_us)] * agents + [(9_000_000, due_us + 1)] * agents
    told = [(us, to_us(at)) for us, at in backlog(band.pool.pk, band.now)]
    assert told == [(job_us, to_us(job.deadline)), *seen]
    assert pool_slack(band.pool, band.now).direct_us == agents * 16_000_000


def test_what_a_silent_or_draining_agent_held_is_no_backlog(band: Band):
    band.direct = [("", to_us(band.now) + 3_600_000_000, 7_000_000)]
    band.step(1)
    assert len(backlog(band.pool.pk, band.now)) == 2
    Agent.objects.filter(pk=band.agents[0].pk).update(drain_requested_at=band.now)
    assert len(backlog(band.pool.pk, band.now)) == len(telemetry.read(Shard(), band.now).pools[band.pool.pk].jobs) == 1
    later = band.now + timedelta(seconds=90)
    assert backlog(band.pool.pk, later) == [] and telemetry.read(Shard(), later).pools[band.pool.pk].jobs == ()


def test_agents_are_nudged_about_their_own_slots(busy: Band):
    busy.step(3)
    assert [(nudge.kind, nudge.slot_id, nudge.fence) for nudge in busy.step(1).nudges] == [
        ("grant", busy.slots["f1"].pk, 1)
    ]
    assert not busy.step(1).nudges, "a renewal comes with the next answer"
    busy.waits_us = [250_000] * 20
    (nudge,) = busy.step(1).nudges
    assert (nudge.kind, nudge.slot_id, nudge.fence) == ("recall", busy.slots["f1"].pk, 2)
    assert nudge.agent == str(busy.slots["f1"].agent.uuid)
    assert not busy.step(1).nudges, "a breach that lasts does not recall twice"


def test_pools_that_began_together_are_not_written_down_together(band: Band):
    """Else one tick a minute would write a decision of every pool, for as long as the leader leads."""
    others = [factories.pool(f"twin-{number}") for number in range(3)]
    for number, pool in enumerate(others):
        agent = factories.agent(pool, f"twin-{number}", enrolled_at=band.now)
        slot = Slot.objects.create(pool=pool, name="f1", band="flex", agent=agent)
        SlotTenure.objects.create(slot=slot, started_at=band.now - timedelta(minutes=5))
    band.step(130)
    settled = band.now - timedelta(seconds=60)
    rows = Decision.objects.filter(at__gt=settled, pool__in=others)
    assert {row.pool_id: row.at.second for row in rows} == {pool.pk: pool.pk % 60 for pool in others}
