"""The web process's sockets and pages on a port, served by a thread with a loop of its own."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

import uvicorn

from controlplane.config.asgi import WebSocketProtocol, application
from controlplane.embedded.ports import free_port

START_S = 60


class WebThread:
    """Serves from its making until `stop` or the end of its block; `options` are uvicorn's."""

    def __init__(self, app: Any = application, **options: Any) -> None:
        self.port = free_port()
        config = uvicorn.Config(
            app, host="127.0.0.1", port=self.port, lifespan="off",
            **{"log_level": "error", "ws": WebSocketProtocol, **options},
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + START_S
        while not self.server.started:
            assert self.thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)

    def __enter__(self) -> WebThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
