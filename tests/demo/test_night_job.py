"""The demo's batch client against a server of the same addresses: what it began, it ends."""

import asyncio
import random

import aiohttp
import pytest
from aiohttp import web

from controlplane.demo.night_job import NightJob
from controlplane.demo.plan import JobPlan
from controlplane.lab.chat_bodies import batch_body

PLAN = JobPlan(
    tenant="hooli", secret="fb_s", model="llama-70b", workload_class="bulk", pool="chat-70b", items=3, prompt_tokens=10,
    output_tokens=5, deadline_s=600,
)  # fmt: skip


class Batches:
    """Makes one batch per key, and answers the first order late."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}
        self.cancelled: list[str] = []
        self.ordered = asyncio.Event()

    async def files(self, request: web.Request) -> web.Response:
        await request.post()
        return web.json_response({"id": "file-1"})

    async def order(self, request: web.Request) -> web.Response:
        late = not self.made
        made = self.made.setdefault(request.headers["idempotency-key"], f"batch-{len(self.made)}")
        self.ordered.set()
        if late:
            await asyncio.sleep(30)
        return web.json_response({"id": made})

    async def look(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "in_progress"})

    async def cancel(self, request: web.Request) -> web.Response:
        self.cancelled.append(request.match_info["batch"])
        return web.json_response({})


@pytest.mark.parametrize("answered", [False, True])
async def test_a_stop_while_an_order_is_on_its_way_leaves_no_job_behind(answered):
    batches, app = Batches(), web.Application()
    if answered:
        batches.made["other"] = "batch-other"
    app.router.add_post("/v1/files", batches.files)
    app.router.add_post("/v1/batches", batches.order)
    app.router.add_get("/v1/batches/{batch}", batches.look)
    app.router.add_post("/v1/batches/{batch}/cancel", batches.cancel)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        async with aiohttp.ClientSession() as session:
            job = NightJob(PLAN, f"http://127.0.0.1:{port}", session, batch_body, random.Random(1))
            task = asyncio.create_task(job.run())
            await asyncio.wait_for(batches.ordered.wait(), 60)
            if answered:
                await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await job.cancel()
    finally:
        await runner.cleanup()
    assert batches.cancelled == [batches.made["file-1"]]
