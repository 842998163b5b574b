"""25 kill -9 at random instants of a night's work: each item has one result and one charge, and nothing is stuck.

Real processes on a PostgreSQL of their own, which is among the victims; the batches come through the official client.
`make chaos` runs the same night many times.
"""

from collections.abc import Iterator

import pytest

from controlplane.supervisor.supervisor import Supervisor
from tests.chaos.job_night import FIRST_ITEMS, SECOND_ITEMS, run_night, seed_of_run
from tests.chaos.job_system import JobSystem

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def system(tmp_path) -> Iterator[JobSystem]:
    with Supervisor(tmp_path / "var", say=lambda line: None) as supervisor:
        yield JobSystem(tmp_path, supervisor)


def test_each_item_has_one_result_and_one_charge_whatever_is_killed(system, capsys):
    seed = seed_of_run()
    with capsys.disabled():
        print(f"\n  seed {seed} (FLEXBAND_CHAOS_SEED={seed} repeats its kills)")
    night = run_night(system, seed)
    with capsys.disabled():
        print("\n".join(f"  {line}" for line in night.lines()))
    assert night.kills == 25
    assert 0 < night.left < FIRST_ITEMS + SECOND_ITEMS, "the last kill came after the work: the test needs more items"
    assert sum(effort.again for effort in night.efforts.values()) > 0, "no kill met an item: nothing was proven"
