"""What came of the jobs that an act was to delay: what its page said of each, and how that job stands now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.contrib.auth.models import AnonymousUser, User

from controlplane.audit.models import AuditEntry
from controlplane.flex import band_now
from controlplane.flex.band_now import JobRoom
from controlplane.flex.job_lines import WORDS
from controlplane.jobs.models import Job
from controlplane.jobs.queries import visible_jobs

DELAYING: Final = ("flex.recall", "flex.freeze", "agent.drain")
_ENDED: Final = {
    Job.State.CANCELLED: ("", "Cancelled"),
    Job.State.EXPIRED: ("bad", "Ended undone, its time was over"),
    Job.State.FAILED: ("bad", "Was not taken"),
}


@dataclass(frozen=True, slots=True)
class JobCame:
    """A job of an act. `expected` is the word that stood there, `grade` and `word` are of now; slack None is unknown,
    or has no number. `job` is None where the person may not see its tenant; `done_at` where it is not done.
    """

    job: Job | None
    deadline: datetime | None
    slack_before: float | None
    slack_expected: float | None
    slack_now: float | None
    expected: str
    grade: str
    word: str
    done_at: datetime | None


def jobs_of(entry: AuditEntry, user: User | AnonymousUser, now: datetime) -> list[JobCame]:
    """In the order of the page before the act; empty for acts that delay none, and for entries of before they were
    kept. Jobs that were deleted since are left out.
    """
    noted = (entry.after or {}).get("jobs") or []
    if entry.action not in DELAYING or not noted:
        return []
    uuids = [one["job"] for one in noted]
    rows = {str(job.uuid): job for job in Job.objects.filter(uuid__in=uuids).select_related("pool")}
    seen = {str(job.uuid): job for job in visible_jobs(user).filter(uuid__in=uuids)}
    rooms = _rooms(list(rows.values()), now)
    return [
        _came(one, rows[one["job"]], seen.get(one["job"]), rooms.get(rows[one["job"]].pk), now)
        for one in noted
        if one["job"] in rows
    ]


def _rooms(jobs: list[Job], now: datetime) -> dict[int, JobRoom]:
    """By job id, of those that still run towards a deadline."""
    pools = {job.pool_id: job.pool for job in jobs if job.state == Job.State.RUNNING}
    return {room.job.pk: room for pool in pools.values() for room in band_now.read(pool, now).figures().rooms}


def _came(noted: Mapping[str, Any], row: Job, seen: Job | None, room: JobRoom | None, now: datetime) -> JobCame:
    grade, word = _standing(row, room, now)
    return JobCame(
        job=seen,
        deadline=row.deadline,
        slack_before=noted["slack_before"],
        slack_expected=noted["slack_expected"],
        slack_now=None if room is None else room.slack,
        expected=WORDS[noted["becomes"]][1],
        grade=grade,
        word=word,
        done_at=row.finished_at,
    )


def _standing(row: Job, room: JobRoom | None, now: datetime) -> tuple[str, str]:
    """Grade and word. Done is by the instant it finished; a job that runs is judged by its room."""
    if row.state in _ENDED:
        return _ENDED[Job.State(row.state)]
    if row.deadline is not None and (row.finished_at or now) > row.deadline:
        return "bad", "Missed"
    if row.finished_at is not None:
        return "ok", "Done in time"
    if room is None:
        return "unknown", "Not counted now"
    if room.in_time:
        return "", "In time at this pace"
    return "risk", "Would miss it at this pace"
