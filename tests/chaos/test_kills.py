"""kill -9 of each kind of child under traffic: no usage record is lost, none is counted twice."""

import time
from collections import Counter

import psycopg
import pytest

from controlplane.core.reasons import Outcome
from controlplane.embedded.postgres import start_postgres, stop_postgres
from tests.e2e.demo_run import DemoRun

pytestmark = [pytest.mark.processes, pytest.mark.slow]

VICTIMS = (
    ("web", ("uvicorn",)),
    ("worker", ("celery", "worker")),
    ("agent gpu-2", ("controlplane.agent", "gpu-2")),
    ("valkey", ("valkey-server",)),
    ("controller", ("manage.py", "controller")),
)


def test_killed_children_lose_no_record_and_count_none_twice(tmp_path):
    run = DemoRun(tmp_path / "demo", "--headless", "--seconds", "60")
    try:
        run.wait_for("Flexband is up")
        time.sleep(4)
        for name, words in VICTIMS:
            run.kill(*words)
            run.wait_for(f"{name} was killed by signal 9")
            time.sleep(4)
        run.finish(300)
    finally:
        if run.process.poll() is None:
            run.stop()
    assert run.left_behind() == []

    seen = Counter(line.split()[1] for line in ends(run))
    completed = {line.split()[0] for line in ends(run) if line.endswith(" completed")}
    assert seen["completed"] == len(completed) > 50, "a client saw the same request end twice"

    server = start_postgres(tmp_path / "demo" / "var")
    try:
        with psycopg.connect(server.owner_dsn) as database:
            check_records(database, completed)
    finally:
        stop_postgres(tmp_path / "demo" / "var")


def ends(run: DemoRun) -> list[str]:
    return (run.folder / "var" / "demo" / "ends.log").read_text().splitlines()


def check_records(database: psycopg.Connection, completed: set[str]) -> None:
    rows = database.execute("SELECT request_id::text, attempt, outcome FROM usage_record").fetchall()
    attempts = Counter((request_id, attempt) for request_id, attempt, _ in rows)
    assert [key for key, count in attempts.items() if count > 1] == [], "records stored twice"

    ends_of = Counter(request_id for request_id, _, outcome in rows if outcome == Outcome.COMPLETED.code)
    lost = completed - set(ends_of)
    assert lost == set(), f"{len(lost)} completed requests have no record of it"
    assert all(count == 1 for count in ends_of.values()), "a request completed twice"

    counted = database.execute("SELECT sum(records) FROM usage_agentcursor").fetchone()
    assert counted is not None and int(counted[0]) == len(rows), "cursors and records disagree"
    rolled = database.execute(
        "SELECT coalesce((SELECT sum(requests) FROM usage_rollupdelta), 0)"
        " + coalesce((SELECT sum(requests) FROM usage_rollupminute), 0)"
    ).fetchone()
    assert rolled is not None and int(rolled[0]) == len(rows), "rollups and records disagree"
    quarantined = database.execute("SELECT count(*) FROM usage_quarantine").fetchone()
    assert quarantined == (0,)
