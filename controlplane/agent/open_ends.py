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
ZEROS_MAX: Final = 8
"""Before one chunk's size. Some clients read sizes of at most 16 digits, and those here have at most six."""
SHED_AT_ONCE: Final = 64
"""Connections that one look at all of them finds to close."""
LOOK_PAUSE_S: Final = 0.01
"""Between two such looks: a flood of connections costs few of them."""


class Answering(Protocol):
    """An answer that is being given."""

    chunked: bool
    streaming: bool
    zeros: int
    """Probes since its last chunk."""


class Probing:
    """Probes to a client that has sent all it will, until the transport closes.

    Whether it only closed its sending half or is gone, what it sent does not tell. Before its answer begins a probe is
    an interim answer. In a stream each chunk is one, and where the inference server is silent a zero before the size of
    the next chunk: sizes may have leading zeros (RFC 9112, section 7.1), and the bytes of the body stay as they are.
    """

    def __init__(self, transport: asyncio.Transport, current: Callable[[], Answering | None]) -> None:
        self._transport = transport
        self._current = current
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self._probe()

    def _probe(self) -> None:
        if self._transport.is_closing():
            return
        current = self._current()
        if current is None or not current.streaming:
            self._transport.write(PROBE)
        elif current.chunked and current.zeros < ZEROS_MAX and not self._transport.get_write_buffer_size():
            current.zeros += 1
            self._transport.write(b"0")
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
