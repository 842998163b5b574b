"""Pages that others serve about themselves, fetched within bounds of time and size; redirects are not followed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import aiohttp

TIMEOUT_S: Final = 1.0
PAGE_BYTES_MAX: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Page:
    """Status and what came of the body; not `whole` when the connection ended before it did."""

    status: int
    body: bytes
    whole: bool


class PageTooLarge(Exception):
    """A body over the bound."""


FAILURES: Final = (aiohttp.ClientError, TimeoutError, OSError, PageTooLarge)
"""What fetching raises."""


class Pages:
    """One server's pages; used inside one event loop, closed at the end."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, address: str) -> Page:
        """Raises FAILURES."""
        async with self._opened().get(address, allow_redirects=False) as response:
            parts: list[bytes] = []
            size, whole = 0, True
            try:
                async for part in response.content.iter_any():
                    size += len(part)
                    if size > PAGE_BYTES_MAX:
                        raise PageTooLarge
                    parts.append(part)
            except aiohttp.ClientPayloadError:
                whole = False
            return Page(response.status, b"".join(parts), whole)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Proxies of the environment are not used: the server is named on the command line.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=4),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                headers={"accept-encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


def reason_of(error: BaseException) -> str:
    """A closed set: it becomes a label."""
    if isinstance(error, PageTooLarge):
        return "too_large"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "refused" if isinstance(error, aiohttp.ClientConnectorError) else "broken"
