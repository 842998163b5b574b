"""The real web application on a loopback port, in a thread of the test: for clients that want a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from django.core.asgi import get_asgi_application

from controlplane.jobs.upload_door import UploadDoor


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of the server while the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    door = UploadDoor(fallback=get_asgi_application())
    server = uvicorn.Server(uvicorn.Config(door, host="127.0.0.1", port=port, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        door._threads.shutdown()
