"""A cursor as functions of both sides take it: psycopg's own at the agents' door, Django's around one elsewhere."""

from typing import Any, Protocol


class SqlCursor(Protocol):
    """What the two have in common."""

    @property
    def rowcount(self) -> int: ...

    def execute(self, query: str, params: Any = ..., /) -> Any: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...
