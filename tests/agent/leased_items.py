"""Items as a control plane would lease them, and the reports that an agent makes of them."""

from __future__ import annotations

import json

import msgspec
from msgspec import Raw

from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.clock import boot_us
from controlplane.agent.items import ItemRunner
from controlplane.agent.reporting import cut_last_report, cut_report
from controlplane.agent.spool import EpochSpool
from controlplane.wire.report import Item, ItemJob, ItemsCancelled, Report
from tests.agent import worlds
from tests.agent.upstreams import Upstream

JOB = "0192d5a4-7c00-7000-8000-00000000000%d"
SECOND_US = 1_000_000


def job(number: int = 1, **changes) -> ItemJob:
    base = {
        "job_id": number,
        "uuid": JOB % number,
        "tenant_id": 2,
        "key_id": 12,
        "class_id": 2,
        "model": worlds.MODEL,
        "endpoint": "/v1/chat/completions",
        "deadline_us": None,
        "expected_output_tokens": 8,
    }
    return ItemJob(**{**base, **changes})


def body(**changes) -> bytes:
    base = {"model": worlds.MODEL, "messages": [{"role": "user", "content": "summarise"}], "max_tokens": 8}
    return json.dumps({**base, **changes}).encode()


def item(fence: int, job_id: int = 1, *, lease_s: float = 300.0, text: bytes | None = None, attempt: int = 1) -> Item:
    """The item of that fence; its line is the fence too."""
    return Item(job_id, fence, attempt, fence, round(lease_s * SECOND_US), 12, Raw(text or body()))


class BootClock:
    """The boot clock, which a test may set ahead."""

    def __init__(self) -> None:
        self.ahead_us = 0

    def __call__(self) -> int:
        return boot_us() + self.ahead_us


def with_boot_clock(agent: worlds.Agent) -> BootClock:
    """From now on the agent's items live by a clock of the test."""
    clock = BootClock()
    agent.engine.items = ItemRunner(agent.engine, clock)
    return clock


def lease(agent: worlds.Agent, items: list[Item], *, jobs=None, cancelled: list[ItemsCancelled] = []) -> None:  # noqa: B006
    """An answer that leases and cancels arrives."""
    agent.engine.items.take(jobs or [job()], items, cancelled, sent_boot_us=agent.engine.items._boot_us())


def report(agent: worlds.Agent) -> Report:
    """The next report, as it is sent."""
    cut_report(agent.engine, agent.spool, agent.policy, agent.live)
    return msgspec.json.decode(agent.spool.body_of(agent.spool.state.reports[-1]), type=Report)


def last_reports(state_dir) -> list[Report]:
    """What the next process reports of an epoch whose process is gone."""
    spool = EpochSpool.reopen(state_dir / "spool", 1)
    cut_last_report(spool, 1)
    made = [msgspec.json.decode(spool.body_of(stored), type=Report) for stored in spool.state.reports]
    spool.close()
    return made


def ended(agent: worlds.Agent) -> int:
    """Items that ended on the agent, however."""
    return sum(agent.engine.items.done.values())


async def upstream_agent(make_agent, upstream: Upstream) -> worlds.Agent:
    """An agent before that inference server."""
    return await make_agent(backend=OpenAIBackend(upstream.url))
