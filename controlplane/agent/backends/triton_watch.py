"""Asks a Triton server how it is: ready, with the pool's model loaded, and what its metrics page tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import quote, urlsplit

from controlplane.agent.backends.triton_metrics import TritonTotals, read_triton_page
from controlplane.agent.engine_metrics import EngineReading
from controlplane.agent.engine_watch import EngineWatch
from controlplane.agent.pages import Page

METRICS_PORT: Final = 8002


class TritonWatch(EngineWatch):
    """`model_of` tells the model of the policy in force, empty before there is one."""

    def __init__(self, url: str, metrics_url: str, model_of: Callable[[], str]) -> None:
        super().__init__(url)
        self._metrics_address = metrics_url
        self._model_of = model_of
        self.batches = TritonTotals()

    async def trouble(self) -> str:
        page = await self._pages.get(self._base + "/v2/health/ready")
        if page.status != 200:
            return f"the inference server answers {page.status} when asked whether it is ready"
        model = self._model_of()
        if model:
            page = await self._pages.get(f"{self._base}/v2/models/{quote(model, safe='')}/ready")
            if page.status != 200:
                return f"the inference server is ready and has not loaded the model {model} ({page.status})"
        return ""

    def take_page(self, page: Page) -> bool:
        reading = read_triton_page(page.body, self._model_of(), whole=page.whole)
        if not reading.seen:
            return False
        self._reading = EngineReading(
            engine="Triton", waiting=reading.waiting, gpu_used_bytes=reading.gpu_used_bytes,
            gpu_total_bytes=reading.gpu_total_bytes,
        )  # fmt: skip
        self.batches.take(reading)
        self.totals.restarts = self.batches.restarts
        self.batched = self.batches.counted
        return True


def metrics_url(upstream: str, given: str) -> str:
    """Where the metrics are: as given, else on Triton's usual port of the same host."""
    if given:
        return given
    host = urlsplit(upstream).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{METRICS_PORT}/metrics"
