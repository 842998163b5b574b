"""Reports that are to be in one group: held until the last of them is there, however long the machine takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from controlplane.exchange.group_commit import Groups

Answer = TypeVar("Answer")

HELD_S = 60.0


def held_until(monkeypatch: pytest.MonkeyPatch, groups: Groups, size: int) -> None:
    """The next group is taken when so many are waiting in it, and not by time."""
    offer = groups.offer

    def counted(item, done):
        offer(item, done)
        if len(groups._waiting) == size:
            monkeypatch.setattr(groups, "_window_s", 0.0)
            groups._flush()

    monkeypatch.setattr(groups, "_window_s", HELD_S)
    monkeypatch.setattr(groups, "offer", counted)


async def sent_in_turn(groups: Groups, sends: list[Callable[[], Awaitable[Answer]]]) -> list[asyncio.Future[Answer]]:
    """Each is sent when the one before it waits in the group."""
    sending = []
    async with asyncio.timeout(HELD_S):
        for number, send in enumerate(sends, start=1):
            sending.append(asyncio.ensure_future(send()))
            while len(groups._waiting) < number and not sending[-1].done() and number < len(sends):
                await asyncio.sleep(0.005)
    return sending
