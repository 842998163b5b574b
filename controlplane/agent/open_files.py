"""How many files this process may have open, and how many of them clients may take.

Whoever connects takes a file before a key is known. Without a share of its own the agent could no longer write its
journal, reach the inference server or report.
"""

from __future__ import annotations

import resource
from typing import Final

CLIENTS_MAX: Final = 8192
UNBOUNDED: Final = 1 << 20


def raise_limit() -> int:
    """Raise the soft limit to the hard one, as any process may; returns how many files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # Some systems have no hard limit and still refuse to have none.
            hard = soft
    return UNBOUNDED if hard == resource.RLIM_INFINITY else hard


def clients_max(files: int) -> int:
    """Connections of clients: half of the files, because each may need one to the inference server."""
    return max(1, min(CLIENTS_MAX, files // 2))
