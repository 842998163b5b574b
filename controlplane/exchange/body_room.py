"""Bodies that are held before anybody has looked at their signature: bounded in bytes, for one process."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from controlplane.exchange.problems import Refusal

BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of all connections together, from the first byte until the answer."""
ARRIVING_BYTES_MAX: Final = BODIES_BYTES_MAX // 2
"""Of those, in bodies of which a part is still to come: slow senders leave room for what comes at once."""
BODY_BYTES_LEAST: Final = 2 * 1024
"""What a small body counts for: its headers and its place in a group take memory, too."""


class BodyRoom:
    """Room for the bodies of one process."""

    def __init__(self, bytes_max: int = BODIES_BYTES_MAX, arriving_max: int = ARRIVING_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.arriving_max = arriving_max
        self.held = 0
        self.arriving = 0

    def hold(self) -> Held:
        """Room for one body, which grows as it arrives."""
        return Held(self)


class Held:
    """What one body takes of the room until it is let go. Use it in a `with`, or call `release`."""

    __slots__ = ("_arriving", "_bytes", "_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._bytes = 0
        self._arriving = 0

    def arriving(self, size: int) -> None:
        """So many bytes are here and more will come. Raises Refusal: busy when there is no room for them."""
        self._set(size, size)
        if self._room.arriving > self._room.arriving_max:
            self._refuse()

    def whole(self, size: int) -> None:
        """All `size` bytes are here. Raises Refusal: busy when there is no room for them."""
        self._set(max(size, BODY_BYTES_LEAST), 0)
        if self._room.held > self._room.bytes_max:
            self._refuse()

    def release(self) -> None:
        """The body is answered, or its connection is gone before it was whole."""
        self._set(0, 0)

    def _set(self, size: int, arriving: int) -> None:
        room = self._room
        room.held += size - self._bytes
        room.arriving += arriving - self._arriving
        self._bytes, self._arriving = size, arriving

    def _refuse(self) -> None:
        self.release()
        raise Refusal("busy", "The control plane holds too many bodies that it has not looked at. Send it again.")

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
