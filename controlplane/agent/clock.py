"""The agent's clocks: one that never goes back for work and wire, and the boot clock for grants."""

import time

STEP_AFTER_US = 5_000_000
SLEW_US_PER_ADJUST = 50_000


class Clock:
    """Unix microseconds that advance with the monotonic clock and never go back.

    Durations are differences of `now_us()`, so a step of the wall clock cannot make them negative or long. The offset
    follows the wall clock by at most 50 ms per `adjust` call; a step of more than 5 s forward is taken at once, but
    only while nothing is running.
    """

    __slots__ = ("_offset_us",)

    def __init__(self) -> None:
        self._offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000 + self._offset_us

    def adjust(self, *, idle: bool) -> None:
        """Follow the wall clock; called about once a second."""
        gap_us = time.time_ns() // 1000 - self.now_us()
        if gap_us > STEP_AFTER_US and idle:
            self._offset_us += gap_us
        else:
            self._offset_us += max(-SLEW_US_PER_ADJUST, min(SLEW_US_PER_ADJUST, gap_us))


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
