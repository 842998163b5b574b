"""Batch requests of clients with loops of their own: how much of their work is here, and by when it is due.

Items are counted by their jobs; of what clients send the control plane knows only what a report says.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Final

from controlplane.wire.report import DirectWork

if TYPE_CHECKING:
    from controlplane.agent.call import Call

ROWS_MAX: Final = 32
"""Of a class in one report without a job, and as many that name one."""
PARTS: Final = 256
"""Of the class's default deadline: what is due within one part goes as one row."""
SECOND_US: Final = 1_000_000


class _Part:
    """Requests that are due within one part; `due` in the order in which they came, which is that of their dues."""

    __slots__ = ("due", "gpu_us")

    def __init__(self) -> None:
        self.due: dict[int, int] = {}
        self.gpu_us = 0

    @property
    def first_due_us(self) -> int:
        return next(iter(self.due.values()))


_Place = tuple[int, str, int]


class DirectBacklog:
    """Work of direct batch requests from their admission to their end, by class, job named and instant due."""

    def __init__(self) -> None:
        self._parts: dict[_Place, _Part] = {}
        self._where: dict[int, tuple[_Place, int]] = {}
        """Serial of a request -> its part and its estimated GPU time."""

    def add(self, call: Call) -> None:
        """A batch request that a client sent was admitted; others are passed over."""
        if call.deadline_us is None or call.item is not None:
            return
        policy = call.klass.policy
        width_us = max(SECOND_US, policy.default_deadline_s * SECOND_US // PARTS)
        place = (policy.id, _job_named(call.exchange.job), call.deadline_us // width_us)
        part = self._parts.get(place)
        if part is None:
            part = self._parts[place] = _Part()
        part.due[call.serial] = call.deadline_us
        part.gpu_us += call.gpu_us
        self._where[call.serial] = (place, call.gpu_us)

    def remove(self, call: Call) -> None:
        """It ended, however."""
        found = self._where.pop(call.serial, None)
        if found is None:
            return
        place, gpu_us = found
        part = self._parts[place]
        del part.due[call.serial]
        part.gpu_us -= gpu_us
        if not part.due:
            del self._parts[place]

    def of_class(self, class_id: int) -> list[DirectWork]:
        """What is here of a class. Where rows are too many, neighbours are told as one, due with the first of them.

        A job that a request names stands in one row, for its own count is kept by the control plane.
        """
        without: list[tuple[int, int]] = []
        by_job: dict[str, tuple[int, int]] = {}
        for (number, job, _), part in self._parts.items():
            if number != class_id:
                continue
            due_us, gpu_us = part.first_due_us, part.gpu_us
            if not job:
                without.append((due_us, gpu_us))
            elif job in by_job:
                first_us, total_us = by_job[job]
                by_job[job] = (min(first_us, due_us), total_us + gpu_us)
            else:
                by_job[job] = (due_us, gpu_us)
        rows = [DirectWork("", due_us, gpu_us) for due_us, gpu_us in _merged(sorted(without))]
        most = sorted(by_job.items(), key=lambda row: -row[1][1])[:ROWS_MAX]
        return rows + [DirectWork(job, due_us, gpu_us) for job, (due_us, gpu_us) in most]


def _job_named(text: str) -> str:
    """The id in a client's header; empty where it can be no job's."""
    if not text:
        return ""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return ""


def _merged(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most ROWS_MAX of (due, GPU time) in order, as many neighbours in each."""
    size = -(-len(parts) // ROWS_MAX) or 1
    return [(parts[at][0], sum(gpu_us for _, gpu_us in parts[at : at + size])) for at in range(0, len(parts), size)]
