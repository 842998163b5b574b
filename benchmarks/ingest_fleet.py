"""The fleet and the traffic of the ingest benchmark: agents with keys, tenants with rates, seeded records."""

from __future__ import annotations

import random
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.http_load import Connection, request_bytes
from benchmarks.ingest_columns import COLUMNS
from controlplane.contracts.models import WorkloadClass
from controlplane.core.pricing import RateCard as Prices
from controlplane.core.pricing import charge
from controlplane.fleet.models import Agent, Pool, ServedModel, Slot
from controlplane.ledger.models import RateCard
from controlplane.tenants.models import Installation, Tenant
from controlplane.usage.models import AgentCursor
from controlplane.wire import packed, signing
from controlplane.wire.report import FLAG_STREAMED, SHARES_HEADER, Report, UsageRow

TENANTS, POOLS = 200, 8


@dataclass
class BenchAgent:
    id: int
    uuid: str
    pool_id: int
    slot_id: int
    key: Ed25519PrivateKey
    seq: int = 0


@dataclass
class Fleet:
    agents: list[BenchAgent]
    tenants: list[int]
    chat: int
    model: int
    prices: Prices
    random: random.Random = field(default_factory=lambda: random.Random(42))


def build_fleet(agents: int) -> Fleet:
    now = datetime.now(UTC)
    Installation.objects.get_or_create(pk=1, defaults={"name": "Benchmark"})
    model = ServedModel.objects.create(name="model")
    chat = WorkloadClass.objects.create(slug="chat", name="Chat", kind="interactive", created_at=now, updated_at=now)
    tenants = Tenant.objects.bulk_create(
        Tenant(slug=f"tenant-{n}", name=f"Tenant {n}", created_at=now, updated_at=now) for n in range(TENANTS)
    )
    card = RateCard.objects.create(
        class_slug="chat", model=model, effective_from=now, prompt_nanos_per_mtok=1_400_000_000,
        cached_nanos_per_mtok=260_000_000, output_nanos_per_mtok=4_400_000_000, created_at=now, created_by="benchmark",
    )  # fmt: skip
    pools = [
        Pool.objects.create(
            slug=f"pool-{n}", name=f"Pool {n}", model=model, gpu_type="GPU", created_at=now, updated_at=now
        )
        for n in range(POOLS)
    ]
    made = [_agent(pools[n % POOLS], n, now) for n in range(agents)]
    prices = Prices(1_400_000_000, 260_000_000, 4_400_000_000, 0, 0, card.pk)
    return Fleet(made, [tenant.pk for tenant in tenants], chat.pk, model.pk, prices)


def _agent(pool: Pool, number: int, now: datetime) -> BenchAgent:
    key = Ed25519PrivateKey.generate()
    row = Agent.objects.create(
        name=f"agent-{number}", pool=pool, state="active", public_key=key.public_key().public_bytes_raw(), epoch=1,
        enrolled_at=now,
    )  # fmt: skip
    slot = Slot.objects.create(pool=pool, agent=row, name=f"s{number}", band="interactive")
    AgentCursor.objects.create(agent_id=row.pk, epoch=1, updated_at=now)
    return BenchAgent(row.pk, str(row.uuid), pool.pk, slot.pk, key)


def usage_rows(fleet: Fleet, agent: BenchAgent, n: int) -> list[UsageRow]:
    """Completed streamed requests that ended within the last minute, tenants by a long-tailed choice."""
    rng, now_us = fleet.random, time.time_ns() // 1000
    rows = []
    for _ in range(n):
        prompt, output = (
            min(32_000, int(rng.lognormvariate(6.5, 1.2)) + 1),
            min(8_192, int(rng.lognormvariate(5, 1)) + 1),
        )
        cached, queue = int(prompt * rng.random()), int(rng.lognormvariate(9, 2))
        prefill, decode = int(rng.lognormvariate(11.5, 0.8)), output * rng.randrange(8_000, 30_000)
        tenant = fleet.tenants[min(TENANTS - 1, int(rng.paretovariate(0.7)) - 1)]
        lines = charge(fleet.prices, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output, gpu_us=0)
        ended = now_us - rng.randrange(60_000_000)
        rows.append(
            UsageRow(
                _uuid7(ended, rng),
                ended - prefill - decode - queue,
                ended,
                1,
                agent.slot_id,
                tenant,
                1,
                fleet.chat,
                fleet.chat,
                fleet.model,
                "",
                0,
                fleet.prices.rate_version,
                1,
                200,
                FLAG_STREAMED,
                prompt,
                cached,
                output,
                rng.randrange(40, 400),
                queue,
                0,
                rng.randrange(500, 2_000),
                prefill,
                decode,
                rng.randrange(50, 90),
                queue + prefill,
                decode // 8,
                decode // 9,
                lines.prompt_nanos,
                lines.cached_nanos,
                lines.output_nanos,
                0,
            )
        )
    return rows


