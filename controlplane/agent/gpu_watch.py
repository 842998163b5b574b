"""Asks DCGM's exporter for the memory of the GPUs that the inference server has. For people: nothing decides by it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Final

from controlplane.agent.gpu_metrics import GpuMemory, read_gpus
from controlplane.agent.pages import FAILURES, Pages, reason_of

log = logging.getLogger(__name__)

EVERY_S: Final = 5.0
STALE_S: Final = 15.0


class GpuWatch:
    """One exporter; made and run inside an event loop. `gpus` are indexes or UUIDs, all of the page where none is."""

    def __init__(self, address: str, gpus: Collection[str] = ()) -> None:
        self._address = address
        self._gpus = tuple(gpus)
        self._pages = Pages()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._read_at_s: float | None = None
        self._memory = GpuMemory()
        self.failed: dict[str, int] = {}
        """Looks that brought nothing, by reason."""

    def start(self) -> None:
        self._task = self._loop.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._pages.close()

    @property
    def memory(self) -> GpuMemory:
        """The newest figures; unknown when they are older than 15 s."""
        age_s = self.age_s
        return self._memory if age_s is not None and age_s < STALE_S else GpuMemory()

    @property
    def age_s(self) -> float | None:
        """Age of the newest figures, whatever they are worth; None without any."""
        return None if self._read_at_s is None else self._loop.time() - self._read_at_s

    async def _watch(self) -> None:
        while True:
            try:
                await self.scrape()
            except Exception:
                log.exception("the GPUs' metrics could not be looked at; the next look comes")
            await asyncio.sleep(EVERY_S)

    async def scrape(self) -> None:
        """Look at the page once. One without GPU memory, as just after the exporter's start, leaves what was known."""
        try:
            page = await self._pages.get(self._address)
        except FAILURES as error:
            self._count_failed(reason_of(error))
            return
        memory = read_gpus(page.body, self._gpus, whole=page.whole) if page.status == 200 else None
        if memory is None:
            self._count_failed("status" if page.status != 200 else "unreadable")
            return
        self._memory, self._read_at_s = memory, self._loop.time()

    def _count_failed(self, reason: str) -> None:
        self.failed[reason] = self.failed.get(reason, 0) + 1
