"""What must hold of jobs after any kill, read from rows and files: one result and one charge an item, nothing stuck."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from controlplane.core.batch_items import ItemState
from controlplane.core.reasons import Outcome
from controlplane.wire.report import FLAG_NOT_CHARGED

_CHARGE = "charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos"
_OUTCOMES = {outcome.code: outcome.value for outcome in Outcome}


@dataclass(frozen=True)
class Effort:
    """What a job's items took: records that nobody pays for are repeated or lost work."""

    items: int
    attempts: int
    attempts_most: int
    again: int
    records: int
    uncharged_by_outcome: dict[str, int]
    uncharged_gpu_us: int
    charged_gpu_us: int
    charge_nanos: int

    def line(self) -> str:
        return (
            f"{self.items:,} items, {self.attempts:,} attempts (most {self.attempts_most}, {self.again:,} items more "
            f"than once), {self.records:,} records; not charged: {self.uncharged_by_outcome or 'none'}, "
            f"{self.uncharged_gpu_us / 1e6:.1f} s of GPU time beside {self.charged_gpu_us / 1e6:.1f} s that were; "
            f"charged {self.charge_nanos:,} nanos"
        )


def job_of_batch(database: psycopg.Connection, batch_id: str) -> int:
    row = database.execute("SELECT job_id FROM jobs_batch WHERE uuid = %s", (batch_id.removeprefix("batch_"),))
    (job,) = row.fetchone() or (None,)
    assert job is not None, "a batch that completed has a job"
    return int(job)


def check_items(database: psycopg.Connection, job: int, count: int) -> None:
    """Every item is done, has one result, and that result one record, which is charged."""
    states = dict(database.execute("SELECT state, count(*) FROM jobs_item WHERE job_id = %s GROUP BY 1", (job,)))
    assert states == {int(ItemState.DONE): count}, {ItemState(state).name: rows for state, rows in states.items()}
    results = database.execute(
        "SELECT count(*), count(DISTINCT line), count(DISTINCT request_id), count(*) FILTER (WHERE status = 200)"
        " FROM jobs_itemresult WHERE job_id = %s",
        (job,),
    ).fetchone()
    assert results == (count, count, count, count), "one result an item, each of a request of its own"
    charged = database.execute(
        f"SELECT count(*), count(DISTINCT r.line) FROM usage_record u JOIN jobs_itemresult r ON r.request_id ="
        f" u.request_id WHERE r.job_id = %s AND u.job_id = %s AND u.outcome = %s AND u.flags & %s = 0"
        f" AND u.status = 200 AND {_CHARGE} > 0",
        (job, job, Outcome.COMPLETED.code, FLAG_NOT_CHARGED),
    ).fetchone()
    assert charged == (count, count), "the request of each result has one record, which is charged"
    also = database.execute(
        f"SELECT count(*) FROM usage_record WHERE job_id = %s AND (flags & %s = 0 OR {_CHARGE} <> 0)",
        (job, FLAG_NOT_CHARGED),
    ).fetchone()
    assert also == (count,), "no other record of the job is charged"


def check_job(database: psycopg.Connection, job: int, count: int) -> None:
    """The counts on the job are those of its rows."""
    row = database.execute(
        "SELECT state, items, items_completed, items_parked, items_cancelled, charge_nanos, output_tokens_done"
        " FROM jobs_job WHERE id = %s",
        (job,),
    ).fetchone()
    sums = database.execute(
        f"SELECT sum({_CHARGE})::bigint, sum(output_tokens)::bigint FROM usage_record WHERE job_id = %s AND"
        " flags & %s = 0",
        (job, FLAG_NOT_CHARGED),
    ).fetchone()
    assert row == ("completed", count, count, 0, 0, *sums)


def stuck(database: psycopg.Connection) -> dict[str, int]:
    """What should be empty once every job has ended and every agent has reported."""
    looks = {
        "items not ended": "SELECT count(*) FROM jobs_item WHERE state IN (0, 1)",
        "items held": "SELECT coalesce(sum(held), 0) FROM jobs_itemholder",
        "batches open": "SELECT count(*) FROM jobs_batch WHERE state NOT IN ('completed', 'cancelled', 'expired')",
        "jobs running": "SELECT count(*) FROM jobs_job WHERE state IN ('running', 'importing')",
        "reports set aside": "SELECT count(*) FROM usage_quarantine",
        "job money still reserved": "SELECT coalesce(sum(amount_nanos - spent_nanos), 0) FROM budgets_lease"
        " WHERE job IS NOT NULL AND agent_id IS NULL AND state = 'open'",
    }
    found = {}
    for name, sql in looks.items():
        row = database.execute(sql).fetchone()
        assert row is not None
        if row[0]:
            found[name] = int(row[0])
    return found


def check_usage(database: psycopg.Connection) -> None:
    """Cursors and records say the same."""
    records = database.execute("SELECT count(*), count(DISTINCT request_id) FROM usage_record").fetchone()
    cursors = database.execute("SELECT sum(records)::bigint FROM usage_agentcursor").fetchone()
    assert records is not None and cursors is not None
    assert records == (cursors[0], cursors[0]), "cursors and records disagree"


def unsettled_nanos(database: psycopg.Connection, tenant: str) -> int:
    """Charges of a tenant's records that its hard budget has not counted: none once every report is in, though killed
    processes did not say what they spent last and some items ran twice. Raises AssertionError for more or less.
    """
    row = database.execute(
        f"SELECT (SELECT coalesce(sum({_CHARGE}), 0)::bigint FROM usage_record u WHERE u.tenant_id = t.id)"
        " - (SELECT coalesce(sum(settled_nanos), 0)::bigint FROM budgets_budgetwindow w"
        "    JOIN budgets_budget b ON b.id = w.budget_id WHERE b.tenant_id = t.id)"
        " FROM tenants_tenant t WHERE t.slug = %s",
        (tenant,),
    ).fetchone()
    assert row is not None
    assert row[0] == 0, f"the hard budget counted {-row[0]:,} nanos more than the records charge"
    return int(row[0])


def check_output(text: str, custom_ids: Sequence[str], output_tokens: int) -> None:
    """The file has each line once, in the order of the input, with the answer to it."""
    answers = [json.loads(line) for line in text.splitlines()]
    assert [each["custom_id"] for each in answers] == list(custom_ids)
    assert {each["response"]["status_code"] for each in answers} == {200}
    assert {each["error"] for each in answers} == {None}
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in answers} == {output_tokens}


def effort(database: psycopg.Connection, job: int) -> Effort:
    items = database.execute(
        "SELECT count(*), sum(attempt)::int, max(attempt), count(*) FILTER (WHERE attempt > 1) FROM jobs_item"
        " WHERE job_id = %s",
        (job,),
    ).fetchone()
    rows = database.execute(
        f"SELECT outcome, flags & %s = 0, count(*), sum(gpu_us)::bigint, sum({_CHARGE})::bigint FROM usage_record"
        " WHERE job_id = %s GROUP BY 1, 2",
        (FLAG_NOT_CHARGED, job),
    ).fetchall()
    assert items is not None
    uncharged = {_OUTCOMES[outcome]: count for outcome, charged, count, *_ in rows if not charged}
    return Effort(
        *items,
        records=sum(row[2] for row in rows),
        uncharged_by_outcome=dict(sorted(uncharged.items())),
        uncharged_gpu_us=sum(row[3] for row in rows if not row[1]),
        charged_gpu_us=sum(row[3] for row in rows if row[1]),
        charge_nanos=sum(row[4] for row in rows),
    )
