"""Items of a job, page by page: by line, so that a page deep in ten million is as quick as the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from django.db import connection

from controlplane.core.batch_items import ItemState
from controlplane.jobs.models import Job

PAGE_MOST: Final = 500
LINE_MOST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ItemRow:
    """An item as people see it. `status` is the engine's last answer to a parked or done item, None for none."""

    line: int
    custom_id: str
    state: str
    attempt: int
    failures: int
    reason: str
    status: int | None


# LATERAL with OFFSET 0: each line looks up its own body and result, so that no plan joins whole tables for a page.
_PAGE_SQL = """
SELECT i.line, b.custom_id, i.state, i.attempt, i.failures, i.reason, r.status
FROM (SELECT * FROM jobs_item WHERE day = %(day)s AND job_id = %(job)s AND line > %(after)s {only}
      ORDER BY line LIMIT %(limit)s) i
CROSS JOIN LATERAL (SELECT custom_id FROM jobs_itembody
                    WHERE day = %(day)s AND job_id = %(job)s AND line = i.line OFFSET 0) b
LEFT JOIN LATERAL (SELECT status FROM jobs_itemresult
                   WHERE day = %(day)s AND job_id = %(job)s AND line = i.line OFFSET 0) r ON true
ORDER BY i.line
"""
_ALL_SQL: Final = _PAGE_SQL.format(only="")
_ONE_STATE_SQL: Final = {state: _PAGE_SQL.format(only=f"AND state = {state.value}") for state in ItemState}


def line_of(text: str) -> int:
    """The line that a page begins after. Raises ValueError for what is no number of a line."""
    # more digits than a line can have are not read at all
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(LINE_MOST)) and int(text) <= LINE_MOST):
        raise ValueError("Write the number of a line.")
    return int(text)


def items_page(job: Job, *, after: int = 0, limit: int = 50, state: ItemState | None = None) -> list[ItemRow]:
    """At most `limit` items after a line, in order; of one state where given. A job without rows has none."""
    if not job.has_items:
        return []
    given = {"day": job.day, "job": job.pk, "after": after, "limit": min(limit, PAGE_MOST)}
    with connection.cursor() as cursor:
        cursor.execute(_ALL_SQL if state is None else _ONE_STATE_SQL[state], given)
        rows = cursor.fetchall()
    return [ItemRow(row[0], row[1], ItemState(row[2]).name.lower(), *row[3:]) for row in rows]
