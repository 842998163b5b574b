"""What the last words of a child say about why it ended, and the sentences that tell people so."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """Causes that a new start does not cure."""

    PORT_IN_USE = "port in use"
    DISK_FULL = "disk full"


PATTERNS = (
    (Cause.DISK_FULL, ("no space left on device", "[errno 28]", "disk quota exceeded")),
    (Cause.PORT_IN_USE, ("address already in use", "[errno 98]", "[errno 48]")),
)
ADVICE = {
    Cause.PORT_IN_USE: "its port is in use by another program; stop that program or choose another port",
    Cause.DISK_FULL: "the disk is full; free some space and start again",
}


def cause_of(words: str) -> Cause | None:
    """The incurable cause that `words`, the end of a log, tell of; None when there is none."""
    lower = words.lower()
    for cause, patterns in PATTERNS:
        if any(pattern in lower for pattern in patterns):
            return cause
    return None


def ending(returncode: int) -> str:
    """How a process ended, from its return code (negative: the signal)."""
    return f"was killed by signal {-returncode}" if returncode < 0 else f"exited with status {returncode}"
