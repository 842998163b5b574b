"""How an agent's clock stands to the control plane's. Times are microseconds."""

from __future__ import annotations

from msgspec import Struct


class ClockReading(Struct, array_like=True, frozen=True):
    """The agent's clock minus the control plane's, from the exchange with the shortest round trip of the last ones.

    It is right within `error_us`, half of that round trip.
    """

    offset_us: int
    error_us: int


OFF_BY_US = 1_000_000
"""A clock is only called wrong, and reckoned with, beyond this and the reading's error."""


def ahead_us(reading: ClockReading | None) -> int:
    """How far the agent's clock is ahead of the control plane's where it is certainly wrong, else 0.

    Ends of leases are the control plane's times. Both sides compare them with the agent's time less this, by the
    reading in the report: what one takes for over is over for the other.
    """
    wrong = reading is not None and abs(reading.offset_us) - reading.error_us > OFF_BY_US
    return reading.offset_us if reading is not None and wrong else 0
