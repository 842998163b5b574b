"""The demo's batch client: a file of documents, submitted as a job whose items the agents lease, one after the other.

It uses what any client of the control plane has: `/v1/files` and `/v1/batches` with its tenant's key.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import orjson

from controlplane.demo.plan import JobPlan
from controlplane.lab.traces import TraceRequest

ENDPOINT = "/v1/chat/completions"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
LOOK_EVERY_S = 2.0
REFUSED_PAUSE_S = 5.0
CANCEL_TIMEOUT_S = 2.0
VARIATION = 0.3
FILE_TIMEOUT_S = 60.0

Body = Callable[[str, TraceRequest], dict[str, object]]
"""What a request of so many tokens to a model says."""


class NightJob:
    """Submits the plan's job, waits for its end, submits the next; `cancel` ends the one that is under way."""

    def __init__(
        self, plan: JobPlan, address: str, session: aiohttp.ClientSession, body: Body, rng: random.Random
    ) -> None:
        self.plan = plan
        self.submitted = 0
        self._address = address
        self._session = session
        self._body = body
        self._rng = rng
        self._headers = {"authorization": f"Bearer {plan.secret}"}
        self._order: dict[str, Any] | None = None
        self._open: str | None = None

    async def run(self) -> None:
        """For ever; whatever the control plane answers or does not, it is asked again."""
        while True:
            try:
                await self._one()
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                sys.stderr.write(f"night job: {type(error).__name__} {error}\n")
                await asyncio.sleep(LOOK_EVERY_S)

    async def _one(self) -> None:
        if self._open is None:
            self._open = await self._submit()
            self._order = None
            self.submitted += 1
        batch = await self._ask("GET", f"/v1/batches/{self._open}")
        if batch["status"] not in ENDED:
            await asyncio.sleep(LOOK_EVERY_S)
            return
        self._open = None
        if batch["status"] == "failed":
            sys.stderr.write(f"night job refused: {batch['errors']}\n")
            await asyncio.sleep(REFUSED_PAUSE_S)

    async def _submit(self) -> str:
        """The same order until it is answered: whoever asks again with its key gets the batch it made."""
        if self._order is None:
            self._order = await self._new_order()
        headers = {"idempotency-key": self._order["input_file_id"]}
        return str((await self._ask("POST", "/v1/batches", headers=headers, json=self._order))["id"])

    async def _new_order(self) -> dict[str, Any]:
        name = f"nightly documents {self.submitted + 1}"
        content = await asyncio.to_thread(lambda: b"".join(self._lines()))
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", content, filename=f"{name.replace(' ', '-')}.jsonl")
        uploaded = await self._ask("POST", "/v1/files", data=form)
        deadline = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.plan.deadline_s))
        metadata = {
            "name": name,
            "class": self.plan.workload_class,
            "pool": self.plan.pool,
            "deadline": deadline,
            "if_late": "refuse",
        }
        return {
            "input_file_id": uploaded["id"],
            "endpoint": ENDPOINT,
            "completion_window": "24h",
            "metadata": metadata,
        }

    def _lines(self) -> Iterator[bytes]:
        for number in range(1, self.plan.items + 1):
            wanted = TraceRequest(0, self._vary(self.plan.prompt_tokens), self._vary(self.plan.output_tokens))
            row = {
                "custom_id": f"document-{number}",
                "method": "POST",
                "url": ENDPOINT,
                "body": self._body(self.plan.model, wanted),
            }
            yield orjson.dumps(row) + b"\n"

    def _vary(self, tokens: int) -> int:
        return max(1, round(tokens * self._rng.uniform(1 - VARIATION, 1 + VARIATION)))

    async def cancel(self) -> None:
        """Ends what is under way; agents drop its items with their next report.

        An order whose answer was still on its way has made a batch all the same: its key tells which.
        """
        if self._open is None and self._order is None:
            return
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                if self._open is None:
                    self._open = await self._submit()
                await self._ask("POST", f"/v1/batches/{self._open}/cancel")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            sys.stderr.write(f"night job not cancelled: {type(error).__name__} {error}\n")

    async def _ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, **content: Any
    ) -> dict[str, Any]:
        """The document of an answer. Raises ValueError with what was said when it is a refusal."""
        timeout, all_headers = aiohttp.ClientTimeout(total=FILE_TIMEOUT_S), self._headers | (headers or {})
        address = f"{self._address}{path}"
        async with self._session.request(method, address, headers=all_headers, timeout=timeout, **content) as answer:
            if answer.status >= 400:
                raise ValueError(f"{path} answered {answer.status}: {(await answer.text())[:500]}")
            document: dict[str, Any] = orjson.loads(await answer.read())
            return document
