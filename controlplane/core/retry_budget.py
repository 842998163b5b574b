"""Retries of failed attempts are a bounded share of the traffic, so that a failing backend is not stormed.

The budget over a sliding minute is the larger of 10 % of the requests in it and one retry per 10 s. Past it the
failure is returned, never retried.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_US: Final = 60_000_000
FLOOR_INTERVAL_US: Final = 10_000_000
DEFAULT_SHARE_PPM: Final = 100_000
PPM: Final = 1_000_000


class RetryBudget:
    """Requests and retries of the last minute, counted per second so that memory is bounded."""

    __slots__ = ("_requests", "_retries", "_seconds", "share_ppm")

    def __init__(self, share_ppm: int = DEFAULT_SHARE_PPM) -> None:
        if not 0 <= share_ppm <= PPM:
            raise ValueError(f"share_ppm must be between 0 and {PPM:,}, got {share_ppm}")
        self.share_ppm = share_ppm
        self._seconds: deque[list[int]] = deque()
        self._requests = 0
        self._retries = 0

    def count_request(self, now_us: int) -> None:
        """Count one request (its first attempt)."""
        seconds = self._seconds
        second = seconds[-1] if seconds and 0 <= now_us - seconds[-1][0] < 1_000_000 else self._second(now_us)
        second[1] += 1
        self._requests += 1

    def allowed(self, now_us: int) -> int:
        """Retries that the window allows in all, those already made included."""
        self._forget(now_us)
        return max(self._requests * self.share_ppm // PPM, WINDOW_US // FLOOR_INTERVAL_US)

    def try_retry(self, now_us: int) -> bool:
        """Take one retry from the budget; False when it is used up.

        Without the traffic that 10 % needs, retries come one per 10 s, not six at once.
        """
        self._forget(now_us)
        by_share = self._retries < self._requests * self.share_ppm // PPM
        recent = sum(entry[2] for entry in self._seconds if now_us - entry[0] < FLOOR_INTERVAL_US)
        if not by_share and (recent or self._retries >= WINDOW_US // FLOOR_INTERVAL_US):
            return False
        self._second(now_us)[2] += 1
        self._retries += 1
        return True

    def _second(self, now_us: int) -> list[int]:
        self._forget(now_us)
        start = now_us - now_us % 1_000_000
        if not self._seconds or self._seconds[-1][0] != start:
            self._seconds.append([start, 0, 0])
        return self._seconds[-1]

    def _forget(self, now_us: int) -> None:
        while self._seconds and now_us - self._seconds[0][0] >= WINDOW_US:
            _, requests, retries = self._seconds.popleft()
            self._requests -= requests
            self._retries -= retries
