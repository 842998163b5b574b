"""The control plane's side of an agent under load: it signs one policy for many tenants and takes every report.

    python -m benchmarks.agent_control '{"port": 8000, "tenants": 1000, "places": 256, ...}'

Real bytes of the protocol, without the database behind them: enrolment, hello, the signed bundle, the live list with a
key per tenant, leases, and answers to reports, whose records are decoded and counted. `GET /counts` tells the counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from dataclasses import dataclass, field

import msgspec
import uvloop
from aiohttp import web

from controlplane.core.reasons import Outcome
from controlplane.wire.enrolment import Enrolled, Helloed
from controlplane.wire.lease import LeaseAnswer
from controlplane.wire.packed import FORM, read_report
from controlplane.wire.policy import LiveKey, PolicyDocument
from controlplane.wire.report import Answer, Lease, LiveDelta, Report
from tests.agent import worlds

SLOTS = 4
MANY = 1 << 40
COMPLETED = Outcome.COMPLETED.code
LEASED_EVERY = 10
"""One tenant in so many has a hard budget, which it spends from a lease."""


class World(msgspec.Struct):
    """What the agent is told: how many tenants it serves, and how much of them at once."""

    port: int
    tenants: int = 1_000
    places: int = 256
    max_queue: int = 1_024
    max_wait_ms: int = 60_000
    interval_ms: int = 1_000


@dataclass
class Counts:
    """What reports brought."""

    reports: int = 0
    records: int = 0
    completed: int = 0
    distinct: int = 0
    charged_nanos: int = 0
    refused: int = 0
    queue_depth_max: int = 0
    report_bytes: int = 0
    trouble: list[str] = field(default_factory=list)


def secret_of(number: int) -> str:
    """The API key of a tenant; tenants count from 1."""
    return f"fb_bench_{number:06d}_{hashlib.sha256(str(number).encode()).hexdigest()[:24]}"


def document(world: World) -> PolicyDocument:
    """One pool, two classes, two contracts, and every tenant with limits of its own."""
    classes = [
        worlds.class_policy(max_queue=world.max_queue, max_wait_ms=world.max_wait_ms, max_prompt_tokens=100_000),
        worlds.class_policy("bulk", kind="batch", max_queue=world.max_queue),
    ]
    tenants = [
        worlds.tenant_policy(
            f"t{number:06d}",
            id=number,
            weight=1 + number % 4,
            max_concurrency=512,
            hard_budget=number % LEASED_EVERY == 0,
        )
        for number in range(1, world.tenants + 1)
    ]
    slots = [worlds.slot(number, places=world.places // SLOTS, kv_tokens=MANY) for number in range(1, SLOTS + 1)]
    return worlds.document(classes=classes, tenants=tenants, pool={"slots": slots})


def keys(world: World) -> list[LiveKey]:
    return [
        worlds.live_key(
            number,
            id=number,
            public_id=f"k{number}",
            tenant_id=number,
            hashes=[hashlib.sha256(secret_of(number).encode()).hexdigest()],
            max_concurrency=512,
            requests_per_s=1e6,
            tokens_per_minute=1 << 40,
        )
        for number in range(1, world.tenants + 1)
    ]


class ControlPlane:
    """Answers one agent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts = Counts()
        self.seen: set[int] = set()
        self.bundle, self.digest = worlds.bundle(document(world))
        self.live = worlds.delta(*keys(world), full=True)
        expires_us = time.time_ns() // 1000 + 86_400_000_000
        self.leases = [
            Lease(number, number, MANY, expires_us) for number in range(LEASED_EVERY, world.tenants + 1, LEASED_EVERY)
        ]

    async def enrol(self, request: web.Request) -> web.Response:
        trust = worlds.trust()
        return _json(Enrolled("bench", worlds.AGENT_ID, trust.pool, trust.installation, dict(trust.signing_keys), True))

    async def hello(self, request: web.Request) -> web.Response:
        trust = worlds.trust()
        return _json(
            Helloed(
                1,
                worlds.AGENT_ID,
                trust.pool,
                trust.installation,
                dict(trust.signing_keys),
                {},
                self.world.interval_ms,
                time.time_ns() // 1000,
                report_forms=[FORM],
            )
        )

    async def report(self, request: web.Request) -> web.Response:
        body = await request.read()
        report = read_report(body)
        self._count(report, len(body))
        live = None
        if report.live_number < self.live.through:
            live = LiveDelta(0, self.live.through, True, self.live.entries)
        return _json(
            Answer(
                report.seq,
                False,
                1,
                self.digest,
                self.world.interval_ms,
                time.time_ns() // 1000,
                1,
                leases=self.leases,
                live=live,
            )
        )

    def _count(self, report: Report, size: int) -> None:
        counts = self.counts
        counts.reports += 1
        counts.report_bytes += size
        counts.records += len(report.records)
        counts.refused += sum(row.count for row in report.refusals)
        for row in report.records:
            counts.completed += row.outcome == COMPLETED
            # Ids are UUIDv7: 64 bits of one are as distinct as it is, and a million of them fit.
            self.seen.add(int(row.request_id[14:].replace("-", "")[:16], 16))
            counts.charged_nanos += row.charge_prompt_nanos + row.charge_output_nanos
        counts.distinct = len(self.seen)
        if report.figures is not None:
            for live in report.figures.classes:
                counts.queue_depth_max = max(counts.queue_depth_max, live.depth)
        if report.refused_reason:
            counts.trouble.append(report.refused_reason)

    async def policy(self, request: web.Request) -> web.Response:
        return web.Response(body=self.bundle)

    async def lease(self, request: web.Request) -> web.Response:
        await request.read()
        return _json(LeaseAnswer(self.leases))

    async def told(self, request: web.Request) -> web.Response:
        return _json(self.counts)


def _json(message: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")


async def main(world: World) -> None:
    plane = ControlPlane(world)
    application = web.Application(client_max_size=64 << 20)
    application.router.add_post("/agent/v1/enrol", plane.enrol)
    application.router.add_post("/agent/v1/hello", plane.hello)
    application.router.add_post("/agent/v1/report", plane.report)
    application.router.add_post("/agent/v1/lease", plane.lease)
    application.router.add_get("/agent/v1/policy/{digest}", plane.policy)
    application.router.add_get("/counts", plane.told)
    logging.basicConfig(level=logging.WARNING)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", world.port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(msgspec.json.decode(sys.argv[1].encode(), type=World)))
