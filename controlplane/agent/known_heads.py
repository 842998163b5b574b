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


class _Kept(Generic[M]):
    """What one remembered head means, and how often that was of use."""

    __slots__ = ("hits", "meaning")

    def __init__(self, meaning: M) -> None:
        self.meaning = meaning
        self.hits = 0


class _Shelf:
    """The heads that one owner has in the table. `skips` more of its heads are not remembered."""

    __slots__ = ("heads", "skips")

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.skips = 0


class KnownHeads(Generic[M]):
    """What remembered heads mean, at most so many, and at most so many of one owner.

    An owner that sends more of them loses its own only. Where heads never come twice (ids or times in them) remembering
    is in vain: after a shelf that was hardly used, the next heads of its owner are let pass for a while.
    """

    __slots__ = ("_heads", "_most", "_most_of_one", "_shelves")

    def __init__(self, most: int, most_of_one: int = 0) -> None:
        self._heads: dict[bytes, _Kept[M]] = {}
        self._shelves: dict[int, _Shelf] = {}
        self._most = most
        self._most_of_one = most_of_one or most

    def get(self, head: bytes) -> M | None:
        found = self._heads.get(head)
        if found is None:
            return None
        found.hits += 1
        return found.meaning

    def put(self, head: bytes, meaning: M, owner: int = 0) -> None:
        """Remember a head for its owner: a number that nobody can make up, such as the id of a key that was checked."""
        shelf = self._shelves.get(owner)
        if shelf is None:
            shelf = self._shelves[owner] = _Shelf()
        if shelf.skips:
            shelf.skips -= 1
            return
        if len(shelf.heads) >= self._most_of_one:
            self._clear(shelf)
        if len(self._heads) >= self._most:
            self._heads.clear()
            for other in self._shelves.values():
                other.heads = []
        self._heads[head] = _Kept(meaning)
        shelf.heads.append(head)

    def _clear(self, shelf: _Shelf) -> None:
        gone = [kept for head in shelf.heads if (kept := self._heads.pop(head, None)) is not None]
        if sum(kept.hits for kept in gone) < len(gone):
            shelf.skips = 16 * self._most_of_one
        shelf.heads = []

    def __len__(self) -> int:
        return len(self._heads)
