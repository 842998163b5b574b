"""The real web application on a loopback port, in a thread of the test: for clients that want a socket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.core.asgi import get_asgi_application

from controlplane.jobs.upload_door import UploadDoor
from tests.web_thread import WebThread


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of the server while the block runs."""
    door = UploadDoor(fallback=get_asgi_application())
    try:
        with WebThread(door, ws="none", log_level="warning") as server:
            yield server.address
    finally:
        door._threads.shutdown()
