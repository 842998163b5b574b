"""Designs, overload and capacity: what a row says, and that each variant does what its name says."""

from __future__ import annotations

import pytest

from controlplane.lab.policies import bands, document_of
from controlplane.lab.service import read_service
from controlplane.lab.storm import Storm
from controlplane.lab.variants import GIANT, capacity, capacity_text, designs, overload, text, with_giant
from controlplane.lab.workload import Workload
from tests.lab.test_interference import asked


def test_a_giant_stands_beside_everybody_and_takes_nothing_from_them():
    work = Workload(("interactive",), ("a", "b"), [0, 5, 9], [0, 0, 0], [0, 1, 0], [7, 8, 9], [1, 2, 3], [2, 4, 6])
    giant = with_giant(work)
    assert giant.tenants == ("a", "b", GIANT)
    others = [row for row in range(len(giant)) if giant.tenant_of[row] != 2]
    assert [giant.prompt[row] for row in others] == work.prompt
    assert [giant.at_us[row] for row in others] == work.at_us
    assert giant.at_us == sorted(giant.at_us) and len(giant) == 4


def test_a_refused_client_tries_again_and_its_wait_counts_from_the_first_try():
    rows = 40
    work = Workload(("interactive",), ("a",), [1_000 * row for row in range(rows)], [0] * rows, [0] * rows, [10] * rows,
                    [100] * rows, [200] * rows)  # fmt: skip
    document = document_of(bands(1, 0, 0), ["a"], places=2, interactive={"max_queue": 2, "max_wait_ms": 0})
    service = read_service("output_us=1000")
    simulator = Storm(document, work, service)
    simulator.run()
    assert simulator.retried > 10 and not simulator._due
    late = [
        row for row in range(rows) if simulator.columns.started_us[row] > simulator.columns.arrived_us[row] + 900_000
    ]
    assert late and all(
        simulator.columns.arrived_us[row] - simulator.start_us == work.at_us[row] for row in range(rows)
    )


def test_designs_tell_what_each_costs(tmp_path):
    answer = designs(asked(tmp_path, forecast=2.0))
    rows = {row["variant"]: row for row in answer["rows"]}
    assert list(rows) == ["reserved", "dedicated", "shared", "strict priority"]
    assert rows["dedicated"]["lends"] == 0 and rows["dedicated"]["preempted"] == 0
    assert all(row["classes"]["interactive"]["arrivals"] == 250 for row in rows.values())
    assert "attained" in text(answer)


def test_overload_compares_with_what_is(tmp_path):
    answer = overload(asked(tmp_path, forecast=6.0))
    now, *others = answer["rows"]
    assert now["variant"] == "as it is" and len(others) == 7
    fewer = others[0]["classes"]["interactive"]
    assert fewer["attained"] <= now["classes"]["interactive"]["attained"]
    assert others[2]["classes"]["interactive"]["arrivals"] == 275
    broken, late, old = others[4:]
    assert "requests lost" in broken["variant"] and sum(broken["outcomes"].values()) <= 350
    assert late["variant"] == "the missing slots come when needed, 300 s late"
    assert old["variant"] == "signals are 10 s old"


def test_capacity_is_the_fewest_slots_that_hold(tmp_path):
    answer = capacity(asked(tmp_path, forecast=8.0))
    assert answer["needed_slots"] >= 2 and answer["with_one_failed"] == answer["needed_slots"] + 1
    assert answer["breaks_first"]
    assert f"{answer['needed_slots']} slots keep" in capacity_text(answer)
    assert capacity(asked(tmp_path, forecast=16.0))["needed_slots"] >= answer["needed_slots"]


@pytest.mark.parametrize("ask", [designs, overload, capacity])
def test_a_trace_that_is_not_there_is_an_error(tmp_path, ask):
    with pytest.raises(OSError):
        ask(asked(tmp_path, trace=str(tmp_path / "nowhere.csv")))
