"""The demo's clients: `python -m controlplane.demo.traffic PLAN.json` offers requests until it is told to stop.

Open loop: arrivals keep their instants whatever the fleet does. SIGTERM ends the offering; what is under way may end,
then the counts of what the clients saw are written to the plan's `result`.
"""

import asyncio
import itertools
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from controlplane.core.reasons import Outcome
from controlplane.demo.night_job import NightJob
from controlplane.demo.plan import Client, Source, Target, TrafficPlan, TrafficResult, read_plan, write_json
from controlplane.lab.chat_bodies import batch_body, chat
from controlplane.lab.synthetic import CODE_OUTPUT, CODE_PROMPT, Burst, requests
from controlplane.lab.traces import TraceRequest, read_trace

OUTSTANDING_MAX = 2_000
REQUEST_TIMEOUT_S = 300.0
WRITE_EVERY_S = 1.0
BROKEN_PROMISES = frozenset(outcome.value for outcome in Outcome) - {Outcome.COMPLETED, Outcome.CANCELLED_BY_CLIENT}


class Traffic:
    """All clients of one plan, on one event loop."""

    def __init__(self, plan: TrafficPlan, session: aiohttp.ClientSession) -> None:
        self.plan = plan
        self.session = session
        self.result = TrafficResult()
        self.rejected: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.stopping = asyncio.Event()
        self.under_way: set[asyncio.Task[float | None]] = set()
        self._rng = random.Random(plan.seed)
        self._ends = open(plan.ends, "a", encoding="utf-8", buffering=1) if plan.ends else None  # noqa: SIM115

    async def run(self) -> None:
        sources = [asyncio.create_task(self._offer(source, number)) for number, source in enumerate(self.plan.sources)]
        jobs = [
            NightJob(job, self.plan.control_plane, self.session, batch_body, random.Random(self.plan.seed + number))
            for number, job in enumerate(self.plan.jobs)
        ]
        loops = [asyncio.create_task(job.run()) for job in jobs]
        writer = asyncio.create_task(self._write_often())
        await self.stopping.wait()
        for task in (*sources, *loops):
            task.cancel()
        await asyncio.gather(*sources, *loops, return_exceptions=True)
        await asyncio.gather(*(job.cancel() for job in jobs))
        self.result.jobs_submitted = sum(job.submitted for job in jobs)
        if self.under_way:
            await asyncio.wait(self.under_way, timeout=self.plan.drain_s)
        for request in self.under_way:
            request.cancel()
        await asyncio.gather(*self.under_way, return_exceptions=True)
        writer.cancel()
        self.write()
        if self._ends:
            self._ends.close()

    def _note(self, answer: aiohttp.ClientResponse, end: str) -> None:
        if self._ends:
            self._ends.write(f"{answer.headers.get('x-request-id', '-')} {end}\n")

    def write(self) -> None:
        self.result.rejected_by_reason = dict(sorted(self.rejected.items()))
        self.result.failed_by_reason = dict(sorted(self.broken.items()))
        if self.plan.result:
            write_json(Path(self.plan.result), self.result)

    async def _write_often(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            self.write()

    # Interactive clients

    async def _offer(self, source: Source, number: int) -> None:
        rng = random.Random(self.plan.seed * 1_000 + number)
        clients = self.plan.clients[source.pool]
        shares = [client.share for client in clients]
        started = time.monotonic()
        for request in arriving(source, rng):
            wait_s = started + request.at_us / 1e6 / source.speed - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            client = rng.choices(clients, shares)[0]
            give_up_after = rng.randint(1, 8) if rng.random() < self.plan.cancel_share else None
            stream = give_up_after is not None or rng.random() < 0.8
            if len(self.under_way) >= OUTSTANDING_MAX:
                continue
            self._start(
                self._ask(source.pool, source.model, client, request, stream=stream, give_up_after=give_up_after)
            )

    def _start(self, work: Coroutine[Any, Any, float | None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    # One request

    async def _ask(
        self,
        pool: str,
        model: str,
        client: Client,
        request: TraceRequest,
        *,
        stream: bool,
        give_up_after: int | None = None,
    ) -> float | None:
        """Offers one request and counts its end; the seconds after which a refused or broken one may try again."""
        target = self._rng.choice([target for target in self.plan.targets if target.pool == pool])
        headers = {"authorization": f"Bearer {client.secret}", "x-flexband-class": client.workload_class}
        body = orjson.dumps(chat(model, request, stream=stream))
        self.result.offered += 1
        try:
            async with self.session.post(f"{target.address}/v1/chat/completions", data=body, headers=headers) as answer:
                if answer.status != 200:
                    return self._refused(answer.status, await answer.read(), answer.headers.get("retry-after"))
                if stream:
                    await self._follow(answer, give_up_after)
                else:
                    self._complete(answer, orjson.loads(await answer.read())["usage"])
                return None
        except asyncio.CancelledError:
            self._broken("stopped")
            raise
        except (aiohttp.ClientError, TimeoutError, KeyError, orjson.JSONDecodeError) as error:
            self._unreachable(target, error)
            return 1.0

    async def _follow(self, answer: aiohttp.ClientResponse, give_up_after: int | None) -> None:
        usage, chunks, ended = None, 0, False
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                ended = True
                break
            chunks += 1
            if give_up_after is not None and chunks >= give_up_after:
                answer.close()
                self.result.admitted += 1
                self.result.cancelled += 1
                self._note(answer, "cancelled")
                return
            event = orjson.loads(line[6:])
            if "error" in event:
                self._broken(str(event["error"].get("code")))
                return
            usage = event.get("usage") or usage
        if ended and usage:
            self._complete(answer, usage)
        else:
            self._broken("stream ended early")

    def _complete(self, answer: aiohttp.ClientResponse, usage: dict[str, int]) -> None:
        self._note(answer, "completed")
        self.result.admitted += 1
        self.result.completed += 1
        self.result.prompt_tokens += usage["prompt_tokens"]
        self.result.output_tokens += usage["completion_tokens"]

    def _refused(self, status: int, body: bytes, retry_after: str | None) -> float | None:
        try:
            code = str(orjson.loads(body)["error"]["code"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            code = str(status)
        if code in BROKEN_PROMISES:
            self._broken(code)
        else:
            self.rejected[code] += 1
        return float(retry_after or 1) if status in (429, 503, 504, 502) else None

    def _broken(self, code: str) -> None:
        self.result.admitted += 1
        self.result.failed += 1
        self.broken[code] += 1

    def _unreachable(self, target: Target, error: Exception) -> None:
        self.result.unreachable += 1
        sys.stderr.write(f"{target.agent}: {type(error).__name__} {error}\n")


def arriving(source: Source, rng: random.Random) -> Iterator[TraceRequest]:
    """A source's requests in order; a trace starts again at its end."""
    if not source.trace:
        burst = None
        if source.burst_every_s:
            burst = Burst(source.burst_first_s, source.burst_every_s, source.burst_length_s, source.burst_factor)
        yield from requests(
            rate_per_s=source.rate_per_s,
            variation=1.3,
            prompt=CODE_PROMPT,
            output=CODE_OUTPUT,
            rng=rng,
            burst=burst,
            prompt_max=source.prompt_max,
            output_max=source.output_max,
        )
        return
    trace = read_trace(Path(source.trace))
    for turn in itertools.count():
        shift_us = turn * (trace.length_us + 1_000_000)
        for request in trace.requests:
            yield TraceRequest(request.at_us + shift_us, request.prompt_tokens, request.output_tokens)


async def main(path: Path) -> None:
    plan = read_plan(path)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, connect=10)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        traffic = Traffic(plan, session)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, traffic.stopping.set)
        await traffic.run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
