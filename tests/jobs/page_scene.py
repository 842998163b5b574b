"""A pool with a history of loans and jobs in every standing: what the tests of pages look at."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from controlplane.core.batch_items import ItemState
from controlplane.fleet.models import SlotInterval, SlotTenure
from controlplane.jobs.models import Item, ItemResult, Job, JobProgress
from tests.jobs.batches import jsonl, line, running
from tests.world import World, build_world


@dataclass
class Scene:
    """`night` is half done on items of its own; `late` missed its deadline; `loop` is counted only."""

    world: World
    now: datetime
    night: Job
    late: Job
    loop: Job


def slots_with_loans(world: World, now: datetime) -> None:
    """Every slot at home for three hours; f6 was lent for an hour and came home, f7 is lent now."""
    start = now - timedelta(hours=3)
    for slot in world.slots:
        SlotTenure.objects.create(slot=slot, started_at=start)
        spans = {
            "f6": [("home", 180, 100), ("lent", 100, 40), ("draining", 40, 39), ("home", 39, None)],
            "f7": [("home", 180, 30), ("lent", 30, None)],
        }.get(slot.name, [("home", 180, None)])
        for state, began, ended in spans:
            SlotInterval.objects.create(
                slot=slot, state=state, owner_class="bulk" if state == "lent" else "", fence=1,
                started_at=now - timedelta(minutes=began),
                ended_at=None if ended is None else now - timedelta(minutes=ended),
            )  # fmt: skip


def counted_job(world: World, now: datetime, **values) -> Job:
    defaults = {
        "tenant": world.tenant, "workload_class": world.bulk, "pool": world.pool, "items": 4_000, "prompt_tokens": 900,
        "expected_output_tokens": 200, "deadline": now + timedelta(hours=6), "created_by": "key key-1",
        "created_at": now - timedelta(hours=2),
    }  # fmt: skip
    return Job.objects.create(**{**defaults, **values})


def settle(job: Job, lines: Iterable[int], parked: Mapping[int, str], now: datetime) -> None:
    """Items of these lines ended, those in `parked` for a reason: the rows that agents' results would leave."""
    chosen = list(lines)
    done = [number for number in chosen if number not in parked]
    rows = Item.objects.filter(day=job.day, job_id=job.pk)
    rows.filter(line__in=done).update(state=ItemState.DONE, attempt=1)
    for number, reason in parked.items():
        rows.filter(line=number).update(state=ItemState.PARKED, attempt=1, failures=1, reason=reason)
    ItemResult.objects.bulk_create(
        ItemResult(
            day=job.day, job_id=job.pk, line=number, attempt=1, agent_id=1, request_id=uuid.uuid4(), outcome=1,
            status=400 if number in parked else 200, finished_at=now,
            response=b"null" if number in parked else b'{"line":%d}' % number,
        )
        for number in chosen
    )  # fmt: skip
    job.refresh_from_db()
    job.items_completed += len(done)
    job.items_parked += len(parked)
    job.items_failed += len(parked)
    if job.items_completed + job.items_parked == job.items:
        job.state, job.finished_at = Job.State.COMPLETED, now
    job.save()


def sampled(job: Job, now: datetime, minutes: int) -> None:
    """A steady line of samples from so many minutes ago until now."""
    done = job.items_completed
    JobProgress.objects.bulk_create(
        JobProgress(
            job=job, minute=(at := now - timedelta(minutes=back)).replace(second=0, microsecond=0), at=at,
            items_completed=done * (minutes - back) // minutes, items_failed=0,
            items_parked=job.items_parked if back < minutes // 2 else 0, items_cancelled=0, gpu_us_done=0,
        )
        for back in range(minutes - 1, 0, -1)
    )  # fmt: skip


def build(now: datetime) -> Scene:
    world = build_world()
    slots_with_loans(world, now)
    content = jsonl([line(n) for n in range(1, 41)])
    night = running(world.tenant, content, now=now, deadline="06:00 Europe/Berlin", name="nightly summaries")
    settle(
        night,
        range(1, 24),
        {3: "context_length_exceeded: the prompt has 9,000 tokens", 8: "three attempts failed"},
        now,
    )
    Job.objects.filter(pk=night.pk).update(
        created_at=now - timedelta(hours=2), first_attempt_at=now - timedelta(minutes=110), gpu_us_done=21 * 1_700_000
    )
    night.refresh_from_db()
    sampled(night, now, 110)
    late = counted_job(world, now, name="evaluation of the week", deadline=now - timedelta(minutes=12),
                       items_completed=3_100, gpu_us_done=3_100 * 1_500_000,
                       first_attempt_at=now - timedelta(hours=1))  # fmt: skip
    loop = counted_job(world, now, name="embeddings", items=1_000_000, items_completed=120_000, items_failed=312,
                       gpu_us_done=120_000 * 40_000, first_attempt_at=now - timedelta(hours=1))  # fmt: skip
    counted_job(world, now, name="", deadline=None, items=50)
    counted_job(world, now, name="yesterday", state="completed", items=500, items_completed=500,
                finished_at=now - timedelta(hours=1), gpu_us_done=500 * 900_000)  # fmt: skip
    counted_job(world, now, name="wrong input", state="cancelled", items=500, items_completed=20,
                finished_at=now - timedelta(hours=1))  # fmt: skip
    return Scene(world=world, now=now, night=night, late=late, loop=loop)
