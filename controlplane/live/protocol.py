"""Live frames straight to the transport: encoded, and compressed, once for all viewers of a topic.

uvicorn's own protocol builds every message anew for each connection, compressed in a context of its own. This one asks
for compression without a context from message to message, so that one frame's bytes are right for every connection, and
offers the consumer a way to write them (`scope["extensions"]["flexband.live"]`). Start it with
`--ws controlplane.config.asgi:WebSocketProtocol`; with any other the frames go through ASGI, at more work each.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.extensions.permessage_deflate import PerMessageDeflate, ServerPerMessageDeflateFactory
from websockets.http11 import Request
from websockets.protocol import State

from controlplane.live.live_frame import CLIENT_WINDOW_BITS, WINDOW_BITS, LiveFrame

EXTENSION: Final = "flexband.live"


class LiveProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol with `write_frame` beside its `send`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._compressed = False
        if self.config.ws_per_message_deflate:
            self.conn.available_extensions = [
                ServerPerMessageDeflateFactory(
                    server_no_context_takeover=True,
                    server_max_window_bits=WINDOW_BITS,
                    client_max_window_bits=CLIENT_WINDOW_BITS,
                )
            ]

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            return
        shared = _shared_compression(self.conn.extensions)
        if shared is not None:
            self._compressed = shared
            extensions: dict[str, Any] = self.scope["extensions"]  # type: ignore[assignment]
            extensions[EXTENSION] = {"write": self.write_frame}

    def write_frame(self, frame: LiveFrame) -> bool:
        """Writes a frame at once; False, with nothing written, where the reader is behind or the connection is not
        open: then `send` waits for the reader, or says what happened."""
        if not self.writable.is_set() or self.close_sent or self.disconnected or not self.handshake_complete:
            return False
        if self.conn.state is not State.OPEN:
            return False
        self.transport.write(frame.deflated if self._compressed else frame.plain)
        return True


def _shared_compression(extensions: list[Any]) -> bool | None:
    """Whether frames go compressed; None where the bytes of one connection would be wrong for another."""
    if not extensions:
        return False
    (only, *more) = extensions
    if more or not isinstance(only, PerMessageDeflate):
        return None
    return True if only.local_no_context_takeover and only.local_max_window_bits == WINDOW_BITS else None
