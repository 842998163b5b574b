"""An agent that stands still for longer than its leases: its items run elsewhere, and what it brings late is refused.

No process dies: it is stopped with what it holds and with what runs on it, as a machine that is suspended or starved.
"""

import os
import signal
import time
from collections.abc import Iterator

import psycopg
import pytest

from controlplane.jobs.item_leases import SILENT_S
from controlplane.supervisor.supervisor import Supervisor
from controlplane.wire.report import FLAG_NOT_CHARGED
from tests.chaos import job_night, money_proof
from tests.chaos import job_proof as proof
from tests.chaos.job_system import AGENTS, JobSystem, names, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow]
ITEMS = 600
STOPPED, OTHER = AGENTS
HOLDS_S, DONE_S, SETTLED_S = 90, 300, 120


@pytest.fixture
def system(tmp_path) -> Iterator[JobSystem]:
    with Supervisor(tmp_path / "var", say=lambda line: None) as supervisor:
        yield JobSystem(tmp_path, supervisor)


def held_by(database: psycopg.Connection, name: str) -> set[tuple[int, int]]:
    """(line, fence) of the items that an agent holds."""
    rows = database.execute(
        "SELECT i.line, i.fence FROM jobs_item i JOIN fleet_agent a ON a.id = i.agent_id"
        " WHERE i.state = 1 AND a.name = %s",
        (name,),
    )
    return set(rows.fetchall())


def records(database: psycopg.Connection, *, charged: bool) -> int:
    """Of the stopped agent. Those that nobody pays for are of items whose result is another agent's."""
    row = database.execute(
        "SELECT count(*) FROM usage_record u JOIN fleet_agent a ON a.id = u.agent_id"
        " WHERE a.name = %s AND (u.flags & %s = 0) = %s",
        (STOPPED, FLAG_NOT_CHARGED, charged),
    ).fetchone()
    assert row is not None
    return int(row[0])


def at_work(database: psycopg.Connection) -> bool:
    """Whether the agent has ended items and holds more, so that some run at any instant."""
    return records(database, charged=True) >= 20 and len(held_by(database, STOPPED)) > 40


def test_an_agent_that_stands_still_loses_its_leases_and_brings_nothing_twice(system, capsys):
    system.start()
    client = system.client()
    custom_ids = names("lapse", ITEMS)
    batch_id = job_night.submit(client, "lapse", custom_ids)
    with system.database() as database:
        wait_until(lambda: at_work(database), "the agent holds items, some of them run", HOLDS_S)
        pid = system.supervisor.pids()[STOPPED]
        os.kill(pid, signal.SIGSTOP)
        try:
            held, stopped_at = held_by(database, STOPPED), time.monotonic()
            assert held
            job = proof.job_of_batch(database, batch_id)
            wait_until(lambda: not held_by(database, STOPPED) & held, "its leases lapse", DONE_S, every_s=0.5)
            lapsed_s = time.monotonic() - stopped_at
            wait_until(lambda: job_night.done(system) >= ITEMS, "the other agent ends them", DONE_S, every_s=0.5)
        finally:
            os.kill(pid, signal.SIGCONT)
        # reports on their way when it was stopped may be taken: silence counts from the last of them
        assert lapsed_s >= SILENT_S - 5
        wait_until(lambda: records(database, charged=False) > 0, "its late results arrive", SETTLED_S)
        wait_until(lambda: job_night.completed(client, [batch_id]), "the batch is completed", DONE_S, every_s=0.5)
        assert system.supervisor.pids()[STOPPED] == pid, "nobody started it again"
        wait_until(lambda: not proof.stuck(database), lambda: f"nothing is stuck: {proof.stuck(database)}", SETTLED_S)
        efforts = job_night.check(system, client, database, {"lapse": batch_id}, {"lapse": custom_ids})
        late = records(database, charged=False)
        again = {line for line, _ in held} & again_lines(database, job)
        money = money_proof.check_money(system, database)
        assert proof.unsettled_nanos(database, "hooli") == 0
    with capsys.disabled():
        print(f"\n  stopped with {len(held)} items, {len(again)} of them ran again; lapsed after {lapsed_s:.0f} s")
        print(f"  {late} late results of it were refused\n  {efforts['lapse'].line()}\n  {money.line()}")
    assert again and late


def again_lines(database: psycopg.Connection, job: int) -> set[int]:
    """Lines that were leased more than once."""
    return {
        line for (line,) in database.execute("SELECT line FROM jobs_item WHERE job_id = %s AND attempt > 1", (job,))
    }
