"""A leader that reads what changed writes what one that reads everything would write."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, event, example, given, settings

from controlplane.fleet.models import Agent, AgentLive, Slot, SlotTenure
from controlplane.flex import leadership
from controlplane.flex.controller import Controller
from controlplane.flex.samples import sample_at
from tests import factories
from tests.flex.conftest import Band, add_job, make_band
from tests.flex.histories import bounded, budget, crashed, histories, silence

#: Every table that a tick writes; ids are what the order of rows makes them.
WRITTEN = {
    "flex_decision": "- 'id'", "flex_grant": "", "fleet_slotinterval": "- 'id'", "flex_trip": "",
    "flex_lend": "- 'id' - 'lend_decision_id' - 'recall_decision_id'", "flex_poolsample": "- 'id'",
}  # fmt: skip


def rows() -> dict[str, list]:
    found = {}
    with connection.cursor() as cursor:
        for table, without in WRITTEN.items():
            cursor.execute(f"SELECT (to_jsonb(t) {without})::text FROM {table} t")
            found[table] = sorted((json.loads(row[0]) for row in cursor.fetchall()), key=lambda row: json.dumps(row))
    for row in found["flex_poolsample"]:
        sample = sample_at(row["pool_id"], datetime.fromisoformat(row["at"]))
        assert sample is not None
        row["figures"] = sample.figures
        del row["whole_at"]
    found["flex_poolsample"].sort(key=lambda row: json.dumps(row, sort_keys=True))
    return found


def difference(found: dict[str, list], expected: dict[str, list]) -> list[str]:
    """Rows that one side has and the other has not, as lines."""
    lines = []
    for table in WRITTEN:
        lines += [f"too much in {table}: {row}" for row in found[table] if row not in expected[table]]
        lines += [f"missing in {table}: {row}" for row in expected[table] if row not in found[table]]
        if not lines and len(found[table]) != len(expected[table]):
            lines.append(f"{len(found[table])} rows in {table}, not {len(expected[table])}")
    return lines


def afresh(controller: Controller, band: Band) -> dict[str, list]:
    """The rows after this tick as a controller of the same term writes it that knows nothing but rows."""
    twin = Controller()
    twin.leadership, twin._term = controller.leadership, controller._term
    twin._memories, twin._leading_since_us = dict(controller._memories), controller._leading_since_us
    with transaction.atomic():
        twin.apply(twin.plan(band.now))
        found = rows()
        transaction.set_rollback(True)
    return found


def other_pool(band: Band) -> None:
    """A pool without a band on an agent of its own, so that what happens to one leaves another alone."""
    pool = factories.pool("plain")
    agent = factories.agent(pool, "gpu-9", enrolled_at=band.now)
    for name, kind in (("i1", "interactive"), ("b1", "batch")):
        slot = Slot.objects.create(pool=pool, name=name, band=kind, agent=agent)
        SlotTenure.objects.create(slot=slot, started_at=band.now - timedelta(minutes=5))


def report_of_the_other(band: Band) -> None:
    agent = Agent.objects.get(name="gpu-9")
    classes = [{"class_id": band.chat_id, "admitted_per_s_60s": band.admitted_per_s, "wait_60s": [[200, 3]]}]
    AgentLive.objects.update_or_create(
        agent=agent,
        defaults={"epoch": 1, "seq": band.seq, "reported_at": band.now, "figures": {"slots": [], "classes": classes}},
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(history=[*[(1, [], False)] * 6, (1, [silence(0)], False), (1, [crashed], False), (1, [], False)])
@example(history=[(1, [bounded], False), (1, [], False), (1, [budget(1)], False), (1, [budget(10**12)], False)])
@given(history=histories)
def test_any_history_is_decided_as_by_one_that_reads_everything(db, monkeypatch, history):
    # Each tick is made twice here and compared: on a busy machine that may take seconds.
    monkeypatch.setattr(leadership, "LEASE_S", 60)
    with transaction.atomic():
        band = make_band(factories.NOW)
        other_pool(band)
        add_job(band, gpu_s=36_000, due_in=timedelta(hours=4))
        short = ticks = 0
        for seconds, happenings, another_leads in [(1, [], False)] * 5 + history:
            band.now += timedelta(seconds=seconds)
            for happens in happenings:
                happens(band)
            band.report()
            report_of_the_other(band)
            if another_leads:
                band.restart()
            controller = band.controller
            controller.leadership.hold()
            plan = controller.plan(band.now)
            expected = afresh(controller, band)
            controller.apply(plan)
            assert difference(rows(), expected) == []
            ticks += 1
            short += 2 - len(plan.memories)
        event(f"{10 * short // (2 * ticks) * 10} % of ticks short")
        transaction.set_rollback(True)


def test_a_leader_decides_no_calm_pool_again(db):
    """Else the history above would hold as well for a leader that reads and decides everything each second."""
    band = make_band(factories.NOW)
    other_pool(band)
    decided = []
    for _ in range(8):
        band.now += timedelta(seconds=1)
        band.report()
        report_of_the_other(band)
        band.controller.leadership.hold()
        plan = band.controller.plan(band.now)
        band.controller.apply(plan)
        assert len(plan.changes.samples) == 2
        decided.append(len(plan.memories))
    assert decided[0] == 2 and decided[-1] == 0
