"""Heads of HTTP messages that were read before: clients and servers send the same ones over and over.

A head is remembered without the digits of its content-length, the one part that changes from message to message. Two
heads that are equal without them and have digits at the same place mean the same, so that the parser need not see the
second one.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

HEAD_BYTES_MAX: Final = 1_536
"""Longer heads are parsed each time: what is remembered is bounded."""
LENGTH_DIGITS_MAX: Final = 7
_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"\r\ncontent-length: "
_LENGTH_TITLED: Final = b"\r\nContent-Length: "

M = TypeVar("M")


class Cut:
    """A whole message whose head tells the length of its body: the head without that length, and where the body is."""

    __slots__ = ("body_at", "head")

    def __init__(self, head: bytes, body_at: int) -> None:
        self.head = head
        self.body_at = body_at


def cut(data: bytes) -> Cut | None:
    """A read that is one message, no more and no less, with a content-length; None for everything else."""
    end = data.find(_END)
    if end < 0 or end > HEAD_BYTES_MAX:
        return None
    at = data.find(_LENGTH, 0, end)
    if at < 0:
        at = data.find(_LENGTH_TITLED, 0, end)
        if at < 0:
            return None
    at += 18
    stop = data.find(b"\r", at)
    digits = data[at:stop]
    if not digits.isdigit() or len(digits) > LENGTH_DIGITS_MAX or end + 4 + int(digits) != len(data):
        return None
    return Cut(data[:at] + data[stop:end], end + 4)


class KnownHeads(Generic[M]):
    """What remembered heads mean, at most so many.

    Where heads never come twice (ids or times in them) remembering is in vain: after a table that was hardly used, the
    next ones are let pass for a while.
    """

    __slots__ = ("_heads", "_hits", "_most", "_pass")

    def __init__(self, most: int) -> None:
        self._heads: dict[bytes, M] = {}
        self._most = most
        self._hits = 0
        self._pass = 0

    def get(self, head: bytes) -> M | None:
        found = self._heads.get(head)
        if found is not None:
            self._hits += 1
        return found

    def put(self, head: bytes, meaning: M) -> None:
        if self._pass:
            self._pass -= 1
            return
        if len(self._heads) >= self._most:
            if self._hits < len(self._heads):
                self._pass = 16 * self._most
            self._heads.clear()
            self._hits = 0
        self._heads[head] = meaning

    def __len__(self) -> int:
        return len(self._heads)
