"""The chunked coding of HTTP/1.1 (RFC 9112, section 7.1), as far as whole chunks pass without a parser."""

from __future__ import annotations

import re
from typing import Final

SIZE_LINE_MAX: Final = 8
"""Bytes of the line before a usual chunk, with a part of its end."""
SIZES_KEPT: Final = 4_096
_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,6}")
_sizes: Final[dict[bytes, int]] = {}


def chunk(data: bytes) -> bytes:
    """One chunk; nothing for no bytes, which would be the end."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def size_of(line: bytes) -> int:
    """Bytes of a chunk by the line before it; 0 for the last one, and for a line that holds anything but a size."""
    size = _sizes.get(line)
    if size is None:
        size = int(line, 16) if _SIZE.fullmatch(line) else 0
        if len(_sizes) < SIZES_KEPT:
            _sizes[line] = size
    return size


def unchunked(chunks: bytes) -> bytes:
    """What some whole chunks hold."""
    parts, at = [], 0
    while at < len(chunks):
        line = chunks.index(b"\r\n", at)
        end = line + 2 + int(chunks[at:line], 16)
        parts.append(chunks[line + 2 : end])
        at = end + 2
    return b"".join(parts)
