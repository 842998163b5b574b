"""What may be done to batches, at once: everybody locks a batch, then items, then the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from controlplane.jobs import actions, batch_actions, batch_sweep
from controlplane.jobs.models import Batch, Item, Job
from tests.jobs.batches import ADA, empty_items, running
from tests.jobs.settling import run_all
from tests.world import build_world

WAIT_S = 60


@pytest.fixture
def world(transactional_db, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    empty_items()
    return build_world()


def cancel_job(job: Job) -> None:
    actions.cancel_job(job_uuid=job.uuid, actor=ADA, now=timezone.now())


def cancel_batch(job: Job) -> None:
    batch_actions.cancel_batch(batch_id=job.batch.pk, actor=ADA, now=timezone.now())


def extend(job: Job) -> None:
    later = job.deadline + timedelta(hours=1)
    batch_actions.extend_deadline(job_uuid=job.uuid, deadline=later, actor=ADA, now=timezone.now())


def retry(job: Job) -> None:
    batch_actions.retry_parked(job_uuid=job.uuid, actor=ADA, now=timezone.now())


def begun_and_blocked(act: Callable[[Job], None], job: Job) -> threading.Thread:
    """The action in a thread of its own, which waits for a lock when this returns."""
    backend: list[int] = []

    def work() -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                backend.append(cursor.fetchone()[0])
            act(job)
        finally:
            connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_locks WHERE pid = ANY(%s) AND NOT granted", (list(backend),))
            if cursor.fetchone():
                return thread
        time.sleep(0.02)
    raise AssertionError("it waits for nobody")


@pytest.mark.parametrize("act", [cancel_job, cancel_batch, extend, retry])
def test_who_waits_for_a_batch_holds_nothing_of_its_job(world, act):
    job = running(world.tenant, 2)
    with transaction.atomic():
        Batch.objects.select_for_update().get(job=job)
        thread = begun_and_blocked(act, job)
        Job.objects.select_for_update(nowait=True).get(pk=job.pk)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_who_waits_for_items_holds_nothing_of_their_job(world):
    """A result that comes late holds its item, then waits for the job: so must who tries the item again."""
    job = running(world.tenant, 2)
    run_all(world, parked={1: "bad"})
    with transaction.atomic():
        list(Item.objects.filter(job_id=job.pk, line=1).select_for_update())
        thread = begun_and_blocked(retry, job)
        Job.objects.select_for_update(nowait=True).get(pk=job.pk)
    thread.join(WAIT_S)
    job.refresh_from_db()
    assert (job.state, job.items_parked, job.items_completed) == ("running", 0, 1)


def test_a_job_that_is_tried_again_after_its_time_has_a_day_for_it(world):
    long_ago = timezone.now() - timedelta(hours=30)
    job = running(world.tenant, 3, now=long_ago)
    run_all(world, parked={2: "bad"})
    now = timezone.now()
    assert batch_actions.retry_parked(job_uuid=job.uuid, actor=ADA, now=now) == 1
    assert batch_sweep.expire(now) == 0
    assert Batch.objects.get().expires_at == now + timedelta(hours=24)
    assert batch_sweep.expire(now + timedelta(hours=24)) == 1
    soon = running(world.tenant, 1, deadline=(now + timedelta(hours=40)).isoformat(), name="soon")
    run_all(world, parked={1: "bad"})
    batch_actions.retry_parked(job_uuid=soon.uuid, actor=ADA, now=now)
    assert Batch.objects.get(job=soon).expires_at == soon.deadline
