"""The simulator decides as an agent does, request by request, and repeats itself to the byte."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.lab.calls import NOT_ENDED, Columns
from controlplane.lab.policies import bands, document_of
from controlplane.lab.service import Constants
from controlplane.lab.simulator import START_US, Simulator
from controlplane.lab.workload import Workload
from controlplane.wire.policy import SizeBounds
from tests.lab.agent_driver import code_names, drive, drive_loop, simulate, with_ids

TENANTS = ("acme", "bolt", "corp", "dyna", "east")
SERVICE = Constants(20_003, 97, 4_001)


def workload(seed: int, rows: int, per_s: float, *, batch: float = 0.3, grid_us: int = 1) -> Workload:
    """Requests of two classes in random order; with a grid, many at one instant."""
    rng = Random(seed)
    work = Workload(("interactive", "batch"), TENANTS)
    at_s = 0.0
    for _ in range(rows):
        at_s += rng.expovariate(per_s)
        work.at_us.append(round(at_s * 1e6) // grid_us * grid_us)
        work.class_of.append(int(rng.random() < batch))
        work.tenant_of.append(min(int(rng.expovariate(0.8)), len(TENANTS) - 1))
        work.prompt.append(rng.randint(1, 900))
        work.output.append(rng.randint(1, 120))
        work.asked.append(rng.choice([0, 60, 240]))
    return work


def seen_in(decided) -> dict[str, int]:
    """Codes by name, so that a test can say that its run had something of what it is about."""
    return code_names(said[0] for said in decided.rows.values())


def policy(**changes):
    base = {
        "places": 3, "kv_tokens": 4_000, "weights": {"acme": 3, "corp": 2}, "decode_us_per_token": 1_500,
        "prefill_us_per_token": 40, "max_concurrency": 200, "sizes": SizeBounds([60, 250], 2, 500),
        "interactive": {"max_queue": 40, "max_wait_ms": 900, "max_prompt_tokens": 880, "default_output_tokens": 50,
                        "stage_timeout_s": 8},
        "batch": {"max_queue": 200, "max_wait_ms": 30_000, "default_output_tokens": 80, "stage_timeout_s": 60,
                  "default_deadline_s": 90},
        "flex": {"drain_bound_s": 1, "grant_ttl_s": 3},
    }  # fmt: skip
    return with_ids(document_of(bands(2, 2, 1), TENANTS, **{**base, **changes}))


def loans(until_s: int, slots=(3, 4)) -> list[tuple[int, int, int, str, int]]:
    """A loan every few seconds that is renewed for a while and recalled, or runs out."""
    grants, fence = [], dict.fromkeys(slots, 0)
    for start_s in range(2, until_s, 9):
        slot = slots[start_s % 2]
        fence[slot] += 1
        grants += [(start_s * 1_000_000 + 70_011 + renewed * 900_000, slot, fence[slot], "lend", 3_000_000)
                   for renewed in range(4)]  # fmt: skip
        if start_s % 4:
            fence[slot] += 1
            grants.append((start_s * 1_000_000 + 4_100_017, slot, fence[slot], "recall", 0))
    return grants


def assert_same(agent, lab) -> None:
    for row, said in agent.rows.items():
        assert lab.rows[row] == said, f"row {row}: agent {said}, lab {lab.rows[row]}"
    assert lab.starts == agent.starts
    assert lab.states == sorted(agent.states)


@pytest.mark.parametrize("isolation", ["reserved", "shared", "dedicated"])
async def test_an_agents_engine_decides_the_same(tmp_path, monkeypatch, isolation):
    document, work = policy(isolation=isolation), workload(11, 1_500, 75.0, grid_us=10_000)
    grants = loans(30) if isolation == "reserved" else ()
    agent = await drive(tmp_path / "agent", document, work, SERVICE, monkeypatch, grants)
    lab = simulate(document, work, SERVICE, grants)
    assert_same(agent, lab)
    seen = seen_in(lab)
    assert seen["completed"] > 500 and seen.keys() & {"wait_too_long", "queue_full"} and seen["prompt_too_long"], seen


def test_an_agents_asyncio_code_decides_the_same_on_a_virtual_loop(tmp_path, monkeypatch):
    document, work = policy(), workload(5, 3_000, 48.0)
    # Timers of one instant have no order on a loop, so no two requests arrive at one.
    for row in range(1, len(work)):
        work.at_us[row] = max(work.at_us[row], work.at_us[row - 1] + 1)
    agent = drive_loop(tmp_path / "agent", document, work, SERVICE, monkeypatch, loans(60))
    lab = simulate(document, work, SERVICE, loans(60))
    assert_same(agent, lab)
    seen = seen_in(lab)
    assert seen["completed"] > 1_000 and len(lab.states) > 10, (seen, lab.states)


async def test_downgrades_displacements_and_timeouts_are_the_same(tmp_path, monkeypatch):
    interactive = {"max_queue": 4, "max_wait_ms": 300, "stage_timeout_s": 1, "overload": "cancel"}
    batch = {"max_queue": 60, "stage_timeout_s": 1, "default_deadline_s": 2}
    slow, work, seen = Constants(20_003, 97, 12_001), workload(3, 700, 60.0, grid_us=5_000), {}
    for overload in ("cancel", "downgrade"):
        changes = {**interactive, "overload": overload, "downgrade_to": "batch"}
        document = policy(isolation="shared", interactive=changes, batch=batch)
        agent = await drive(tmp_path / overload, document, work, slow, monkeypatch)
        lab = simulate(document, work, slow)
        assert_same(agent, lab)
        seen |= seen_in(lab)
    assert seen.keys() >= {"displaced", "stage_timeout", "queue_timeout", "queue_full"}, seen


small = st.builds(
    workload,
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 60),
    per_s=st.sampled_from([5.0, 40.0, 200.0]),
    batch=st.sampled_from([0.0, 0.3, 1.0]),
    grid_us=st.sampled_from([1, 50_000, 1_000_000]),
)
policies = st.fixed_dictionaries(
    {
        "isolation": st.sampled_from(["reserved", "shared", "dedicated"]),
        "places": st.integers(1, 4),
        "kv_tokens": st.sampled_from([0, 900, 2_000]),
        "max_concurrency": st.sampled_from([2, 10, 1_000]),
        "safe_rate": st.sampled_from([{}, {2: 10.0, 4: 20.0}]),
        "sizes": st.builds(SizeBounds, st.just([60, 250]), st.sampled_from([0, 1, 30]), st.sampled_from([0, 400])),
        "interactive": st.fixed_dictionaries(
            {
                "max_queue": st.sampled_from([0, 3, 50]),
                "max_wait_ms": st.sampled_from([0, 200, 5_000]),
                "overload": st.sampled_from(["reject", "queue", "cancel", "downgrade"]),
                "downgrade_to": st.just("batch"),
                "stage_timeout_s": st.sampled_from([1, 20]),
            }
        ),
        "batch": st.fixed_dictionaries(
            {
                "retry_safe": st.booleans(),
                "stage_timeout_s": st.sampled_from([1, 20]),
                "default_deadline_s": st.just(20),
            }
        ),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=small, changes=policies, lent=st.booleans())
def test_whatever_the_policy_decisions_are_the_same(tmp_path, monkeypatch, work, changes, lent):
    document = policy(**changes)
    grants = loans(8) if lent and changes["isolation"] == "reserved" else ()
    with TemporaryDirectory(dir=tmp_path) as folder:
        agent = asyncio.run(drive(Path(folder), document, work, SERVICE, monkeypatch, grants))
    assert_same(agent, simulate(document, work, SERVICE, grants))


def test_the_same_inputs_give_the_same_bytes():
    document, work = policy(), workload(7, 400, 60.0)
    first, second = (Simulator(document, work, SERVICE) for _ in range(2))
    first.run()
    second.run()
    for name in Columns.__slots__:
        assert getattr(first.columns, name).tobytes() == getattr(second.columns, name).tobytes()


def test_what_was_closed_early_moves_the_clock_no_more():
    document = policy(interactive={"stage_timeout_s": 1})
    lab = Simulator(document, workload(7, 1, 75.0, batch=0.0), Constants(9_000_000, 0, 0))
    lab.run()
    assert code_names([lab.columns.code[0]]) == {"stage_timeout": 1}
    assert lab.now_us() == lab.columns.ended_us[0] < lab.columns.started_us[0] + 2_000_000


def test_columns_that_are_asked_for_again_tell_of_who_has_come_since_and_waits():
    lab = Simulator(policy(), workload(7, 900, 75.0), SERVICE)
    waiting = []

    def look() -> None:
        columns = lab.columns
        rows = [call.row for call in lab.calls.values() if not call.run]
        waiting.extend(rows)
        assert all(0 <= columns.arrived_us[row] <= lab.now_us() for row in rows)

    for at_us in range(START_US, START_US + 10_000_000, 20_000):
        lab.at(at_us, look)
    lab.run()
    assert waiting


def test_every_request_ends_and_every_slots_shares_add_up():
    document, work = policy(), workload(2, 2_000, 60.0)
    lab = Simulator(document, work, SERVICE)
    lab.run()
    assert all(code != NOT_ENDED for code in lab.columns.code)
    assert not lab.calls and not lab.scheduler.requests
    assert lab.outcomes.total() + lab.refused.total() == len(work)
    spent = sum(lab.columns.gpu_us)
    assert spent == sum(meter.busy_us for meter in lab.meters)
