"""Real HTTP load at an agent: interactive requests at their instants, batch requests so many at once.

What each client saw is kept, request by request, also of the warm-up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Final

import aiohttp
import orjson

from controlplane.lab.chat_bodies import chat
from controlplane.lab.traces import TraceRequest

INTERACTIVE: Final = "interactive"
BATCH: Final = "batch"
CONNECT_S: Final = 10.0
COMPLETED: Final = "completed"
REFUSED: Final = frozenset({400, 401, 403, 404, 413, 422, 429, 503})
PATH: Final = "/v1/chat/completions"
PAUSE_S: Final = 0.2
"""A batch client that was refused waits so long before it asks for the next one."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; instants in us from the stage's start, -1 is never. `end` says how it ended."""

    stage: str
    kind: str
    planned_us: int
    prompt_tokens: int
    output_tokens: int
    sent_us: int = -1
    first_us: int = -1
    ended_us: int = -1
    status: int = 0
    end: str = ""
    queue_us: int = -1
    served: str = ""
    request_id: str = ""
    told_tokens: bool = False
    """Whether the token counts are the server's own, or those that were asked for."""


@dataclass(frozen=True, slots=True)
class Target:
    """An agent: its address, the model, and key and class by kind."""

    address: str
    model: str
    keys: dict[str, str]
    classes: dict[str, str]
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What is offered: interactive requests at their instants, and `at_once` batch requests, for `length_us`."""

    name: str
    interactive: Sequence[TraceRequest]
    batch: Sequence[TraceRequest]
    at_once: int
    length_us: int


async def run(target: Target, stage: Stage) -> list[Seen]:
    """Offers a stage and waits for the ends. Raises OSError where nobody answers at the address."""
    timeout = aiohttp.ClientTimeout(total=target.timeout_s, connect=CONNECT_S)
    found: list[Seen] = []
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await _answers(session, target)
        load = _Load(session, target, stage, found)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.offer(tasks))
            bodies = cycle(stage.batch)
            for _ in range(stage.at_once if stage.batch else 0):
                tasks.create_task(load.batch_client(bodies))
    found.sort(key=lambda seen: (seen.sent_us, seen.kind, seen.planned_us))
    return found


async def _answers(session: aiohttp.ClientSession, target: Target) -> None:
    """Raises OSError that says what is wrong with the address or the key."""
    headers = {"authorization": f"Bearer {target.keys[INTERACTIVE]}"}
    try:
        async with session.get(f"{target.address}/v1/models", headers=headers) as answer:
            if answer.status != 200:
                raise OSError(0, f"answers {answer.status} to a list of models: look at the key", target.address)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise OSError(0, f"no agent answers there ({type(error).__name__})", target.address) from None


class _Load:
    """The clients of one stage."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, stage: Stage, found: list[Seen]) -> None:
        self._session, self._target, self._stage, self._found = session, target, stage, found
        self._began_ns = time.monotonic_ns()

    def _now_us(self) -> int:
        return (time.monotonic_ns() - self._began_ns) // 1_000

    async def offer(self, tasks: asyncio.TaskGroup) -> None:
        """Open loop: arrivals keep their instants whatever the agent does."""
        for request in self._stage.interactive:
            wait_us = request.at_us - self._now_us()
            if wait_us > 0:
                await asyncio.sleep(wait_us / 1e6)
            tasks.create_task(self._ask(INTERACTIVE, request, request.at_us))

    async def batch_client(self, bodies: Iterator[TraceRequest]) -> None:
        """Closed loop: the next request when the one before has ended, until the stage is over."""
        while (now_us := self._now_us()) < self._stage.length_us:
            seen = await self._ask(BATCH, next(bodies), now_us)
            if seen.end != COMPLETED:
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, kind: str, request: TraceRequest, planned_us: int) -> Seen:
        target = self._target
        seen = Seen(self._stage.name, kind, planned_us, request.prompt_tokens, request.output_tokens)
        self._found.append(seen)
        body = orjson.dumps(chat(target.model, request, stream=True))
        headers = {
            "authorization": f"Bearer {target.keys[kind]}", "x-flexband-class": target.classes[kind],
            "content-type": "application/json",
        }  # fmt: skip
        seen.sent_us = self._now_us()
        try:
            async with self._session.post(f"{target.address}{PATH}", data=body, headers=headers) as answer:
                await self._follow(seen, answer)
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            seen.end = f"broken: {type(error).__name__}"
        seen.ended_us = self._now_us()
        return seen

    async def _follow(self, seen: Seen, answer: aiohttp.ClientResponse) -> None:
        seen.status = answer.status
        seen.request_id = answer.headers.get("x-request-id", "")
        seen.served = answer.headers.get("x-flexband-class", "")
        if answer.status != 200:
            seen.end = str(orjson.loads(await answer.read())["error"]["code"])
            return
        seen.queue_us = round(float(answer.headers.get("x-flexband-queue-ms", "0")) * 1_000)
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                seen.end = COMPLETED
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                seen.end = str(event["error"].get("code"))
                return
            if seen.first_us < 0 and any((choice.get("delta") or {}).get("content") for choice in event["choices"]):
                seen.first_us = self._now_us()
            if usage := event.get("usage"):
                seen.prompt_tokens, seen.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                seen.told_tokens = True
        seen.end = seen.end or "stream ended early"


def as_line(seen: Seen) -> bytes:
    """One request of the raw results."""
    return orjson.dumps(asdict(seen)) + b"\n"


def read_lines(content: bytes) -> list[Seen]:
    """What `as_line` wrote."""
    return [Seen(**orjson.loads(line)) for line in content.splitlines()]


def was_refused(seen: Seen) -> bool:
    """The agent answered that it does not take it."""
    return seen.status in REFUSED
