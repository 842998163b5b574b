"""Log files of children: written by the children themselves, kept to a size by us."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

BYTES_MAX = 10 * 1024 * 1024
KEPT = 3


def rotate_if_large(log: Path, *, bytes_max: int = BYTES_MAX, kept: int = KEPT) -> bool:
    """Copy a log that has grown past `bytes_max` to `.1` (older ones move up) and empty it; True when that was done.

    The child keeps its open file, which appends, so it goes on at the start of the emptied file.
    """
    try:
        if log.stat().st_size <= bytes_max:
            return False
        for number in range(kept - 1, 0, -1):
            older = log.with_name(f"{log.name}.{number}")
            if older.exists():
                older.replace(log.with_name(f"{log.name}.{number + 1}"))
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
    except FileNotFoundError:
        return False
    except OSError:
        os.truncate(log, 0)  # no room for the copy: rather lose old lines than fill the disk
    return True
