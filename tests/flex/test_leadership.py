"""One leads; a standby takes over; what a stopped leader still wanted to write is void."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from controlplane import flex
from controlplane.budgets.models import Budget
from controlplane.fleet.models import Slot, SlotTenure
from controlplane.flex.controller import Controller
from controlplane.flex.leadership import Leadership, LeadershipLost, read_shard
from controlplane.flex.models import ControllerTerm, Decision, Grant, Lend, PoolSample
from controlplane.jobs.models import Job
from tests import factories
from tests.flex.conftest import Band, add_job


def expire() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE flex_controllerterm SET expires_at = clock_timestamp() - interval '1 ms'")


@pytest.fixture
def pair(db) -> tuple[Leadership, Leadership]:
    return Leadership("main", "one"), Leadership("main", "two")


def test_a_renewal_keeps_the_term_and_keeps_others_out(pair):
    one, two = pair
    first = one.hold()
    assert two.hold() is None
    assert one.hold() == first
    assert two.term is None


def test_a_lapsed_lease_is_taken_under_a_higher_term(pair):
    one, two = pair
    first = one.hold()
    expire()
    assert two.hold() == first + 1
    assert one.hold() is None


def test_coming_back_late_is_a_new_term_even_alone(pair):
    one, _ = pair
    first = one.hold()
    expire()
    assert one.hold() == first + 1


def test_resigning_lets_the_standby_in_at_once(pair):
    one, two = pair
    one.hold()
    one.release()
    assert two.hold() is not None


def test_the_lease_runs_out_by_itself_within_five_seconds(pair):
    one, two = pair
    before = time.monotonic()
    one.hold()
    asked = held = time.monotonic()
    while two.hold() is None:
        assert asked - held < 5, "it was still kept out when it asked"
        time.sleep(0.1)
        asked = time.monotonic()
    assert time.monotonic() - before > 2.5


def test_shards_part_the_pools():
    parts = [read_shard("1/3"), read_shard("2/3"), read_shard("3/3")]
    for pool_id in range(1, 50):
        assert sum(part.has(pool_id) for part in parts) == 1
        assert read_shard("main").has(pool_id)
    for name in ("", "0/3", "4/3", "west"):
        with pytest.raises(ValueError, match="is no shard"):
            read_shard(name)


def everything() -> tuple:
    grants = tuple(Grant.objects.order_by("slot_id").values_list())
    return grants, Decision.objects.count(), Lend.objects.count(), PoolSample.objects.count(), intervals()


def intervals() -> tuple:
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM fleet_slotinterval ORDER BY id")
        return tuple(cursor.fetchall())


def test_a_leader_that_was_stopped_writes_nothing(busy: Band):
    """Its plan lends a slot; before it gets to write, its lease lapses and another leads."""
    stale = busy.controller
    busy.step(3)
    busy.now += timedelta(seconds=1)
    busy.report()
    plan = stale.plan(busy.now)
    assert plan.changes.lends
    expire()
    other = Controller()
    other.tick(busy.now)
    before = everything()
    with pytest.raises(LeadershipLost):
        stale.apply(plan)
    assert everything() == before
    assert not stale.leads


def second_pool(now: datetime, slug: str = "other", **values: Any) -> None:
    """A pool with a band of its own, whose agent says nothing."""
    pool = factories.pool(slug, **values)
    agent = factories.agent(pool, f"gpu-of-{slug}", enrolled_at=now)
    for name, kind in (("i1", "interactive"), ("b1", "batch"), ("f1", "flex")):
        slot = Slot.objects.create(pool=pool, name=name, band=kind, agent=agent)
        SlotTenure.objects.create(slot=slot, started_at=now - timedelta(minutes=5))


def test_a_large_plan_is_written_in_parts_and_none_of_them_after_the_term(busy: Band, monkeypatch):
    """To decide a large fleet takes longer than the lease: it is renewed meanwhile, and who lost it stops."""
    second_pool(busy.now)
    monkeypatch.setattr(flex.controller, "DECISIONS_AT_ONCE", 1)
    monkeypatch.setattr(flex.leadership, "KEEP_EVERY_S", 0.0)
    leader, kept = Controller(), []
    busy.report()
    leader.leadership.hold()
    plan = leader.plan(busy.now)
    assert [len(part.decisions) for part in plan.parts] == [1, 1]
    keep = leader.leadership.keep

    def lapses_before_the_second() -> None:
        kept.append(leader.leadership.term)
        if len(kept) == 2:
            expire()
        keep()

    monkeypatch.setattr(leader.leadership, "keep", lapses_before_the_second)
    with pytest.raises(LeadershipLost):
        leader.apply(plan)
    assert Decision.objects.count() == PoolSample.objects.count() == 1
    assert not leader.leads
    assert leader.tick(busy.now + timedelta(seconds=1)).leads
    assert Decision.objects.count() == 3, "all of them again, under the next term"


def test_a_new_leader_takes_a_large_fleet_in_some_pools_a_tick(busy: Band, monkeypatch):
    first = busy.pool.pk - 1
    second_pool(busy.now, id=first)
    busy.until_lent()
    monkeypatch.setattr(flex.resident, "BEGIN_AT_ONCE", 1)
    busy.restart()
    for pools in ([busy.pool.pk], [first, busy.pool.pk], [first, busy.pool.pk]):
        busy.step(1)
        assert sorted(PoolSample.objects.filter(at=busy.now).values_list("pool_id", flat=True)) == pools
    assert busy.states()["f1"] == "lent", "its loan would have ended: it is read first"


def test_money_that_changes_for_a_pool_that_waits_to_be_read_is_no_fault(busy: Band, monkeypatch):
    """What is paid is shared out among all jobs, those of pools too that a new leader has not come to yet."""
    second, third = busy.pool.pk - 2, busy.pool.pk - 1
    second_pool(busy.now, "second", id=second)
    second_pool(busy.now, "third", id=third)
    busy.until_lent()
    waits = add_job(busy, gpu_s=100, due_in=timedelta(hours=4))
    Job.objects.filter(pk=waits.pk).update(pool_id=third, admission={"bound_nanos": 1_000 * waits.items})
    limit = Budget.objects.create(
        tenant=waits.tenant, name="plan", period="month", zone="UTC", limit_nanos=999, hard=True, created_at=busy.now,
        updated_at=busy.now,
    )  # fmt: skip
    monkeypatch.setattr(flex.resident, "BEGIN_AT_ONCE", 1)
    busy.restart()
    busy.step(1)
    Budget.objects.filter(pk=limit.pk).update(limit_nanos=2_000 * waits.items)
    busy.step(2)
    assert PoolSample.objects.get(pool_id=third, at=busy.now).required


def test_a_plan_is_void_once_the_lease_lapsed_even_if_nobody_took_over(busy: Band):
    busy.step(1)
    plan = busy.controller.plan(busy.now)
    expire()
    before = everything()
    with pytest.raises(LeadershipLost):
        busy.controller.apply(plan)
    assert everything() == before


def test_two_controllers_one_leads_and_fences_go_on(busy: Band):
    standby = Controller()
    busy.until_lent()
    assert not standby.tick(busy.now).leads
    assert ControllerTerm.objects.get().holder == busy.controller.leadership.holder
    fence = busy.grant("f1").fence
    expire()
    busy.waits_us = [250_000] * 20
    busy.step(1, controller=standby)
    assert not busy.controller.tick(busy.now).leads
    assert busy.grant("f1").fence == fence + 1
    assert Decision.objects.latest("id").term == standby.leadership.term


def test_a_grant_that_somebody_changed_is_left_alone(busy: Band):
    """Two shards that overlap by mistake cannot give one fence two meanings."""
    busy.until_lent()
    busy.waits_us = [250_000] * 20
    busy.report()
    plan = busy.controller.plan(busy.now)
    assert plan.changes.grants
    Grant.objects.update(fence=7)
    applied = busy.controller.apply(plan)
    assert applied.grants == 0
    assert busy.grant("f1").fence == 7
    assert Lend.objects.get().recalled_at is None
