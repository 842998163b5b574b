"""Slots that break, servers that come late, old signals: nothing is lost without a reason, nothing runs early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.idle_time import IdleCause
from controlplane.core.reasons import OUTCOME_CODES, Outcome
from controlplane.lab.calls import NOT_ENDED, Columns
from controlplane.lab.elastic import Autoscaler, with_standby
from controlplane.lab.faults import Conditions, Elastic, Failure, Faults, conditions_of, drawn
from controlplane.lab.kinds import parse
from controlplane.lab.policies import bands, document_of
from controlplane.lab.pool_control import Wire
from controlplane.lab.scenario import Load, run_policy
from controlplane.lab.simulator import Simulator
from tests.lab import nights
from tests.lab.nights import SERVICE
from tests.lab.test_simulator import TENANTS, policy, workload

S = 1_000_000
END_US = 60 * S
SILENT_US = 90 * S
UPSTREAM_ERROR = OUTCOME_CODES[Outcome.UPSTREAM_ERROR]


def broken_run(document, work, failures) -> tuple[Simulator, Faults]:
    lab = Simulator(document, work, SERVICE)
    faults = Faults(lab, failures)
    lab.run(END_US)
    return lab, faults


def columns_of(lab: Simulator) -> dict[str, bytes]:
    return {name: getattr(lab.columns, name).tobytes() for name in Columns.__slots__}


failures = st.lists(
    st.builds(
        Failure, st.sampled_from(["S01", "S02", "S03", "S04", "S05"]), st.integers(0, 12 * S),
        st.one_of(st.none(), st.integers(1, 4 * S)),
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=20)
@given(failures, st.integers(0, 1 << 20), st.sampled_from(["reserved", "shared", "dedicated"]))
def test_every_request_ends_is_refused_or_is_lost_with_a_reason(planned, seed, isolation):
    document, work = policy(isolation=isolation), workload(seed, 150, 40.0)
    lab, faults = broken_run(document, work, planned)
    codes = list(lab.columns.code)
    forever = any(failure.for_us is None for failure in planned)
    assert forever or (NOT_ENDED not in codes and not lab.calls and not lab.scheduler.requests)
    ended = lab.outcomes.total() + lab.refused.total()
    assert ended + len(lab.calls) == len(work)
    assert lab.outcomes[Outcome.UPSTREAM_ERROR] == codes.count(UPSTREAM_ERROR) == faults.lost
    if not lab.calls:
        # What a broken attempt used of its slot was used: the meters have it, no record does.
        assert sum(lab.columns.gpu_us) <= sum(meter.busy_us for meter in lab.meters)
    if not planned:
        assert not faults.lost and not faults.retried


@settings(max_examples=12)
@given(failures, st.integers(0, 1 << 20))
def test_nothing_starts_on_a_slot_that_is_broken(planned, seed):
    document, work = policy(isolation="shared"), workload(seed, 120, 60.0)
    lab = Simulator(document, work, SERVICE)
    starts: list[tuple[int, int]] = []
    lab.on_start = lambda now_us, row, slot: starts.append((now_us - lab.start_us, slot))
    Faults(lab, planned)
    lab.run(END_US)
    for failure in planned:
        end_us = 1 << 62 if failure.for_us is None else failure.at_us + failure.for_us
        index = int(failure.slot[1:]) - 1
        assert not [at for at, slot in starts if slot == index and failure.at_us < at < end_us]


def test_a_slot_broken_from_the_start_is_a_fleet_without_it():
    """N - 1: the same decisions as of a pool that has one slot less."""
    work = workload(4, 800, 45.0)
    work.at_us[:] = [at + 1 for at in work.at_us]
    changes = {"places": 3, "kv_tokens": 4_000, "decode_us_per_token": 1_500, "prefill_us_per_token": 40}
    fewer = Simulator(document_of(bands(3, 0, 1), TENANTS, **changes), work, SERVICE)
    fewer.run(END_US)
    broken, faults = broken_run(document_of(bands(4, 0, 1), TENANTS, **changes), work, [Failure("S04", 0)])
    ours, theirs = columns_of(broken), columns_of(fewer)
    del ours["slot"], theirs["slot"]
    assert ours == theirs and faults.broken == 1 and not faults.lost


def test_what_was_begun_is_lost_and_what_was_not_is_tried_again_within_the_budget():
    document = document_of(bands(2, 0, 0), ["a"], places=4)
    work = workload(9, 8, 1_000.0, batch=0.0)
    work.tenant_of[:] = [0] * len(work)
    object.__setattr__(work, "tenants", ("a",))
    lab, faults = broken_run(document, work, [Failure("S01", 30_000, 10 * S)])
    assert faults.retried + faults.lost == 4 and faults.retried >= 1
    assert max(lab.columns.attempts) == 2 and lab.outcomes[Outcome.COMPLETED] == 8 - faults.lost


def test_idle_time_of_a_broken_slot_has_that_cause():
    document, work = policy(isolation="shared"), workload(1, 50, 30.0)
    lab, _ = broken_run(document, work, [Failure("S02", 1 * S, 5 * S)])
    rows = {name: idle for name, _, _, idle in lab.timeline.read(lab.now_us(), banded=True)}
    assert rows["S02"][IdleCause.BROKEN] == 5 * S and IdleCause.BROKEN not in rows["S01"]


def test_failures_are_drawn_by_seed_and_each_slot_has_its_own():
    asked = {"mtbf_us": 3_600 * S, "mttr_us": 600 * S, "until_us": 200 * 3_600 * S}
    first, again, other = (drawn(["a", "b"], seed=seed, **asked) for seed in (1, 1, 2))
    assert first == again != other
    assert [one for one in first if one.slot == "a"] == drawn(["a"], seed=1, **asked)
    assert 150 < len([one for one in first if one.slot == "a"]) < 200, "every 70 minutes on average"


@settings(max_examples=8)
@given(st.integers(0, 1 << 20), st.integers(1, 3), st.sampled_from([2 * S, 20 * S, 300 * S]))
def test_a_server_that_was_ordered_takes_work_only_after_its_lag(seed, slots, lag_us):
    work = workload(seed, 400, 60.0, batch=0.0)
    document = with_standby(document_of(bands(1, 0, 0), TENANTS, places=2, interactive={"max_wait_ms": 60_000}), slots)
    lab = Simulator(document, work, SERVICE)
    starts: list[tuple[int, int]] = []
    lab.on_start = lambda now_us, row, slot: starts.append((now_us, slot))
    scaler = Autoscaler(lab, Elastic(slots, lag_us=lag_us, every_us=S))
    lab.run(END_US)
    assert NOT_ENDED not in list(lab.columns.code)
    ready = {name: ready_us for _, ready_us, name in reversed(scaler.orders)}
    for index, name in enumerate(slot.spec.name for slot in lab.scheduler.slots):
        if name.startswith("X"):
            early = [at for at, slot in starts if slot == index and at < ready.get(name, 1 << 62)]
            assert not early, (name, early[:1])
    assert all(ready_us == ordered_us + lag_us for ordered_us, ready_us, _ in scaler.orders)


def test_a_burst_orders_servers_and_calm_gives_them_back():
    busy, calm = workload(3, 2_000, 100.0, batch=0.0), workload(4, 300, 2.0, batch=0.0)
    for name in ("class_of", "tenant_of", "prompt", "output", "asked"):
        getattr(busy, name).extend(getattr(calm, name))
    last_us = busy.at_us[-1]
    busy.at_us.extend(last_us + at_us for at_us in calm.at_us)
    document = with_standby(document_of(bands(1, 0, 0), TENANTS, places=4, interactive={"max_wait_ms": 60_000}), 2)
    lab = Simulator(document, busy, SERVICE)
    scaler = Autoscaler(lab, Elastic(2, lag_us=5 * S, every_us=S, idle_us=30 * S))
    lab.run()
    assert len(scaler.orders) >= 2 and scaler.returned >= 1
    rows = {name: idle for name, _, _, idle in lab.timeline.read(lab.now_us(), banded=True)}
    assert rows["X01"][IdleCause.WARMING] == 5 * S * sum(name == "X01" for _, _, name in scaler.orders)


def night(wire: Wire):
    return nights.night(nights.band(), nights.traffic(9, 3.0, 3.0), [nights.job(1_200, 9)], minutes=15, wire=wire)


def test_without_reports_loans_run_out_and_requests_go_on():
    simulator, control = night(Wire(silent_us=((SILENT_US, 6 * 60 * S),)))
    free, calm = night(Wire())
    assert control.loans and calm.loans
    lost = [loan for loan in control.loans if SILENT_US < loan.lent_us - simulator.start_us < 6 * 60 * S]
    assert not lost, "nothing is lent by a control plane that nobody reaches"
    for moves in simulator.timeline.moves.values():
        at_us = simulator.start_us + SILENT_US + 16 * S
        state = [one for when, one in moves if when <= at_us][-1]
        assert state.value != "lent", "a loan that nobody renews has run out"
    assert simulator.outcomes.total() >= free.outcomes[Outcome.COMPLETED] // 2
    assert NOT_ENDED not in list(simulator.columns.code)


def test_the_same_losses_are_drawn_again_and_older_signals_decide_otherwise():
    first, again, calm = (night(Wire(loss=loss, seed=5)) for loss in (0.4, 0.4, 0.0))
    assert columns_of(first[0]) == columns_of(again[0])
    assert [loan.lent_us for loan in first[1].loans] == [loan.lent_us for loan in again[1].loans]
    assert [loan.lent_us for loan in first[1].loans] != [loan.lent_us for loan in calm[1].loans]
    late = night(Wire(interval_us=10 * S, latency_us=2 * S, nudge_us=None))
    assert NOT_ENDED not in list(late[0].columns.code)
    assert [loan.lent_us for loan in late[1].loans] != [loan.lent_us for loan in calm[1].loans]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fail=S01"], "SLOT@SECONDS"), (["--silent=5"], "SECONDS"), (["--report-loss=1"], "share"),
        (["--standby=-1"], "negative"), (["--report-every-s=0"], "0.1 or more"),
        (["--mtbf-h=1", "--mttr-min=0"], "--mttr-min"),
    ],
)  # fmt: skip
def test_conditions_that_make_no_sense_say_why(arguments, said):
    with pytest.raises(ValueError, match=said):
        conditions_of(parse("replay", ["--trace=x", *arguments]))


def test_nothing_goes_wrong_unless_it_is_asked_for():
    assert conditions_of(parse("replay", ["--trace=x", "--seed=7"])).ordinary
    for asked in ("--fail=S01@1", "--mtbf-h=5", "--standby=1", "--no-nudges", "--report-loss=0.1", "--silent=1+1"):
        assert not conditions_of(parse("replay", ["--trace=x", asked])).ordinary, asked


def test_a_slot_that_is_not_there_cannot_break():
    with pytest.raises(ValueError, match="no such slot; there are S01"):
        Faults(Simulator(policy(), workload(1, 5, 1.0), SERVICE), [Failure("S99", 0)])


def test_conditions_are_told_with_the_answer():
    asked = conditions_of(
        parse(
            "replay", ["--trace=x", "--fail=S01@5+5", "--mtbf-h=0.1", "--standby=1", "--start-up-lag-s=3", "--seed=3"]
        )
    )
    work = workload(2, 600, 60.0, batch=0.0)
    document = document_of(bands(2, 0, 0), TENANTS, places=2)
    found, again = (run_policy(document, Load(work), SERVICE, conditions=asked) for _ in range(2))
    assert found == again and found["conditions"]["failures"] == [{"slot": "S01", "at_s": 5.0, "for_s": 5.0}]
    assert found["faults"]["slots_broken"] >= 1 and "orders" in found["scaling"]
    plain = run_policy(document, Load(work), SERVICE, conditions=Conditions())
    assert "faults" not in plain and plain == run_policy(document, Load(work), SERVICE)
