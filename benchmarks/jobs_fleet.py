"""The fleet, the file and the null agents of the job benchmark."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from benchmarks.http_load import request_bytes
from benchmarks.ingest_fleet import BenchAgent, _agent
from controlplane.wire import signing
from controlplane.wire.report import Answer, Item, ItemDone, ItemRoom, Report, UsageRow

MODEL = "bench-8b"
_answers = msgspec.json.Decoder(Answer)
_SENTENCE = "The quarterly report of the northern plant lists pumps, valves and their hours since the last service. "


@dataclass
class JobFleet:
    agents: list[BenchAgent]
    secret: str
    tenant: int
    bulk: int
    model: int


def build(agents: int) -> JobFleet:
    """A pool with agents, a batch class and a tenant with a key; days of items are made."""
    from django.db import connection
    from django.utils import timezone

    from controlplane.audit.actors import Actor
    from controlplane.contracts.models import WorkloadClass
    from controlplane.fleet.models import Pool, ServedModel
    from controlplane.jobs.item_partitions import create_days_ahead
    from controlplane.tenants.key_actions import create_key
    from controlplane.tenants.models import Installation, Tenant
    from controlplane.usage.partitions import create_days, days_ahead

    now = timezone.now()
    Installation.objects.get_or_create(pk=1, defaults={"name": "Benchmark"})
    model = ServedModel.objects.create(name=MODEL)
    made = {"created_at": now, "updated_at": now}
    WorkloadClass.objects.create(slug="chat", name="Chat", kind="interactive", **made)
    bulk = WorkloadClass.objects.create(slug="bulk", name="Bulk", kind="batch", **made)
    tenant = Tenant.objects.create(slug="night", name="Night", classes=["bulk"], **made)
    pool = Pool.objects.create(
        slug="pool", name="Pool", model=model, gpu_type="GPU", interactive_class="chat", batch_class="bulk", **made
    )
    actor = Actor.system("benchmark")
    key = create_key(tenant_id=tenant.pk, name="b", classes=["bulk"], default_class="bulk", actor=actor, now=now)
    with connection.cursor() as cursor:
        create_days_ahead(cursor, now)
        create_days(cursor, days_ahead(now))
    return JobFleet([_agent(pool, n, now) for n in range(agents)], key.secret, tenant.pk, bulk.pk, model.pk)


def lines(items: int) -> Iterator[bytes]:
    """The lines of a batch file, about 400 bytes each."""
    for number in range(1, items + 1):
        text = f"Document {number}. " + _SENTENCE * (1 + number % 3)
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 64}
        row = {"custom_id": f"doc-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        yield json.dumps(row).encode() + b"\n"


@dataclass
class NullAgent:
    """Leases what it has room for and answers it at once; every item comes back with its usage record."""

    fleet: JobFleet
    agent: BenchAgent
    room: int
    done: int = 0
    through: int = 0
    held: list[Item] = field(default_factory=list)
    uuids: dict[int, str] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)

    async def run(self, port: int, until: float) -> None:
        """Reports until nothing was leased for a while, or `until` on the monotonic clock."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        idle = 0
        try:
            while idle < 5 and time.monotonic() < until:
                began = time.perf_counter()
                answer = await self._report(reader, writer)
                self.latencies_ms.append((time.perf_counter() - began) * 1000)
                self.uuids |= {job.job_id: job.uuid for job in answer.item_jobs}
                self.held = answer.items
                if answer.items:
                    self.through = answer.items[-1].fence
                    idle = 0
                else:
                    idle += 1
                    await asyncio.sleep(0.05)
        finally:
            writer.close()

    async def _report(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        writer.write(self._bytes())
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        body = await reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{head!r} {body[:300]!r}")
        return _answers.decode(body)

    def _bytes(self) -> bytes:
        agent = self.agent
        agent.seq += 1
        ends, records = [], []
        now_us = time.time_ns() // 1000
        for item in self.held:
            request = str(uuid.UUID(int=(now_us // 1000) << 80 | 0x7 << 76 | 0b10 << 62 | item.fence))
            response = b'{"id":"cmpl-%d","choices":[{"message":{"content":"pump"}}]}' % item.fence
            ends.append(ItemDone(item.job_id, item.line, item.attempt, item.fence, request, 1, 200, Raw(response)))
            records.append(self._record(item, request, now_us))
        self.done += len(self.held)
        report = Report(
            layout=1, epoch=1, seq=agent.seq, sent_us=now_us, revision=0, live_number=0, records=records,
            items_done=ends, item_room=[ItemRoom(self.fleet.bulk, self.room)], items_through=self.through,
        )  # fmt: skip
        return _signed(agent, msgspec.json.encode(report))

    def _record(self, item: Item, request: str, now_us: int) -> UsageRow:
        return UsageRow(
            request, now_us - 1_000, now_us, item.attempt, self.agent.slot_id, self.fleet.tenant, 1, self.fleet.bulk,
            self.fleet.bulk, self.fleet.model, self.uuids[item.job_id], 0, 0, 1, 200, 0, item.prompt_tokens, 0, 1, 10,
            10, 0, 10, 100, 100, 10, -1, 200, 200, 0, 0, 0, 0,
        )  # fmt: skip


def _signed(agent: BenchAgent, body: bytes) -> bytes:
    path = "/agent/v1/report"
    message = signing.request_message(method="POST", path=path, body=body, epoch=1, stamp=agent.seq)
    headers = {
        signing.AGENT_HEADER: agent.uuid,
        signing.EPOCH_HEADER: "1",
        signing.SEQ_HEADER: str(agent.seq),
        signing.SIGNATURE_HEADER: signing.to_text(signing.sign(agent.key, message)),
        "content-type": "application/json",
    }
    return request_bytes("POST", path, body, headers)
