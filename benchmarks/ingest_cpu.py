"""Whose CPU a report takes: of the client that sends it, of the web process, of PostgreSQL. Together they bound what a
machine takes in, however well the three overlap.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Protocol

import psutil


class Process(Protocol):
    """A server under measurement."""

    def cpu_s(self) -> float: ...


@dataclass(frozen=True)
class Cpu:
    """CPU seconds; `database_s` is None where PostgreSQL is not this benchmark's own."""

    client_s: float
    web_s: float
    database_s: float | None

    @classmethod
    def now(cls, web: Process) -> Cpu:
        return cls(time.process_time(), web.cpu_s(), _database_s())

    def since(self, before: Cpu) -> Cpu:
        database_s = None
        if self.database_s is not None and before.database_s is not None:
            database_s = self.database_s - before.database_s
        return Cpu(self.client_s - before.client_s, self.web_s - before.web_s, database_s)


def _database_s() -> float | None:
    """Of all processes of the throwaway server: children of this one."""
    spent = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("postgres"):
                times = process.cpu_times()
                spent.append(times.user + times.system)
    return sum(spent) if spent else None


@dataclass(frozen=True)
class ReportCost:
    """Microseconds of CPU for one report of `records` records."""

    records: int
    client_us: float
    web_us: float
    database_us: float
    signature_us: float

    def lines(self, peer_us: float, multiple: float) -> list[str]:
        """What bounds reports of this size beside a peer that takes `peer_us` a record, of one core at a time.

        CPU beside CPU: what else the machine does takes from the rate of one lane what it leaves to the next.
        """
        cores = os.cpu_count() or 1
        room_us = cores * peer_us * self.records
        whole_us = self.client_us + self.web_us + self.database_us
        return [
            f"the peer takes {peer_us:.0f} us of CPU a record, of one core at a time: {multiple:g} times its rate leave"
            f" {room_us / multiple:.0f} us of {cores} cores for a report of {self.records}, client and PostgreSQL"
            f" included; its signature alone takes {self.signature_us:.0f}, measured alone",
            f"it takes {self.client_us:.0f} us in the client, {self.web_us:.0f} in the web process and"
            f" {self.database_us:.0f} in PostgreSQL: {cores} cores of which none waits take in"
            f" {cores * 1e6 / whole_us * self.records:,.0f} records/s, {room_us / whole_us:.1f} times the peer",
        ]
