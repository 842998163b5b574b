"""A night of jobs while its parts are killed at random: the same scenario for the suite and for `make chaos`.

Every kill is drawn from the seed; at the end nothing may be lost or counted twice, in records, rollups,
ledger and budgets.
"""

import io
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import openai
import psycopg

from controlplane.core.batch_items import ItemState
from controlplane.demo.settings import python
from controlplane.demo.summary import gather
from tests.chaos import job_proof as proof
from tests.chaos import money_proof
from tests.chaos.job_system import AGENTS, OUTPUT_TOKENS, TENANT, JobSystem, batch_file, names, wait_until
from tests.e2e.demo_run import ROOT

VICTIMS = {"agent": 8, "web": 5, "worker": 4, "postgres": 4, "controller": 2, "beat": 2}
FIRST_ITEMS, SECOND_ITEMS = 1_800, 600
LOOK_EVERY_S = 1.0
#: Between two kills: most parts are back within three seconds, some others fall meanwhile.
PAUSES_S = (0.3, 3.0)
#: So many items end before the next agent is killed: else a slow machine would kill only what has just begun.
DONE_BETWEEN = 30
UP_AGAIN_S, DONE_S, SETTLED_S = 90, 240, 90


def submit(client: openai.OpenAI, name: str, custom_ids: list[str]) -> str:
    """Uploads and submits as a user's program does: again, with the same key, until it is answered."""
    content = io.BytesIO(batch_file(custom_ids))
    uploaded = client.files.create(file=(f"{name}.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"name": name},
        extra_headers={"Idempotency-Key": name},
    )  # fmt: skip
    return batch.id


def victims(rng: random.Random) -> list[str]:
    kinds = [kind for kind, count in VICTIMS.items() for _ in range(count)]
    rng.shuffle(kinds)
    return kinds


def kill_at_random(system: JobSystem, rng: random.Random, kinds: list[str]) -> Counter[str]:
    """One kill after the other; of the agents the one that holds most items, and not before work has gone on."""
    killed: Counter[str] = Counter()
    goal = done(system)
    for kind in kinds:
        time.sleep(rng.uniform(*PAUSES_S))
        name = kind
        if kind == "agent":
            wait_until(lambda goal=goal: done(system) >= goal, "items end between two kills of agents", UP_AGAIN_S)
            name = system.holder() or rng.choice(AGENTS)
        system.kill(name)
        killed[name] += 1
        if kind == "agent":
            goal = done(system) + DONE_BETWEEN
    return killed


def done(system: JobSystem) -> int:
    """Items that ended; -1 while the database is down."""
    try:
        with system.database() as database:
            row = database.execute("SELECT count(*) FROM jobs_item WHERE state = %s", (int(ItemState.DONE),)).fetchone()
    except psycopg.Error:
        return -1
    return row[0]


def unfinished(system: JobSystem) -> int:
    """Once the database tells; it may have been the last one that was killed."""
    wait_until(lambda: done(system) >= 0, "the database answers", UP_AGAIN_S)
    return FIRST_ITEMS + SECOND_ITEMS - done(system)


def seed_of_run() -> int:
    """Given by FLEXBAND_CHAOS_SEED to repeat a run, else a new one."""
    return int(os.environ.get("FLEXBAND_CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))


@dataclass
class Night:
    """What one run did and found. It is only made when every check held."""

    seed: int
    killed: dict[str, int]
    up_s: float
    kills_s: float
    again_s: float
    left: int
    done_s: float
    settled_s: float
    total_s: float
    efforts: dict[str, proof.Effort]
    unsettled_nanos: int
    verified: str
    money: money_proof.Money = field(default_factory=money_proof.Money)

    @property
    def kills(self) -> int:
        return sum(self.killed.values())

    def lines(self) -> list[str]:
        by_name = ", ".join(f"{name} {count}" for name, count in sorted(self.killed.items()))
        return [
            f"{self.kills} kills in {self.kills_s:.0f} s: {by_name}",
            f"up in {self.up_s:.0f} s; after the last kill all up in {self.again_s:.1f} s with {self.left:,} items to "
            f"go, done in {self.done_s:.1f} s, settled in {self.settled_s:.1f} s; {self.total_s:.0f} s in all",
            *(f"{name}: {effort.line()}" for name, effort in self.efforts.items()),
            f"charged and not counted by the hard budget: {self.unsettled_nanos:,} nanos",
            f"usage verify: {self.verified}",
            self.money.line(),
        ]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kills": self.kills}


def run_night(system: JobSystem, seed: int) -> Night:
    """Two batches, 25 kills, every check. Raises AssertionError for what does not hold."""
    rng, began = random.Random(seed), time.monotonic()
    system.start()
    client = system.client()
    jobs = {"first": names("first", FIRST_ITEMS), "second": names("second", SECOND_ITEMS)}
    up_s = time.monotonic() - began
    batches = {"first": submit(client, "first", jobs["first"])}
    kinds = victims(rng)
    with ThreadPoolExecutor(1) as pool:
        killed = kill_at_random(system, rng, kinds[:10])
        second: Future[str] = pool.submit(submit, client, "second", jobs["second"])
        killed += kill_at_random(system, rng, kinds[10:])
        batches["second"] = second.result(120)
    kills_s = time.monotonic() - began - up_s
    again_s = wait_until(system.all_ready, "everything is up again", UP_AGAIN_S)
    left = unfinished(system)
    done_s = wait_until(
        lambda: completed(client, batches.values()), "both batches are completed", DONE_S, every_s=LOOK_EVERY_S
    )
    with system.database() as database:
        settled_s = wait_until(
            lambda: not proof.stuck(database), lambda: f"nothing is stuck: {proof.stuck(database)}", SETTLED_S
        )
        efforts = check(system, client, database, batches, jobs)
        unsettled = proof.unsettled_nanos(database, TENANT)
        verified = verify(system)
        money = money_proof.check_money(system, database)
    return Night(
        seed, dict(killed), up_s, kills_s, again_s, left, done_s, settled_s, time.monotonic() - began, efforts,
        unsettled, verified, money,
    )  # fmt: skip


def completed(client: openai.OpenAI, batch_ids: Iterable[str]) -> bool:
    states = [client.batches.retrieve(batch_id).status for batch_id in batch_ids]
    assert not {"failed", "expired", "cancelled"} & set(states), states
    return set(states) == {"completed"}


def check(
    system: JobSystem,
    client: openai.OpenAI,
    database: psycopg.Connection,
    batches: dict[str, str],
    jobs: dict[str, list[str]],
) -> dict[str, proof.Effort]:
    wait_until(lambda: everything_reported(system), "the agents reported what their successors found", SETTLED_S)
    efforts = {}
    for name, custom_ids in jobs.items():
        job = proof.job_of_batch(database, batches[name])
        proof.check_items(database, job, len(custom_ids))
        proof.check_job(database, job, len(custom_ids))
        batch = client.batches.retrieve(batches[name])
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (len(custom_ids), len(custom_ids), 0)
        assert batch.error_file_id is None
        proof.check_output(client.files.content(batch.output_file_id).text, custom_ids, OUTPUT_TOKENS)
        efforts[name] = proof.effort(database, job)
    assert len(list(client.batches.list(limit=100))) == len(batches), "a submission was taken twice"
    proof.check_usage(database)
    return efforts


def everything_reported(system: JobSystem) -> bool:
    """Whether no agent has a record, its own or of a process before it, that the control plane has not taken."""
    unreported = gather(system.admin, "flexband_usage_records_unreported")
    return len(unreported) == len(AGENTS) and not any(unreported.values())


def verify(system: JobSystem) -> str:
    done = subprocess.run(
        python("manage.py", "usage", "verify"), cwd=ROOT, env=system.environment(), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()
