"""The clients of `benchmarks.night`: a batch file, and streamed requests at their instants, never tried again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import aiohttp
import numpy as np
import orjson

from controlplane.demo.shape import CHAT
from controlplane.demo.traffic import batch_body, chat
from controlplane.lab.summary import distribution
from controlplane.lab.traces import TraceRequest
from controlplane.lab.workload import Workload

TIMEOUT_S = 120.0


def job_file(items: list[TraceRequest], model: str) -> bytes:
    """One line an item, each asking for just the output that it will get."""
    return b"".join(
        orjson.dumps(
            {
                "custom_id": f"document-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": batch_body(model, item),
            }
        )
        + b"\n"
        for number, item in enumerate(items, start=1)
    )


class Answers:
    """What the clients saw: completed, refused by reason, broken by what; waits in us, -1 where there was none."""

    def __init__(self) -> None:
        self.completed = 0
        self.refused: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.queue_us: list[int] = []
        self.ttft_us: list[int] = []
        self.late_s = 0.0
        """How far the clients themselves fell behind the trace at most."""

    def figures(self, offered: int) -> dict[str, Any]:
        return {
            "offered": offered,
            "completed": self.completed,
            "refused": dict(sorted(self.refused.items())),
            "broken": dict(sorted(self.broken.items())),
            "late_s": self.late_s,
            "queue_ms": distribution(np.asarray(self.queue_us, np.int64), 1_000),
            "ttft_ms": distribution(np.asarray(self.ttft_us, np.int64), 1_000),
        }


async def ask_all(work: Workload, address: str, keys: dict[str, str], model: str) -> dict[str, Any]:
    """Every request of the workload at its instant from now on, and what became of them."""
    answers, timeout = Answers(), aiohttp.ClientTimeout(total=TIMEOUT_S)
    began = time.monotonic()
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for row, at_us in enumerate(work.at_us):
            wait_s = began + at_us / 1e6 - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                answers.late_s = max(answers.late_s, -wait_s)
            body = orjson.dumps(chat(model, TraceRequest(0, work.prompt[row], work.output[row]), stream=True))
            headers = {
                "authorization": f"Bearer {keys[work.tenants[work.tenant_of[row]]]}",
                "x-flexband-class": CHAT,
                "content-type": "application/json",
            }
            tasks.create_task(_ask(session, f"{address}/v1/chat/completions", body, headers, answers))
    return answers.figures(len(work))


async def _ask(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str], answers: Answers
) -> None:
    sent_ns = time.monotonic_ns()
    try:
        async with session.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                code = orjson.loads(await answer.read())["error"]["code"]
                answers.refused[str(code)] += 1
                return
            answers.queue_us.append(round(float(answer.headers.get("x-flexband-queue-ms", 0)) * 1_000))
            first = True
            ended = False
            async for line in answer.content:
                if first and line.startswith(b"data: "):
                    answers.ttft_us.append((time.monotonic_ns() - sent_ns) // 1_000)
                    first = False
                ended = ended or line.startswith(b"data: [DONE]")
        if ended:
            answers.completed += 1
        else:
            answers.broken["stream ended early"] += 1
    except (aiohttp.ClientError, TimeoutError, KeyError, orjson.JSONDecodeError) as error:
        answers.broken[type(error).__name__] += 1
