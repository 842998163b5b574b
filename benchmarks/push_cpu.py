"""Where the CPU time of a push goes: what the control plane takes for an agent's policy, and what simulating it takes.

Agents, servers, database and broker share the machine, and ten thousand agents in one process are most of what runs
there: how long all of it takes says more of them than of the control plane. These figures tell them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import psutil
import psycopg
import redis

T = TypeVar("T")

CONTROL_PLANE = ("publisher", "worker", "web process")
"""Parts that are the control plane's (or the peer's in its place): what is published counts, though this process does
it."""


@dataclass(frozen=True)
class Parts:
    """Processes by what they are; those of the database are its server with all that work for it."""

    plain: Mapping[str, psutil.Process]
    database: psutil.Process | None

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far: comparable on a machine that others use too."""
        spent = {name: _own_s(process) for name, process in self.plain.items()}
        if self.database is not None:
            ended = self.database.cpu_times()
            spent["database"] = (
                sum(map(_own_s, (self.database, *self.database.children())))
                + ended.children_user
                + ended.children_system
            )
        return spent


def parts(database_url: str, redis_url: str, **plain: psutil.Process) -> Parts:
    """With the database's and the broker's processes where they run on this machine."""
    named = {name.replace("_", " "): process for name, process in plain.items()}
    told: Any = redis.Redis.from_url(redis_url).info("server")
    broker = _process(int(told["process_id"]), ("redis", "valkey"))
    if broker is not None:
        named["broker"] = broker
    with psycopg.connect(database_url) as own:
        backend = _process(own.info.backend_pid, ("postgres",))
        return Parts(named, None if backend is None else backend.parent())


def _process(pid: int, names: Sequence[str]) -> psutil.Process | None:
    """None where that number is something else's: the server runs on another machine."""
    try:
        found = psutil.Process(pid)
        return found if any(name in found.name() for name in names) else None
    except psutil.Error:
        return None


def _own_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and the CPU seconds of its thread."""
    began = time.thread_time()
    return function(), time.thread_time() - began


def of_round(before: Mapping[str, float], after: Mapping[str, float], published_s: float) -> dict[str, float]:
    """CPU seconds of a round by part: what this process published is not its agents'."""
    spent = {name: after[name] - before[name] for name in before}
    return {**spent, "agents": spent["agents"] - published_s, "publisher": published_s}


def per_agent_us(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median microseconds of each part for one agent."""
    return {name: median(one["cpu"][name] / len(one["acked"]) for one in rounds) * 1e6 for name in rounds[0]["cpu"]}


def control_plane_us(part: Mapping[str, float]) -> float:
    """Without database and broker."""
    return sum(part.get(name, 0.0) for name in CONTROL_PLANE)


def lines(ours: Mapping[str, float], peer: Mapping[str, float]) -> list[str]:
    """Both sides by part, and what of it is the control plane's."""
    found = []
    for who, part in (("ours", ours), ("peer", peer)):
        by_part = ", ".join(f"{name} {us:,.0f}" for name, us in sorted(part.items(), key=lambda pair: -pair[1]))
        share = 100 * part["agents"] / sum(part.values())
        found.append(
            f"CPU us for an agent, {who}: control plane {control_plane_us(part):,.0f}"
            f" ({by_part}); simulating the agent is {share:.0f} % of all"
        )
    times = control_plane_us(peer) / control_plane_us(ours)
    with_database = (control_plane_us(peer) + peer.get("database", 0.0)) / (
        control_plane_us(ours) + ours.get("database", 0.0)
    )
    found.append(
        f"the peer's control plane takes {times:.1f}x the CPU of ours for an agent, with the databases"
        f" {with_database:.1f}x"
    )
    return found
