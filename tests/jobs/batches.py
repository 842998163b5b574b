"""A fleet with agents that lease items, and batches to lease from: what the tests of items share."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import connection
from django.utils import timezone
from msgspec import Raw

from controlplane.audit.actors import Actor
from controlplane.jobs import batch_import, storage
from controlplane.jobs.batch_actions import BatchOrder, submit_batch
from controlplane.jobs.models import Batch, Item, Job, StoredFile
from controlplane.jobs.uploads import file_expiry
from controlplane.wire.report import Item as LeasedItem
from controlplane.wire.report import ItemDone, ItemRoom
from tests.usage_rows import usage_row

ADA = Actor(id=None, name="ada", role="admin")
ITEM_TABLES = "jobs_item, jobs_itembody, jobs_itemresult, usage_record"


def empty_items() -> None:
    """The tables that Django's flush does not know, because they are partitioned."""
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {ITEM_TABLES}")


def line(number: int, *, model: str = "llama-70b", **changes) -> dict:
    """A line of a batch file; `changes` replace its fields, `body` is merged."""
    body = {"model": model, "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 16}
    body |= changes.pop("body", {})
    return {"custom_id": f"doc-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body, **changes}


def jsonl(lines: Sequence[dict | str]) -> bytes:
    return b"".join((each if isinstance(each, str) else json.dumps(each)).encode() + b"\n" for each in lines)


def stored_file(tenant, content: bytes, name: str = "night.jsonl", now: datetime | None = None) -> StoredFile:
    now = now or timezone.now()
    path = f"{tenant.pk}/{uuid.uuid4()}"
    with storage.Writing(path) as writing:
        writing.write(content)
        written = writing.finish()
    return StoredFile.objects.create(
        tenant=tenant, purpose="batch", filename=name, path=path, size_bytes=written.size_bytes, lines=written.lines,
        digest=written.digest, created_by="ada", created_at=now, ready_at=now, expires_at=file_expiry(now),
    )  # fmt: skip


def submit(tenant, content: bytes | int, *, key=None, now=None, **metadata: str) -> Batch:
    """A batch of lines, or of so many good ones, not yet imported."""
    now = now or timezone.now()
    content = jsonl([line(n) for n in range(1, content + 1)]) if isinstance(content, int) else content
    stored = stored_file(tenant, content, now=now)
    order = BatchOrder(
        input_file_id=f"file-{stored.uuid.hex}", endpoint="/v1/chat/completions", metadata=metadata or None
    )
    return submit_batch(tenant=tenant, key=key, order=order, actor=ADA, now=now)


def running(tenant, content: bytes | int, *, key=None, now=None, **metadata: str) -> Job:
    """The job of a batch that was imported."""
    batch = submit(tenant, content, key=key, now=now, **metadata)
    assert not batch_import.import_batch(batch.pk, now or timezone.now())
    batch.refresh_from_db()
    assert batch.state == "in_progress", batch.errors
    return batch.job


def states(job: Job) -> dict[int, int]:
    return dict(Item.objects.filter(job_id=job.pk).order_by("line").values_list("line", "state"))


@dataclass
class Worker:
    """Leases and settles for one agent of the exchange's tests, as an agent would: through reports."""

    world: object
    agent: object
    through: int = 0
    held: dict[int, LeasedItem] = field(default_factory=dict)
    jobs: dict[int, str] = field(default_factory=dict)

    def room(self, items: int) -> list[ItemRoom]:
        return [ItemRoom(self.world.bulk.pk, items)]

    async def ask(self, items: int, **parts):
        answer = await self.agent.report(item_room=self.room(items), items_through=self.through, **parts)
        self.take(answer)
        return answer

    def take(self, answer) -> None:
        self.jobs |= {job.job_id: job.uuid for job in answer.item_jobs}
        for item in answer.items:
            assert item.fence > self.through
            self.through = item.fence
            self.held[item.fence] = item

    def done(self, item: LeasedItem, *, outcome=1, status=200, response=b'{"ok":true}', reason="", lease=0, **row):
        """What a report says of an ended attempt: (the item's end, its usage record)."""
        request = str(uuid.uuid4())
        record = usage_row(
            self.world, prices=self.world.bulk_prices, request_id=request, job=self.jobs[item.job_id],
            class_id=self.world.bulk.pk, asked_class_id=self.world.bulk.pk, attempt=item.attempt,
            outcome=outcome, status=status, **row,
        )  # fmt: skip
        end = ItemDone(
            item.job_id, item.line, item.attempt, item.fence, request, outcome, status, Raw(response), reason, lease
        )
        return end, record

    def finish(self, items: Sequence[LeasedItem] | None = None, **how) -> dict:
        """The parts of a report that ends these items (all that are held)."""
        ended = [self.done(item, **how) for item in (list(self.held.values()) if items is None else items)]
        for end, _ in ended:
            self.held.pop(end.fence, None)
        return {"items_done": [end for end, _ in ended], "records": [record for _, record in ended]}


@contextmanager
def counted_seconds(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"\n  {what}: {time.perf_counter() - began:.2f} s")


def later(seconds: float) -> datetime:
    return timezone.now() + timedelta(seconds=seconds)
