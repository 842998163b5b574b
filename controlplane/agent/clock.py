"""The agent's clocks: one that never goes back for work and wire, and the boot clock for grants."""

import logging
import time
from collections import deque
from typing import Final

from controlplane.wire.clock import ClockReading, ahead_us

log = logging.getLogger(__name__)
_monotonic_ns: Final = time.monotonic_ns

STEP_AFTER_US: Final = 5_000_000
IDLE_SLEW_US: Final = 50_000
BUSY_SLEW_US: Final = 500
"""Per adjustment of about one second, while something runs: 0.05 % of every duration."""
READINGS: Final = 8
"""An offset beyond `wire.report.OFF_BY_US` is warned of; records more than 5 minutes in the future are set aside."""


class OffsetFilter:
    """This clock against the control plane's, by the times of their exchanges.

    Of the last eight, the one with the shortest round trip counts (NTP's clock filter, RFC 5905, section 10): what
    lengthened the others is on one of their ways, and nobody knows on which.
    """

    def __init__(self) -> None:
        self._readings: deque[ClockReading] = deque(maxlen=READINGS)

    def note(self, sent_us: int, received_us: int, server_us: int) -> None:
        """One exchange: when it was sent and answered by this clock, and what the other clock said in between."""
        if received_us < sent_us or server_us <= 0:
            return
        half_us = (received_us - sent_us) // 2
        self._readings.append(ClockReading(sent_us + half_us - server_us, half_us))

    def shift(self, by_us: int) -> None:
        """This clock was set: what was read before is that much off now."""
        moved = [ClockReading(reading.offset_us + by_us, reading.error_us) for reading in self._readings]
        self._readings.clear()
        self._readings.extend(moved)

    def reading(self) -> ClockReading | None:
        """The best reading; None before the first exchange."""
        return min(self._readings, key=lambda reading: reading.error_us, default=None)

    def is_off(self) -> bool:
        """Whether this clock is certainly wrong by more than the limit, or the other one is."""
        return ahead_us(self.reading()) != 0


class Clock:
    """Unix microseconds that advance with the monotonic clock and never go back.

    Durations are differences of `now_us()`, so a step of the wall clock cannot make them negative or long. The offset
    follows the wall clock: by at most 0.5 ms per `adjust` call while something runs, else by 50 ms, or forward all at
    once when it is more than 5 s behind. To go back it stands still.
    """

    __slots__ = ("_floor_us", "_offset_us", "offset")

    def __init__(self) -> None:
        self._offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000
        self._floor_us = 0
        self.offset = OffsetFilter()

    def now_us(self) -> int:
        now_us = _monotonic_ns() // 1000 + self._offset_us
        return now_us if now_us > self._floor_us else self._floor_us

    def compare(self, sent_us: int, server_us: int) -> None:
        """An answer came to what was sent at `sent_us`; said once when the clock is found wrong, or right again."""
        was_off = self.offset.is_off()
        self.offset.note(sent_us, self.now_us(), server_us)
        reading, off = self.offset.reading(), self.offset.is_off()
        if reading is not None and off != was_off:
            what = "set this machine's clock (NTP)" if off else "right again"
            level = logging.WARNING if off else logging.INFO
            log.log(level, "the clock is %d ms off the control plane's: %s", reading.offset_us // 1000, what)

    def adjust(self, *, idle: bool) -> None:
        """Follow the wall clock; called about once a second."""
        now_us = self.now_us()
        gap_us = time.time_ns() // 1000 - (time.monotonic_ns() // 1000 + self._offset_us)
        if gap_us > STEP_AFTER_US and idle:
            by_us = gap_us
        else:
            most_us = IDLE_SLEW_US if idle else BUSY_SLEW_US
            by_us = max(-most_us, min(most_us, gap_us))
        self._offset_us += by_us
        self.offset.shift(by_us)
        self._floor_us = now_us


def boot_us() -> int:
    """CLOCK_BOOTTIME in microseconds: it counts sleep, so a grant cannot outlive a suspended machine."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def boot_id() -> str:
    """The kernel's id of this boot; empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
