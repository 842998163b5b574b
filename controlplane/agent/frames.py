"""Framing of the journal: length and CRC-32 before every entry, so that a file cut off at any byte reads clean.

The checksum begins with the place in the file: bytes that stand somewhere else than they were written, such as an end
that is there twice, do not hold. Nor does an end of zeros, which a file system may leave where power was lost.
"""

import struct
import zlib
from dataclasses import dataclass

HEADER = struct.Struct("<II")
FRAME_BYTES_MAX = 64 * 1024 * 1024


def header(payload: bytes, at: int) -> bytes:
    """What stands before an entry; `at` is the place of the header in the file."""
    return HEADER.pack(len(payload), zlib.crc32(payload, at + 1))


@dataclass(frozen=True)
class FramesRead:
    """Whole entries from the start as (offset of the payload, payload), and the bytes they take.

    `valid_bytes` below the file's size means that the rest is the torn tail of an interrupted write, or damage.
    """

    entries: list[tuple[int, bytes]]
    valid_bytes: int


def read_frames(data: bytes) -> FramesRead:
    """Entries up to the first that is cut off or whose checksum does not hold."""
    entries: list[tuple[int, bytes]] = []
    at, placeless = 0, _is_placeless(data)
    while at + HEADER.size <= len(data):
        length, crc = HEADER.unpack_from(data, at)
        start, end = at + HEADER.size, at + HEADER.size + length
        if length > FRAME_BYTES_MAX or end > len(data):
            break
        payload = data[start:end]
        if zlib.crc32(payload, at + 1) != crc and not (placeless and length and zlib.crc32(payload) == crc):
            break
        entries.append((start, payload))
        at = end
    return FramesRead(entries, at)


def _is_placeless(data: bytes) -> bool:
    """Whether a file was begun by a release whose checksums do not hold the place; later entries of it may."""
    if len(data) < HEADER.size:
        return False
    length, crc = HEADER.unpack_from(data)
    payload = data[HEADER.size : HEADER.size + length]
    return bool(length) and len(payload) == length and zlib.crc32(payload) == crc
