"""kill -9 of Celery workers at random points of rollouts: every intent is applied exactly once.

    FLEXBAND_ROLLOUT_KILLS=100 python -m pytest tests/chaos/test_rollout_kills.py

A real worker takes the doorbells of pushes and sweeps; its children are killed, and now and then all of it. Simulated
agents apply what is desired of them and acknowledge; one refuses now and then: those rollouts roll back by themselves.
"""

import contextlib
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec
import psutil
import pytest
from celery import current_app
from django.conf import settings
from django.db import connection
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.audit.queries import verify_chain
from controlplane.fleet.models import Agent
from controlplane.policy.actions import push
from controlplane.policy.ingest import note_revisions
from controlplane.policy.models import Delivery, LiveEntry, PolicyBundle, Revision, Rollout, Wave
from controlplane.policy.queries import desired_for, signing_keys
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.wire.policy import PolicyDocument, policy_message
from controlplane.wire.signing import digest_hex, from_text, verify
from tests.policy.conftest import api_key, make_fleet

pytestmark = [pytest.mark.processes, pytest.mark.slow]

KILLS = int(os.environ.get("FLEXBAND_ROLLOUT_KILLS", "25"))
AGENTS, SEED, QUEUE = 8, 20_261_201, "flexband"
WITHIN_S, START_WITHIN_S = 120.0, 240.0
ALL_OF_IT_EVERY = 10
SWEEP_EVERY_S = 0.5
ADA = Actor(id=None, name="ada", role="admin")


