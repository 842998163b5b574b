"""Threads beside the one that requests pass: they wait for the disk, press reports and write files."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

NICER: Final = 10
"""On one core such a thread gets a tenth of the time while requests are at work, and all of it while none is."""
THREADS: Final = 4


def beside_requests() -> ThreadPoolExecutor:
    """Threads that give way to the one that starts them."""
    return ThreadPoolExecutor(THREADS, "beside", initializer=_give_way)


def _give_way() -> None:
    """Linux counts niceness by thread; elsewhere it is the process's and stays as it is."""
    if os.uname().sysname == "Linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICER))
