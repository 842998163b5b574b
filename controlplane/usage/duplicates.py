"""The hourly audit: attempts that stand in the records more than once, whichever agents sent them.

Within one agent's epoch the cursor takes every report once. What it cannot see is the same record from two agents, or
from two epochs: a state directory that was copied, a restored machine. The audit looks through each closed hour of
receipt and everything that may hold an earlier copy. It is a check, not a gate: records and rollups stay as they are,
and what they hold too much is written beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connection, transaction

from controlplane.usage.models import AuditedHour, UsageRecord

HOUR = timedelta(hours=1)
GRACE = timedelta(minutes=2)
"""A transaction that began within the hour has ended by then."""
EARLIEST_COPY = timedelta(days=15)
"""No record is taken longer after its end than the age limit of spools, which is 14 days."""
HOURS_MAX = 24 * 7
# Any fixed number: one audit at a time.
AUDIT_LOCK = 0x64757065

_SUMS = (
    "prompt_tokens", "cached_tokens", "output_tokens", "gpu_us",
    "charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "charge_gpu_nanos",
)  # fmt: skip
_KEYS = ("pool_id", "tenant_id", "class_id", "model_id", "rate_version", "outcome", "ended_at")

_AUDIT_SQL = """
WITH span AS (
    SELECT count(*) AS records, greatest(least(min(arrived_at), %(hour)s) - interval '1 minute', %(earliest)s) AS since
    FROM usage_record WHERE received_at >= %(hour)s AND received_at < %(until)s
), doubled AS (
    SELECT request_id, attempt FROM usage_record
    WHERE received_at >= (SELECT since FROM span) AND received_at < %(until)s
    GROUP BY request_id, attempt HAVING count(*) > 1 AND max(received_at) >= %(hour)s
), numbered AS (
    SELECT r.*, row_number() OVER (
        PARTITION BY r.request_id, r.attempt ORDER BY r.received_at, r.agent_id, r.charge_output_nanos) AS number
    FROM usage_record r JOIN doubled USING (request_id, attempt)
    WHERE r.received_at >= (SELECT since FROM span) AND r.received_at < %(until)s
), written AS (
    INSERT INTO usage_duplicaterecord AS d (
        request_id, attempt, hour, found_at, copies, agent_ids, same_content, first_received_at, {keys}, {sums})
    SELECT request_id, attempt, %(hour)s, %(now)s, count(*), jsonb_agg(agent_id ORDER BY number),
        count(DISTINCT ({keys}, {sums})) = 1, min(received_at), {second}, {extra}
    FROM numbered GROUP BY request_id, attempt ORDER BY request_id, attempt
    ON CONFLICT (request_id, attempt) DO UPDATE SET
        hour = EXCLUDED.hour, copies = EXCLUDED.copies, agent_ids = EXCLUDED.agent_ids,
        same_content = EXCLUDED.same_content, {grown}
    WHERE d.copies < EXCLUDED.copies
)
SELECT (SELECT records FROM span), (SELECT count(*) FROM doubled)
""".format(  # noqa: S608 - the names are constants
    keys=", ".join(_KEYS),
    sums=", ".join(_SUMS),
    # a copy's own key: what is too much stands in the rollups under it
    second=", ".join(f"(array_agg({name} ORDER BY number))[2]" for name in _KEYS),
    extra=", ".join(f"sum({name}) FILTER (WHERE number > 1)" for name in _SUMS),
    grown=", ".join(f"{name} = EXCLUDED.{name}" for name in _SUMS),
)


@dataclass(frozen=True)
class HourAudit:
    """What one hour held: `duplicates` counts attempts with more than one record, the newest of them in this hour."""

    hour: datetime
    records: int
    duplicates: int


def audit_hour(hour: datetime, now: datetime) -> HourAudit:
    """Looks through one hour of receipt. Running it again writes nothing new."""
    given = {"hour": hour, "until": hour + HOUR, "earliest": hour - EARLIEST_COPY, "now": now}
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_AUDIT_SQL, given)
            records, duplicates = cursor.fetchone()
        AuditedHour.objects.update_or_create(
            hour=hour, defaults={"records": records, "duplicates": duplicates, "audited_at": now}
        )
    return HourAudit(hour, records, duplicates)


def audit_closed_hours(now: datetime) -> list[HourAudit]:
    """Audits the hours that are closed and were not looked through, oldest first, at most HOURS_MAX of them."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", (AUDIT_LOCK,))
        if not cursor.fetchone()[0]:
            return []
        try:
            return [audit_hour(hour, now) for hour in _due(now)]
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", (AUDIT_LOCK,))


def _due(now: datetime) -> list[datetime]:
    last = AuditedHour.objects.order_by("-hour").values_list("hour", flat=True).first()
    if last is None:
        first = UsageRecord.objects.order_by("received_at").values_list("received_at", flat=True).first()
        if first is None:
            return []
        begin = first.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    else:
        begin = last + HOUR
    hours: list[datetime] = []
    while begin + HOUR + GRACE <= now and len(hours) < HOURS_MAX:
        hours.append(begin)
        begin += HOUR
    return hours
