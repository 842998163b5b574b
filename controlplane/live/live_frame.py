"""One frame for every viewer of its topic: the ASGI message and the websocket's own bytes, each made once at most."""

from __future__ import annotations

from typing import Any

from websockets.extensions.permessage_deflate import PerMessageDeflate
from websockets.frames import Frame, Opcode

WINDOW_BITS = 15
"""Of what the server compresses. No context is kept from frame to frame, or the bytes could not be shared."""
CLIENT_WINDOW_BITS = 12
"""Of what a browser compresses, which says little."""

_deflate = PerMessageDeflate(
    remote_no_context_takeover=False,
    local_no_context_takeover=True,
    remote_max_window_bits=CLIENT_WINDOW_BITS,
    local_max_window_bits=WINDOW_BITS,
)


class LiveFrame:
    """A frame of the live protocol: `message` for ASGI, `plain` and `deflated` for a websocket."""

    __slots__ = ("_deflated", "_plain", "message", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.message: dict[str, Any] = {"type": "websocket.send", "text": text.decode()}
        self._plain: bytes | None = None
        self._deflated: bytes | None = None

    @property
    def plain(self) -> bytes:
        """For a connection without extensions."""
        if self._plain is None:
            self._plain = Frame(Opcode.TEXT, self.text).serialize(mask=False)
        return self._plain

    @property
    def deflated(self) -> bytes:
        """For a connection with permessage-deflate, no context taken over by the server, and `WINDOW_BITS`."""
        if self._deflated is None:
            self._deflated = Frame(Opcode.TEXT, self.text).serialize(mask=False, extensions=[_deflate])
        return self._deflated
