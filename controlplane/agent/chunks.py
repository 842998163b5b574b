"""The chunked coding of HTTP/1.1 (RFC 9112, section 7.1), as far as whole chunks pass without a parser."""

from __future__ import annotations

import re
from typing import Final

SIZE_LINE_MAX: Final = 8
"""Bytes of the line before a usual chunk, with a part of its end."""
SIZES_KEPT: Final = 4_096
_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,6}")
_sizes: Final[dict[bytes, int]] = {}
READS_KNOWN: Final = 4_096
"""Reads under so many bytes are known by their length, if they are one chunk."""


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


def _lines_by_read() -> list[bytes]:
    """By bytes of a read."""
    lines = [b""] * READS_KNOWN
    size, line = 1, b"1\r\n"
    while len(line) + size + 2 < READS_KNOWN:
        lines[len(line) + size + 2] = line
        size += 1
        line = b"%x\r\n" % size
    return lines


LINES_BY_READ: Final = _lines_by_read()
"""The line with which a read begins that is one chunk, by the bytes of the read; empty where no chunk is that long."""


def unchunked(chunks: bytes) -> bytes:
    """What some whole chunks hold."""
    parts, at = [], 0
    while at < len(chunks):
        line = chunks.index(b"\r\n", at)
        end = line + 2 + int(chunks[at:line], 16)
        parts.append(chunks[line + 2 : end])
        at = end + 2
    return b"".join(parts)
