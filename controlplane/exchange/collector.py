"""The memory of a process that takes reports: hundreds of small objects each, and arrays of megabytes for a group."""

import ctypes
import gc

# Reports are trees, not cycles. With the usual 700 every report would start several collections for nothing, and
# every tenth of those would walk the objects of all reports in flight.
YOUNG_OBJECTS = 50_000
GENERATIONS = (YOUNG_OBJECTS, 20, 50)

# Of glibc's malloc.h. An array from here on is mapped, and zeroed by the kernel page by page, each time it is made.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_FROM_BYTES = 32 * 1024 * 1024
"""The most that glibc takes."""
KEPT_BYTES = 64 * 1024 * 1024


def spare_reports() -> None:
    """Puts everything loaded so far out of the collector's sight and lets it run by the work of many reports.

    What arrays of a group free is kept for those of the next one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GENERATIONS)
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """False where the C library has no such option: then all works, with a tenth more work for a large report."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
