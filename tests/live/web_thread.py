"""The web process's sockets and pages on a port, served by a thread with a loop of its own."""

import threading
import time
from typing import Any

import uvicorn

from controlplane.config.asgi import WebSocketProtocol, application
from controlplane.embedded.ports import free_port


class WebThread:
    """Serves from its making until `stop`; `options` are uvicorn's."""

    def __init__(self, **options: Any) -> None:
        self.port = free_port()
        config = uvicorn.Config(
            application, host="127.0.0.1", port=self.port, log_level="error", lifespan="off",
            **{"ws": WebSocketProtocol, **options},
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
