"""Asks the inference server how it is: its health every second, its metrics every two. Bounded in time and size.

Nothing here decides about requests except readiness; figures are for people, and old ones are unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from controlplane.agent.engine_metrics import EngineReading, EngineTotals, read_page
from controlplane.agent.gpu_watch import GpuWatch
from controlplane.agent.pages import FAILURES, Page, Pages, reason_of
from controlplane.agent.slot_readiness import Health

log = logging.getLogger(__name__)

HEALTH_EVERY_S: Final = 1.0
METRICS_EVERY_S: Final = 2.0
WITHOUT_METRICS_EVERY_S: Final = 30.0
"""Between looks at a server that has no metrics page."""
STALE_S: Final = 6.0
NO_SUCH_PATH: Final = frozenset({404, 405, 501})


class EngineWatch:
    """One inference server under watch; made and run inside an event loop."""

    def __init__(self, url: str) -> None:
        base = urlsplit(url)
        self._base = f"{base.scheme}://{base.netloc}{base.path.rstrip('/').removesuffix('/v1')}"
        self._metrics_address = self._base + "/metrics"
        self._loop = asyncio.get_running_loop()
        self._pages = Pages()
        self._tasks: list[asyncio.Task[None]] = []
        self._asked = asyncio.Event()
        self._read_at_s = -STALE_S
        self._reading = EngineReading()
        self.health = Health()
        self.totals = EngineTotals()
        self.failed: dict[str, int] = {}
        """Looks at the metrics page that brought nothing, by reason."""
        self.batched: Mapping[str, int | None] = {}
        """Inferences and executions of a server that batches one-shot work by itself."""
        self.on_change: Callable[[], None] = lambda: None
        self.heard: Callable[[], int] = lambda: 0
        """Counts what the server sends in answer to requests."""
        self.gpus: GpuWatch | None = None
        """DCGM's exporter, where it is asked for the memory of the server's GPUs."""

    def start(self) -> None:
        if self.gpus is not None:
            self.gpus.start()
        self._tasks = [self._loop.create_task(self._watch_health()), self._loop.create_task(self._watch_metrics())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._pages.close()
        if self.gpus is not None:
            await self.gpus.close()

    @property
    def reading(self) -> EngineReading:
        """The newest figures; all unknown when they are older than 6 s. GPU memory is DCGM's where that is asked."""
        found = self._reading if self._loop.time() - self._read_at_s < STALE_S else EngineReading()
        if self.gpus is None:
            return found
        memory = self.gpus.memory
        return replace(found, gpu_used_bytes=memory.used_bytes, gpu_total_bytes=memory.total_bytes)

    @property
    def reading_age_s(self) -> float | None:
        """Age of the newest figures, whatever they are worth; None without any."""
        return None if self._read_at_s < 0 else self._loop.time() - self._read_at_s

    # -- health --------------------------------------------------------------------------------------------------------

    async def _watch_health(self) -> None:
        while True:
            try:
                await self.check()
            except Exception:
                log.exception("the inference server's health could not be looked at; the next look comes")
            self._asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_EVERY_S):
                    await self._asked.wait()

    def look_now(self) -> None:
        """A request could not reach the server: do not wait for the next look."""
        self._asked.set()

    async def check(self) -> None:
        """Ask once. A server that sends tokens meanwhile is busy, not dead: a missing answer is then forgiven."""
        heard = self.heard()
        try:
            trouble = await self.trouble()
        except aiohttp.ClientConnectorError:
            self.health.bad("nothing listens at the inference server's address", proof=True)
        except FAILURES as error:
            if heard == self.heard():
                self.health.bad(f"the inference server did not answer: {reason_of(error)}", proof=False)
        else:
            if trouble:
                self.health.bad(trouble, proof=False)
            else:
                self.health.good()
        self.on_change()

    async def trouble(self) -> str:
        """Why the server takes no work, empty when it does. `/health`; where there is none it is asked for its models.

        Raises what a request raises.
        """
        page = await self._pages.get(self._base + "/health")
        if page.status in NO_SUCH_PATH:
            page = await self._pages.get(self._base + "/v1/models")
        well = 200 <= page.status < 300
        return "" if well else f"the inference server answers {page.status} when asked for its health"

    # -- metrics -------------------------------------------------------------------------------------------------------

    async def _watch_metrics(self) -> None:
        while True:
            has_page = True
            try:
                has_page = await self.scrape()
            except Exception:
                log.exception("the inference server's metrics could not be looked at; the next look comes")
            await asyncio.sleep(METRICS_EVERY_S if has_page else WITHOUT_METRICS_EVERY_S)

    async def scrape(self) -> bool:
        """Look at the metrics page once; False when the server has none."""
        try:
            page = await self._pages.get(self._metrics_address)
        except FAILURES as error:
            self._count_failed(reason_of(error))
            return True
        if page.status != 200:
            self._count_failed("status")
            return page.status not in NO_SUCH_PATH
        if not self.take_page(page):
            self._count_failed("unreadable")
            return True
        self._read_at_s = self._loop.time()
        return True

    def take_page(self, page: Page) -> bool:
        """Read a metrics page; False when it is none of a server that is known here."""
        reading = read_page(page.body, whole=page.whole)
        if not reading.engine:
            return False
        self._reading = reading
        self.totals.take(reading)
        return True

    def _count_failed(self, reason: str) -> None:
        self.failed[reason] = self.failed.get(reason, 0) + 1
