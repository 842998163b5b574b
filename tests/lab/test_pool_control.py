"""A simulated night: loans and their return, jobs and deadlines, and what must hold of both."""

from __future__ import annotations

from itertools import pairwise

import pytest

from controlplane.core.flex_decision import RecallReason
from controlplane.core.slot_states import SlotState
from controlplane.lab.pool_control import Wire
from controlplane.lab.report import report
from controlplane.lab.simulator import STEP_US
from tests.lab.nights import MINUTE_US, band, job, night, traffic

SECOND_US = 1_000_000


@pytest.fixture(scope="module")
def lending():
    """Half an hour in which batch needs more than its floor and interactive wants its slots back twice."""
    return night(band(), traffic(35, 3.0, 20.0), [job(3_600, 26)], minutes=60)


def test_slots_are_lent_while_it_is_quiet_and_come_back_for_interactive(lending):
    _, control = lending
    assert len(control.loans) >= 4
    reasons = {loan.reason for loan in control.loans}
    assert reasons & {RecallReason.INTERACTIVE_LOAD, RecallReason.TRIPWIRE, RecallReason.INTERACTIVE_P95}
    assert all(grant.state is SlotState.HOME for grant in control.grants.values())


def test_every_drain_is_measured_and_ends_within_its_bound(lending):
    _, control = lending
    drains = [loan.drain_us for loan in control.loans]
    assert None not in drains
    assert all(0 <= drain_us <= control.policy.drain_bound_us + STEP_US for drain_us in drains)


def test_batch_begins_only_on_its_floor_and_on_loans(lending):
    simulator, control = lending
    lent = {name: [] for name in control.grants}
    for name, moves in simulator.timeline.moves.items():
        for at_us, until_us, state in simulator.timeline.stretches(name, simulator.now_us()):
            if state is SlotState.LENT:
                lent[name].append((at_us, until_us))
        assert moves[0][1] is SlotState.HOME
    columns = control.items.jobs[0].columns
    names = [slot.spec.name for slot in simulator.scheduler.slots]
    floor = {slot.name for slot in simulator.document.pool.slots if slot.band == "batch"}
    seen = set()
    for row, slot in enumerate(columns.slot):
        if columns.attempts[row] != 1:
            continue
        name, started_us = names[slot], columns.started_us[row]
        seen.add(name)
        if name not in floor:
            assert any(at_us <= started_us <= until_us for at_us, until_us in lent[name]), (row, name)
    assert seen >= floor | set(control.grants)


def test_two_loans_never_begin_within_the_decision_interval_nor_in_the_cooldown(lending):
    _, control = lending
    policy, instants = control.policy, [loan.lent_us for loan in control.loans]
    assert all(b - a >= policy.decision_interval_us for a, b in pairwise(instants))
    recalls = [loan.recalled_us for loan in control.loans if loan.recalled_us is not None]
    for lent_us in instants:
        assert all(not 0 <= lent_us - recalled_us < policy.cooldown_us for recalled_us in recalls)


def test_each_item_is_done_once_and_the_jobs_figures_add_up(lending):
    simulator, control = lending
    done = control.items.jobs[0]
    assert done.done == len(done.spec.prompts) and not done.parked and not done.waiting
    assert all(code == 1 for code in done.columns.code)
    answer = report(simulator, control, objective_ms=500)["jobs"][0]
    assert answer["finished_s"] == (max(done.columns.ended_us) - simulator.start_us) / SECOND_US
    assert answer["deadline_met"] is (answer["finished_s"] <= answer["deadline_s"])


def test_lending_meets_a_deadline_that_the_floor_alone_misses():
    work, jobs = traffic(20, 3.0, 3.0), [job(2_200, 22)]
    answers = {}
    for max_lent in (0, None):
        flex = {"lend_hold_s": 20, "cooldown_s": 15, "decision_interval_s": 5, "drain_bound_s": 10}
        simulator, control = night(band(flex={**flex, "max_lent": max_lent}), work, jobs, minutes=45)
        answers[max_lent] = report(simulator, control, objective_ms=500)
    assert [answers[max_lent]["jobs"][0]["deadline_met"] for max_lent in (0, None)] == [False, True]
    assert answers[0]["flex"]["lends"] == 0 and answers[None]["flex"]["lends"] >= 1


def test_what_comes_after_the_last_request_is_no_lent_or_idle_time():
    work, jobs = traffic(20, 3.0, 3.0), [job(2_200, 22)]
    answers = [
        report(*night(band(), work, jobs, minutes=minutes), objective_ms=500) for minutes in (45, 24 * 60)
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert 20 * 60 <= answers[0]["simulated_s"] <= 20 * 60 + 20
    assert all(slot["busy_s"] + sum(slot["idle_s"].values()) <= 20 * 60 + 20 for slot in answers[0]["slots"])


def test_a_job_without_a_deadline_borrows_nothing():
    _, control = night(band(), traffic(10, 3.0, 3.0), [job(1_000, None)], minutes=15)
    assert not control.loans and control.items.jobs[0].done > 300


def test_a_batch_of_short_items_keeps_its_slots_busy():
    simulator, control = night(band(), traffic(1, 0.5, 0.5), [job(30_000, None, output=6)], minutes=3)
    assert control.items.jobs[0].done > 5_000
    busy_us = next(busy_us for _, band_of, busy_us, _ in simulator.timeline.read(simulator.now_us(), banded=True)
                   if band_of == "batch")  # fmt: skip
    assert busy_us / (3 * MINUTE_US) > 0.95


def test_without_a_broker_reports_alone_carry_every_grant():
    work, jobs = traffic(20, 3.0, 20.0), [job(2_500, 20)]
    _, control = night(band(), work, jobs, minutes=45, wire=Wire(nudge_us=None))
    assert control.loans and all(loan.home_us is not None for loan in control.loans)


def test_busy_and_idle_time_of_every_slot_add_up(lending):
    simulator, control = lending
    answer = report(simulator, control, objective_ms=None)
    causes = set()
    for row, meter in zip(answer["slots"], simulator.meters, strict=True):
        assert row["busy_s"] + sum(row["idle_s"].values()) == pytest.approx(answer["simulated_s"], abs=1e-6)
        assert row["busy_s"] == meter.busy_us / SECOND_US
        causes |= row["idle_s"].keys()
    assert causes <= {"interactive_floor_unused", "batch_floor_unused", "flex_not_lent", "lent_unused", "draining"}
    assert {"interactive_floor_unused", "flex_not_lent"} <= causes
