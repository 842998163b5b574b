"""Waiting for something for a while."""

from __future__ import annotations

import asyncio
import contextlib


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set or the time is over, whichever comes first.

    Not `asyncio.wait_for`: that of Python 3.11 loses a cancellation that comes as its wait ends, and who was told to
    stop goes on.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
