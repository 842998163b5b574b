"""Connections at their edges: a client that sends no more, and a table of connections that is full."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from heapq import nsmallest
from typing import Final, Protocol

PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim answer: every HTTP/1.1 client passes over it."""
PROBE_PAUSES_S: Final = (0.01, 0.02, 0.07, 0.2, 0.3)
"""Between probes; the last one again and again. The host of a client that is gone refuses one, the next one fails."""
SHED_AT_ONCE: Final = 64
"""Connections that one look at all of them finds to close."""
LOOK_PAUSE_S: Final = 0.01
"""Between two such looks: a flood of connections costs few of them."""


class Probing:
    """Interim answers to a client that has sent all it will, until the transport closes or the answer has begun.

    Whether it only closed its sending half or is gone, what it sent does not tell.
    """

    def __init__(self, transport: asyncio.Transport, answering: Callable[[], bool]) -> None:
        self._transport = transport
        self._answering = answering
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self._probe()

    def _probe(self) -> None:
        if self._transport.is_closing() or self._answering():
            return
        self._transport.write(PROBE)
        pause_s = PROBE_PAUSES_S[min(self._sent, len(PROBE_PAUSES_S) - 1)]
        self._sent += 1
        self._loop.call_later(pause_s, self._probe)


class Sheddable(Protocol):
    """A connection that may be closed while it is idle."""

    since_s: float

    def idle(self) -> bool:
        """Whether nothing is on its way, in or out, and it is not closing."""

    def shut(self) -> None:
        """Close it now."""


class IdleShedder:
    """Finds the connections of a table that have been idle longest."""

    def __init__(self, connections: Collection[Sheddable]) -> None:
        self._connections = connections
        self._found: deque[Sheddable] = deque()
        self._looked_s = -LOOK_PAUSE_S

    def shed(self, newest: Sheddable, now_s: float) -> bool:
        """Close the connection that was idle longest, but not the newest. Says whether there was one."""
        if not self._found and now_s - self._looked_s >= LOOK_PAUSE_S:
            self._looked_s = now_s
            idle = (one for one in self._connections if one is not newest and one.idle())
            self._found.extend(nsmallest(SHED_AT_ONCE, idle, key=lambda one: one.since_s))
        while self._found:
            connection = self._found.popleft()
            if connection in self._connections and connection.idle():
                connection.shut()
                return True
        return False
