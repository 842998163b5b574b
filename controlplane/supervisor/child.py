"""What is supervised: a child process, when it counts as ready, how often it is started again."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from controlplane.embedded.processes import RunAs

URL_TIMEOUT_S = 2.0

# A callable that says "yes", an http address that answers 2xx or 3xx, or a pattern that a line of the log matches.
Ready = Callable[[], bool] | str | re.Pattern[str]


@dataclass(frozen=True)
class RestartPolicy:
    """How often a child that ended is started again, and with what pause.

    limit: starts after the first; 0 means never again. The pause doubles from backoff_s to backoff_s_max. A child that
    was ready for healthy_after_s has its count set back.
    """

    limit: int = 5
    backoff_s: float = 0.5
    backoff_s_max: float = 10.0
    healthy_after_s: float = 30.0

    def pause_s(self, restart: int) -> float:
        """Seconds to wait before the `restart`-th new start (from 1)."""
        return min(self.backoff_s_max, self.backoff_s * 2.0 ** (restart - 1))


NEVER = RestartPolicy(limit=0)


@dataclass(frozen=True)
class Child:
    """A child process.

    name: as a person says it ("web", "agent gpu-1"); unique. env: the whole environment; None takes the supervisor's.
    ready: see `Ready`; None means as soon as it has run for a moment. before_start: called before every start, off the
    supervising thread, may block. stop_order: lower stops earlier; equal ones stop against the order of their starts.
    essential: the whole run ends when this child has given up; otherwise only a line says so.
    over: the exit statuses of a child that has nothing more to do; it is not started again and the run goes on.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    ready: Ready | None = None
    ready_timeout_s: float = 60.0
    stop_order: int = 0
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 10.0
    restart: RestartPolicy = RestartPolicy()
    essential: bool = True
    over: frozenset[int] = frozenset()
    before_start: Callable[[], None] | None = None
    cwd: Path | None = None
    run_as: RunAs | None = None

    @property
    def log_name(self) -> str:
        """File name of the log, without a folder."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") + ".log"


def is_ready(ready: Ready | None, log: Path, log_start: int) -> bool:
    """Ask once whether a child is ready; its log begins at `log_start`."""
    if ready is None:
        return True
    if isinstance(ready, str):
        return url_answers(ready)
    if isinstance(ready, re.Pattern):
        with open(log, "rb") as handle:
            handle.seek(log_start)
            return ready.search(handle.read().decode(errors="replace")) is not None
    return ready()


def url_answers(url: str) -> bool:
    """True when `url` answers with a status of 2xx or 3xx."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never asked for at a proxy
    try:
        with opener.open(url, timeout=URL_TIMEOUT_S) as answer:
            return int(answer.status) < 400
    except (OSError, urllib.error.URLError, ValueError):
        return False
