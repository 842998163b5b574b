"""Every decision can be made again from what is stored: rows with their limits, samples with the row before."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from django.db import DatabaseError, transaction
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.flex import decide
from controlplane.core.flex_marks import FlexMarks
from controlplane.core.flex_policy import FlexPolicy, SafeRate
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.period import to_us
from controlplane.core.slot_states import Band as SlotBand
from controlplane.core.slot_states import SlotState
from controlplane.flex import evidence, queries
from controlplane.flex.models import Decision, PoolSample
from tests.flex.conftest import Band, SaidSlot

NOW_US = 1_800_000_000_000_000
instants = st.none() | st.integers(NOW_US - 10**10, NOW_US)
slots = st.builds(
    FlexSlot,
    name=st.just("f"),
    band=st.just(SlotBand.FLEX),
    state=st.sampled_from([SlotState.HOME, SlotState.LENT, SlotState.CANCELLING, SlotState.LOST]),
    batch_efficiency=st.sampled_from([1.0, 0.85]),
    fence=st.integers(0, 9),
    lent_at_us=instants,
    grant_expires_at_us=instants,
    cancelled_at_us=instants,
    running_batch_gpu_us=st.integers(0, 10**9),
    cancellable=st.booleans(),
)
jobs = st.lists(
    st.builds(BatchJob, name=st.just("j"), remaining_gpu_us=st.integers(0, 10**12),
              deadline_us=st.none() | st.integers(NOW_US - 10**10, NOW_US + 10**11)), max_size=4,
)  # fmt: skip
snapshots = st.builds(
    FlexSnapshot,
    now_us=st.just(NOW_US),
    policy=st.sampled_from([FlexPolicy(), FlexPolicy(max_lent=1, spillover_per_week=3)]),
    safe_rate=st.sampled_from([None, SafeRate(entries=((2, 8.0), (4, 16.5)), valid_until_us=NOW_US + 5)]),
    slots=st.lists(slots, max_size=4).map(
        lambda rows: tuple(replace(row, name=f"f{at}") for at, row in enumerate(rows))
    ),
    interactive=st.builds(
        InteractiveFigures,
        admitted_per_s=st.none() | st.floats(0, 100),
        p95_queue_us=st.none() | st.integers(0, 10**6),
        p95_below_since_us=instants,
        telemetry_at_us=instants,
    ),
    jobs=jobs.map(tuple),
    lends_this_week=st.integers(0, 5),
    frozen=st.booleans(),
    last_recall_at_us=instants,
    last_lend_at_us=instants,
    manual_recalls=st.sampled_from([frozenset(), frozenset({"f0"})]),
    trips=st.sampled_from([frozenset(), frozenset({"f1"})]),
)


@settings(max_examples=200, deadline=None)
@given(snapshots)
def test_what_is_stored_is_what_was_seen(snapshot: FlexSnapshot):
    stored = json.loads(json.dumps(evidence.snapshot_as_json(snapshot), allow_nan=False))
    assert evidence.read_snapshot(stored) == snapshot
    short = json.loads(json.dumps(evidence.snapshot_as_json(snapshot, with_limits=False), allow_nan=False))
    assert evidence.read_snapshot(short, stored) == snapshot
    decision = decide(snapshot)
    checks = json.loads(json.dumps(evidence.checks_as_json(decision), allow_nan=False))
    for _ in range(2):
        seen = evidence.snapshot_text(snapshot)
        assert json.loads(seen) == short
        assert json.loads(evidence.with_limits_text(seen, snapshot.policy, snapshot.safe_rate)) == stored
        assert json.loads(evidence.checks_text(decision)) == checks


@pytest.mark.parametrize(
    "marks",
    [
        FlexMarks(),
        FlexMarks(ticked_at_us=5, p95_below_since_us=3, slack_above_since_us={"f1": 4}, last_recall_at_us=2),
    ],
)
def test_marks_survive(marks: FlexMarks):
    assert evidence.read_marks(json.loads(json.dumps(evidence.marks_as_json(marks)))) == marks


def drama(band: Band) -> None:
    """Two loans, a breach with a drain past its bound, quiet, another loan."""
    band.until_lent(2)
    band.said["f1"] = SaidSlot(running_batch=1)
    band.waits_us = [250_000] * 20
    band.step(8)
    band.said.clear()
    band.waits_us = [20_000] * 20
    band.until_lent(1)


def test_every_row_answers_as_it_did(busy: Band):
    drama(busy)
    rows = list(Decision.objects.all())
    assert {action["kind"] for row in rows for action in row.actions} == {"lend", "renew", "recall", "cancel"}
    for row in rows:
        assert queries.recomputes(row)
        again = queries.recompute(row)
        assert evidence.finite(again.slack) == row.slack
        assert again.missed == row.missed


def test_every_tick_between_is_made_again_from_its_sample(busy: Band):
    drama(busy)
    ticks = PoolSample.objects.order_by("at")
    assert ticks.count() > Decision.objects.count()
    acted = {row.at: row for row in Decision.objects.all()}
    for sample in ticks:
        again = queries.decision_at(busy.pool.pk, sample.at)
        assert again is not None and again.at_us == to_us(sample.at)
        assert evidence.finite(again.slack) == sample.slack
        assert again.acts == (sample.at in acted and any(a["kind"] != "renew" for a in acted[sample.at].actions))


def test_a_quiet_pool_writes_a_row_a_minute(band: Band):
    band.step(20)
    before = Decision.objects.count()
    band.step(60)
    assert Decision.objects.count() == before + 1


def test_changed_limits_are_written_down(band: Band):
    band.step(20)
    before = Decision.objects.count()
    band.pool.load_limit = 0.6
    band.pool.save(update_fields=["load_limit"])
    band.step(1)
    assert Decision.objects.count() == before + 1
    assert Decision.objects.latest("id").snapshot["policy"]["load_limit"] == 0.6


def test_nobody_can_change_a_decision(band: Band):
    band.step(1)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        Decision.objects.update(missed=True)