class Worker:
    """A Celery worker: a parent that takes doorbells and two children that work them off. Either may be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.start()

    def start(self) -> None:
        address = urlsplit(os.environ["DATABASE_URL"])
        environment = {
            **os.environ,
            "DATABASE_URL": urlunsplit(address._replace(path=f"/{connection.settings_dict['NAME']}")),
            "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
            "CELERY_BROKER_URL": settings.CELERY_BROKER_URL,
            "FLEXBAND_SIGNING_KEYS": str(settings.SIGNING_KEY_DIR),
            "FLEXBAND_VAR_DIR": str(self.folder),
        }
        self.log = self.folder / f"worker-{self.started}.log"
        command = [sys.executable, "-m", "celery", "--skip-checks", "-A", "controlplane.config.celery", "worker"]
        command += ["-P", "prefork", "-c", "2", "-Q", QUEUE, "-l", "info", "-n", f"w{self.started}@kills"]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=Path(__file__).parents[2], env=environment, stdout=out, stderr=out
            )
        self.started += 1
        deadline = time.monotonic() + START_WITHIN_S
        while b" ready." not in self.log.read_bytes():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3_000:]
            time.sleep(0.05)

    @property
    def at_work(self) -> bool:
        said = self.log.read_text()
        return said.count(" received") > said.count(" succeeded") + said.count("WorkerLostError(")

    def kill_a_child(self, chance: random.Random) -> bool:
        """Whether one was at work when it was killed; the parent makes another and rings again for what was cut off."""
        at_work = self.at_work
        deadline = time.monotonic() + START_WITHIN_S
        while not (children := psutil.Process(self.process.pid).children()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3_000:]
            time.sleep(0.005)
        with contextlib.suppress(psutil.NoSuchProcess):
            chance.choice(children).kill()
        return at_work

    def kill(self) -> bool:
        """All of it, as a host that loses its power."""
        at_work = self.at_work
        children = psutil.Process(self.process.pid).children()
        self.process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait()
        return at_work

    def check(self) -> None:
        """Nothing failed but what was killed."""
        for log in self.folder.glob("worker-*.log"):
            failed = set(re.findall(r"^([\w.]+(?:Error|Exception|Missing))\b", log.read_text(), flags=re.M))
            assert failed <= {"billiard.exceptions.WorkerLostError"}, failed


class Fleet:
    """Agents that apply what is desired of them, once per revision, and refuse what says so."""

    def __init__(self) -> None:
        self.ids = list(Agent.objects.order_by("name").values_list("pk", flat=True))
        self.applied = dict.fromkeys(self.ids, 0)
        self.times: Counter[tuple[int, int]] = Counter()
        self.refusing: set[int] = set()
        self.refused: set[int] = set()

    def beat(self) -> bool:
        """Whether an agent answered what it had not answered before: then a sweep has something to do."""
        before = len(self.times), len(self.refused)
        with connection.cursor() as cursor:
            wanted = desired_for(cursor, self.ids)
            rows = []
            for agent, (revision, _) in wanted.items():
                assert revision >= self.applied[agent], "an agent is asked to go back"
                if revision in self.refusing and agent == self.ids[0]:
                    self.refused.add(revision)
                    rows.append((agent, self.applied[agent], revision, "no room"))
                    continue
                if revision > self.applied[agent]:
                    self.times[agent, revision] += 1
                    self.applied[agent] = revision
                rows.append((agent, self.applied[agent], None, ""))
            note_revisions(cursor, rows, timezone.now())
        return before != (len(self.times), len(self.refused))


def ring(task: str, **values) -> None:
    current_app.send_task(task, kwargs=values, queue=QUEUE)


def waiting() -> int:
    """Doorbells that no worker took yet."""
    with current_app.connection_for_read() as held:
        return int(held.default_channel.client.llen(QUEUE))


def settled(fleet: Fleet) -> bool:
    newest = Revision.objects.latest("number")
    over = Rollout.objects.get(revision=newest).state == Rollout.State.DONE
    return over and all(revision == newest.number for revision in fleet.applied.values())


def story(worker: Worker) -> str:
    """What a rollout that does not end looks like."""
    rows = Rollout.objects.order_by("-pk").values_list("revision_id", "state", "note")[:3]
    states = [list(row.deliveries.values_list("wave", "state")) for row in Rollout.objects.order_by("-pk")[:2]]
    return "\n".join([str(list(rows)), str(states), worker.log.read_text()[-3_000:]])


def one_rollout(number: int, fleet: Fleet, chance: random.Random, worker: Worker) -> bool:
    """A push in waves that is pushed on by sweeps while a worker is killed at a random instant; until it is over.

    Returns whether the worker was at work when it was killed.
    """
    Tenant.objects.filter(slug="acme").update(weight=number + 2)
    api_key(Tenant.objects.get(slug="acme"), number=number + 1, live_number=0)
    revision = push(actor=ADA, reason=f"rollout {number}", now=timezone.now(), waves=(25, 50, 100))
    if number % 4 == 3:
        fleet.refusing.add(revision.number)
    ring("policy.push", rollout_id=revision.rollout.pk)
    kill_at = time.monotonic() + chance.choice((chance.uniform(0, 0.08), chance.uniform(0, 1.2)))
    deadline = time.monotonic() + WITHIN_S
    killed, at_work, swept = False, False, 0.0
    while not (killed and settled(fleet)):
        assert time.monotonic() < deadline, story(worker)
        # A worker that sweeps without a pause takes the machine from what it sweeps for.
        if (fleet.beat() or time.monotonic() - swept >= SWEEP_EVERY_S) and not waiting():
            swept = time.monotonic()
            ring("policy.sweep")
        pause_until = time.monotonic() + 0.1
        while (now := time.monotonic()) < pause_until:
            if not killed and now >= kill_at:
                killed = True
                if number % ALL_OF_IT_EVERY == ALL_OF_IT_EVERY // 2:
                    at_work = worker.kill()
                    worker.start()
                    deadline = time.monotonic() + WITHIN_S
                else:
                    at_work = worker.kill_a_child(chance)
            time.sleep(0.005)
    return at_work


def test_killed_workers_leave_every_intent_applied_exactly_once(transactional_db, tmp_path, capsys, settings):
    settings.SIGNING_KEY_DIR = tmp_path / "keys"
    make_fleet(AGENTS)
    fleet, chance, at_work = Fleet(), random.Random(SEED), 0
    worker = Worker(tmp_path)
    began = time.monotonic()
    try:
        for number in range(KILLS):
            at_work += one_rollout(number, fleet, chance, worker)
        ring("policy.sweep")
        deadline = time.monotonic() + WITHIN_S
        while LiveEntry.objects.count() < ApiKey.objects.count():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        worker.kill()
    worker.check()
    check(fleet)
    with capsys.disabled():
        rolled_back = Revision.objects.exclude(rolls_back_to=None).count()
        print(f"\n  {KILLS} kills, {at_work} of a worker at work, in {time.monotonic() - began:.0f} s:"
              f" {Revision.objects.count()} revisions, {rolled_back} rolled back by themselves,"
              f" {sum(fleet.times.values())} applications, each once")  # fmt: skip
    assert at_work, "no kill hit a worker at work"


def check(fleet: Fleet) -> None:
    """Every push, signature, wave, delivery, application, rollback and audit entry is there exactly once."""
    assert set(fleet.times.values()) == {1}, "an agent applied a revision twice"
    pushed = Revision.objects.filter(rolls_back_to=None)
    assert pushed.count() == KILLS
    stopped = Rollout.objects.filter(state=Rollout.State.STOPPED)
    assert {row.revision_id for row in stopped} == fleet.refusing
    backs = list(Revision.objects.exclude(rolls_back_to=None))
    assert Counter(row.rolls_back_from for row in backs) == Counter(dict.fromkeys(fleet.refusing, 1))
    for back in backs:
        assert back.digest == Revision.objects.get(number=back.rolls_back_to).digest
        assert back.rolls_back_to not in fleet.refusing
    assert Rollout.objects.exclude(state=Rollout.State.STOPPED).exclude(state=Rollout.State.DONE).count() == 0
    entries = Counter(AuditEntry.objects.filter(noun="revision").values_list("action", "object_id"))
    assert entries == Counter(
        {("policy.push", str(row.number)): 1 for row in pushed}
        | {("policy.rollback", str(row.number)): 1 for row in backs}
    )
    assert verify_chain().broken_at is None
    check_signatures()
    for rollout in Rollout.objects.filter(state=Rollout.State.DONE):
        assert set(rollout.waves.values_list("state", flat=True)) == {Wave.State.SENT}
        deliveries = list(rollout.deliveries.values_list("agent_id", "state"))
        assert sorted(agent for agent, _ in deliveries) == sorted(fleet.ids)
        assert {state for _, state in deliveries} == {Delivery.State.ACKED}
        sent = dict(rollout.waves.values_list("number", "sent_at"))
        # a wave is opened once: its deliveries carry its one instant
        assert {(row.wave, row.sent_at) for row in rollout.deliveries.all()} <= set(sent.items())
    subjects = LiveEntry.objects.filter(kind="key").values_list("subject", flat=True)
    assert sorted(subjects) == sorted(str(pk) for pk in ApiKey.objects.values_list("pk", flat=True))


def check_signatures() -> None:
    keys = signing_keys()
    for bundle in PolicyBundle.objects.select_related("revision", "pool"):
        body = bytes(bundle.body)
        assert digest_hex(body) == bundle.digest
        document = msgspec.json.decode(body, type=PolicyDocument)
        message = policy_message(
            installation=document.installation, pool=bundle.pool.slug, revision=bundle.revision_id,
            digest=bundle.digest, accept_until=document.accept_until,
        )  # fmt: skip
        assert verify(from_text(keys[f"policy:{bundle.kid}"]), bytes(bundle.signature or b""), message)