def _uuid7(at_us: int, rng: random.Random) -> str:
    value = (at_us // 1000) << 80 | 0x7 << 76 | rng.getrandbits(12) << 64 | 0b10 << 62 | rng.getrandbits(62)
    return str(uuid.UUID(int=value))


def report_request(agent: BenchAgent, rows: list[UsageRow], lane: str) -> bytes:
    """The next report of an agent, signed, as the bytes of an HTTP request; `lane` is packed, msgpack or json."""
    agent.seq += 1
    body, content_type = report_body(agent, rows, lane)
    path = "/agent/v1/report"
    message = signing.request_message(method="POST", path=path, body=body, epoch=1, stamp=agent.seq)
    headers = {
        signing.AGENT_HEADER: agent.uuid,
        signing.EPOCH_HEADER: "1",
        signing.SEQ_HEADER: str(agent.seq),
        signing.SIGNATURE_HEADER: signing.to_text(signing.sign(agent.key, message)),
        "content-type": content_type,
        SHARES_HEADER: _NO_MARK,
    }
    return request_bytes("POST", path, body, headers)


def report_body(agent: BenchAgent, rows: list[UsageRow], lane: str) -> tuple[bytes, str]:
    """An agent's report in its present number, and its media type."""
    return _encoded(
        Report(
            layout=1, epoch=1, seq=agent.seq, sent_us=time.time_ns() // 1000, revision=0, live_number=0, records=rows
        ),
        lane,
    )


_NO_MARK = "0" * 16
_MARK_HERE = f"{SHARES_HEADER}: ".encode()
_MARK_TOLD = b',"shares_mark":"'


class ReportingConnection(Connection):
    """Says with each report which shares it was told last, as an agent does; with the first one it has none."""

    _mark = b""

    def as_sent(self, request: bytes) -> bytes:
        if not self._mark:
            return request
        at = request.index(_MARK_HERE) + len(_MARK_HERE)
        return request[:at] + self._mark + request[at + len(self._mark) :]

    def note(self, answer: bytes) -> None:
        # the last field
        before, _, mark = answer[-40:].rpartition(_MARK_TOLD)
        if before and len(mark) == len(_NO_MARK) + 2:
            self._mark = mark[: len(_NO_MARK)]


def _encoded(report: Report, lane: str) -> tuple[bytes, str]:
    if lane == "json":
        return msgspec.json.encode(report), "application/json"
    if lane == "msgpack":
        return msgspec.msgpack.encode(report), "application/msgpack"
    body = packed.pack(report)
    assert body is not None
    return body, packed.CONTENT_TYPE


_RENAMED = {"arrived_at": "arrived_us", "ended_at": "ended_us"}


def peer_request(agent: BenchAgent, rows: list[UsageRow]) -> bytes:
    """The same records as a list of JSON objects."""
    received = datetime.now(UTC).isoformat()
    given = {"received_at": received, "agent_id": agent.id, "pool_id": agent.pool_id, "job_id": 0}
    objects = []
    for row in rows:
        values = {}
        for name, _ in COLUMNS:
            value = given[name] if name in given else getattr(row, _RENAMED.get(name, name))
            values[name] = datetime.fromtimestamp(value / 1e6, UTC).isoformat() if name in _RENAMED else value
        objects.append(values)
    return request_bytes("POST", "/ingest", msgspec.json.encode(objects), {"content-type": "application/json"})
