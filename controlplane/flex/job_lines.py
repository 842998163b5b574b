"""What an act on a band does to each job of the pool: its room before and after, and who would miss a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from controlplane.flex.band_now import BandFigures, JobRoom

JOBS_SHOWN: Final = 10
MISSES, MAKES, LATE, IN_TIME = "misses", "makes", "late", "in_time"
WORDS: Final = {
    MISSES: ("bad", "Would miss it"),
    LATE: ("risk", "Misses it already"),
    MAKES: ("ok", "Would make it"),
    IN_TIME: ("", "In time"),
}
"""Grade and word of what becomes of a job's deadline."""


@dataclass(frozen=True, slots=True)
class JobLine:
    """A job with a deadline ahead, one room for each column of a preview: the first is now, the last is expected."""

    rooms: tuple[JobRoom, ...]

    @property
    def room(self) -> JobRoom:
        return self.rooms[0]

    @property
    def slacks(self) -> tuple[float | None, ...]:
        """None: nothing serves batch then."""
        return tuple(room.slack for room in self.rooms)

    @property
    def becomes(self) -> str:
        """One of WORDS' keys."""
        before, after = self.rooms[0].in_time, self.rooms[-1].in_time
        if after:
            return IN_TIME if before else MAKES
        return MISSES if before else LATE

    @property
    def grade(self) -> str:
        return WORDS[self.becomes][0]

    @property
    def word(self) -> str:
        return WORDS[self.becomes][1]

    @property
    def delay_us(self) -> int | None:
        """How much later its work is done, at the pace of the slots that serve batch; None where that is never."""
        before, after = self.rooms[0].done_at, self.rooms[-1].done_at
        if before is None or after is None:
            return None
        return max(0, (after - before) // timedelta(microseconds=1))

    def noted(self) -> dict[str, Any]:
        """As the audit log keeps it. No name: who may see the job is asked when it is shown."""
        first, last = self.rooms[0], self.rooms[-1]
        return {
            "job": str(first.job.uuid),
            "slack_before": first.slack,
            "slack_expected": last.slack,
            "becomes": self.becomes,
            "done_expected": None if last.done_at is None else last.done_at.isoformat(),
        }


def job_lines(found: Sequence[BandFigures]) -> dict[str, Any]:
    """`jobs` and `jobs_more` of an effect, by deadline. Where not all fit, those that would miss theirs are there."""
    lines = _lines(found)
    first = sorted(range(len(lines)), key=lambda at: (lines[at].becomes != MISSES, at))[:JOBS_SHOWN]
    return {"jobs": tuple(lines[at] for at in sorted(first)), "jobs_more": max(0, len(lines) - JOBS_SHOWN)}


def said_of_jobs(found: Sequence[BandFigures], best_effort: int) -> list[str]:
    """Sentences: how many jobs would miss a deadline that they make now, and who waits without one."""
    lines = _lines(found)
    misses = sum(line.becomes == MISSES for line in lines)
    said = []
    if misses:
        said.append(f"{_jobs(misses)} in time now would miss {'its' if misses == 1 else 'their'} deadline: see below.")
    elif lines:
        said.append("No job that is in time now would miss its deadline by it.")
    if best_effort:
        said.append(f"{_jobs(best_effort)} without a deadline {'waits' if best_effort == 1 else 'wait'} longer.")
    return said


def _lines(found: Sequence[BandFigures]) -> list[JobLine]:
    """Every job with its room in each column."""
    return [JobLine(rooms) for rooms in zip(*(one.rooms for one in found), strict=True)]


def _jobs(count: int) -> str:
    return f"{count:,} {'job' if count == 1 else 'jobs'}"


def jobs_noted(lines: Sequence[JobLine]) -> dict[str, Any]:
    """`jobs` of an audit entry; none without jobs."""
    return {"jobs": [line.noted() for line in lines]} if lines else {}
