"""How long work without tokens takes here: its only measure before it runs."""

from __future__ import annotations

from typing import Final

FIRST_GUESS_US: Final = 50_000
ALPHA: Final = 0.1


class TokenlessTime:
    """Mean GPU time of a request that has no tokens to be estimated by, learnt from those that completed."""

    __slots__ = ("_mean_us",)

    def __init__(self) -> None:
        self._mean_us: float | None = None

    @property
    def mean_us(self) -> int:
        return FIRST_GUESS_US if self._mean_us is None else max(1, round(self._mean_us))

    def learn(self, gpu_us: int) -> None:
        before = self._mean_us
        self._mean_us = float(gpu_us) if before is None else before + ALPHA * (gpu_us - before)
