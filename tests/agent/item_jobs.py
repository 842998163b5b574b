"""Jobs whose items real agents run, and what became of them: shared by the tests of items with a control plane."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from django.db import connection
from django.utils import timezone

from controlplane.jobs.item_sweep import sweep_items
from controlplane.jobs.models import Job
from controlplane.wire.report import FLAG_NOT_CHARGED
from tests.agent import control_planes as cp
from tests.jobs.batches import jsonl, line, running


@cp.in_database
def job_of(world, items: int, *, first: int = 1, key: bool = True, metadata=None, **body) -> Job:
    """A running job of so many short items."""
    content = jsonl([line(number, body=body) for number in range(first, first + items)])
    return running(world.tenant, content, key=world.key if key else None, **(metadata or {}))


@cp.in_database
def state_of(job: Job) -> tuple[str, int, int, int]:
    """(state, completed, parked, cancelled) of a job."""
    row = Job.objects.get(pk=job.pk)
    return row.state, row.items_completed, row.items_parked, row.items_cancelled


@cp.in_database
def item_states(job: Job) -> Counter:
    with connection.cursor() as cursor:
        cursor.execute("SELECT state, count(*) FROM jobs_item WHERE job_id = %s GROUP BY 1", (job.pk,))
        return Counter(dict(cursor.fetchall()))


async def completed(job: Job, count: int) -> bool:
    return (await state_of(job))[1] >= count


@dataclass(frozen=True)
class Account:
    """Of one job: lines with a result, its results by the request that brought them, charged records by request."""

    lines: list[int]
    results: list[str]
    charged: list[str]
    free: int
    charge_nanos: int


@cp.in_database
def account_of(job: Job) -> Account:
    with connection.cursor() as cursor:
        cursor.execute("SELECT line, request_id::text FROM jobs_itemresult WHERE job_id = %s ORDER BY line", (job.pk,))
        results = cursor.fetchall()
        lines = "charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos"
        cursor.execute(f"SELECT request_id::text, flags, {lines} FROM usage_record WHERE job_id = %s", (job.pk,))
        records = cursor.fetchall()
    charged = [request for request, flags, _ in records if not flags & FLAG_NOT_CHARGED]
    return Account(
        [number for number, _ in results],
        [request for _, request in results],
        charged,
        len(records) - len(charged),
        sum(nanos for *_, nanos in records),
    )


async def assert_each_once(job: Job, items: int) -> Account:
    """Every item has exactly one result and one charge, that of the request which brought the result."""
    account = await account_of(job)
    assert account.lines == list(range(1, items + 1))
    assert sorted(account.results) == sorted(account.charged)
    assert len(set(account.charged)) == items
    row = await cp.in_database(Job.objects.get)(pk=job.pk)
    assert row.charge_nanos == account.charge_nanos > 0
    return account


@asynccontextmanager
async def sweeping(every_s: float = 0.5) -> AsyncIterator[None]:
    """What the worker's beat does for items."""

    async def sweep() -> None:
        while True:
            await cp.in_database(sweep_items)(timezone.now())
            await asyncio.sleep(every_s)

    task = asyncio.create_task(sweep())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
