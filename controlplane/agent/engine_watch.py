"""Asks the inference server how it is: its health every second, its metrics every two. Bounded in time and size.

Nothing here decides about requests except readiness; figures are for people, and old ones are unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from controlplane.agent.engine_metrics import EngineReading, EngineTotals, read_page
from controlplane.agent.slot_readiness import Health

log = logging.getLogger(__name__)

HEALTH_EVERY_S: Final = 1.0
METRICS_EVERY_S: Final = 2.0
WITHOUT_METRICS_EVERY_S: Final = 30.0
"""Between looks at a server that has no metrics page."""
TIMEOUT_S: Final = 1.0
STALE_S: Final = 6.0
PAGE_BYTES_MAX: Final = 1024 * 1024
NO_SUCH_PATH: Final = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True)
class Page:
    """Status and what came of the body; not `whole` when the connection ended before it did."""

    status: int
    body: bytes
    whole: bool


class PageTooLarge(Exception):
    """A body over the bound."""


class EngineWatch:
    """One inference server under watch; made and run inside an event loop."""

    def __init__(self, url: str) -> None:
        base = urlsplit(url)
        self._base = f"{base.scheme}://{base.netloc}{base.path.rstrip('/').removesuffix('/v1')}"
        self._metrics_address = self._base + "/metrics"
        self._loop = asyncio.get_running_loop()
        self._session: aiohttp.ClientSession | None = None
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

    def start(self) -> None:
        self._tasks = [self._loop.create_task(self._watch_health()), self._loop.create_task(self._watch_metrics())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._session is not None:
            await self._session.close()

    @property
    def reading(self) -> EngineReading:
        """The newest figures; all unknown when they are older than 6 s."""
        return self._reading if self._loop.time() - self._read_at_s < STALE_S else EngineReading()

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
        except (aiohttp.ClientError, TimeoutError, OSError, PageTooLarge) as error:
            if heard == self.heard():
                self.health.bad(f"the inference server did not answer: {_reason(error)}", proof=False)
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
        page = await self._get(self._base + "/health")
        if page.status in NO_SUCH_PATH:
            page = await self._get(self._base + "/v1/models")
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
            page = await self._get(self._metrics_address)
        except (aiohttp.ClientError, TimeoutError, OSError, PageTooLarge) as error:
            self._count_failed(_reason(error))
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

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Proxies of the environment are not used: the server is named on the command line.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=4),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                headers={"accept-encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    async def _get(self, address: str) -> Page:
        async with self._opened().get(address, allow_redirects=False) as response:
            parts: list[bytes] = []
            size, whole = 0, True
            try:
                async for part in response.content.iter_any():
                    size += len(part)
                    if size > PAGE_BYTES_MAX:
                        raise PageTooLarge
                    parts.append(part)
            except aiohttp.ClientPayloadError:
                whole = False
            return Page(response.status, b"".join(parts), whole)


def _reason(error: BaseException) -> str:
    """A closed set: it becomes a label."""
    if isinstance(error, PageTooLarge):
        return "too_large"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "refused" if isinstance(error, aiohttp.ClientConnectorError) else "broken"
