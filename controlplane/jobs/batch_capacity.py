"""What a pool has for batch: its floor, what its band may lend at most, and what a batch slot is worth."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, Final

from django.db import connection

from controlplane.contracts.models import WorkloadClass
from controlplane.core.flex_policy import exact
from controlplane.core.job_admission import BatchCapacity
from controlplane.fleet.models import Pool, Slot, SlotInterval
from controlplane.jobs.models import BatchEfficiency

MEASURED_OVER: Final = timedelta(hours=1)
BELIEVED_FOR: Final = timedelta(hours=2)
METERED_LEAST_US: Final = 60_000_000
REQUESTS_LEAST: Final = 20
EFFICIENCY_LEAST: Final = 0.25
EFFICIENCY_MOST: Final = 4.0
_PPM: Final = 1_000_000


def capacity_of(pool: Pool, now: datetime) -> BatchCapacity:
    """The pool's slots for batch as its policy has them, each worth its efficiency; a lost slot counts for nothing.

    A freeze does not count, for it ends; without a tested safe rate nothing is ever lent. Where any slot serves any
    class, the batch class's minimum share is the floor and the rest is what it may have while nobody else wants it.
    """
    worth = exact(efficiencies([pool.pk], now).get(pool.pk, 1.0))
    bands = _bands(pool)
    if pool.isolation == Pool.Isolation.SHARED:
        share_ppm = (
            WorkloadClass.objects.filter(slug=pool.batch_class).values_list("min_share_ppm", flat=True).first() or 0
        )
        floor = Fraction(len(bands) * share_ppm, _PPM)
        return BatchCapacity(floor=floor * worth, band=(len(bands) - floor) * worth)
    flex = bands.count(Slot.Band.FLEX)
    lends = pool.isolation == Pool.Isolation.RESERVED and _tested(pool.safe_rate, now)
    most = min(flex, flex if pool.max_lent is None else pool.max_lent) if lends else 0
    return BatchCapacity(floor=bands.count(Slot.Band.BATCH) * worth, band=most * worth)


def _bands(pool: Pool) -> list[str]:
    lost = SlotInterval.objects.filter(slot__pool=pool, ended_at__isnull=True, state="lost").values("slot_id")
    rows = Slot.objects.filter(pool=pool, removed_at__isnull=True).exclude(pk__in=lost)
    return list(rows.values_list("band", flat=True))


def _tested(safe_rate: Any, now: datetime) -> bool:
    """Whether a table of safe rates is there and in force."""
    if not isinstance(safe_rate, dict) or not safe_rate.get("entries"):
        return False
    until = safe_rate.get("valid_until")
    if not until:
        return True
    try:
        at = datetime.fromisoformat(str(until))
    except ValueError:
        return False
    return now < (at if at.tzinfo else at.replace(tzinfo=UTC))


def efficiencies(pool_ids: Iterable[int], now: datetime) -> dict[int, float]:
    """Pool id -> batch efficiency, where it was measured lately; unknown is missing and counts as 1."""
    return {pool_id: efficiency for pool_id, (efficiency, _) in believed(pool_ids, now).items()}


def believed(pool_ids: Iterable[int], now: datetime) -> dict[int, tuple[float, datetime]]:
    """The same, each with the instant from which on it is unknown again."""
    rows = BatchEfficiency.objects.filter(pool_id__in=list(pool_ids), measured_at__gt=now - BELIEVED_FOR)
    return {
        pool_id: (efficiency, measured_at + BELIEVED_FOR)
        for pool_id, efficiency, measured_at in rows.values_list("pool_id", "efficiency", "measured_at")
    }


# Meters count all GPU time of the pool's batch class, repeated work too; the work is that of requests that completed.
_MEASURE_SQL = """
WITH batch AS (
    SELECT p.id AS pool_id, c.id AS class_id, p.prefill_us_per_token AS prefill, p.decode_us_per_token AS decode
    FROM fleet_pool p JOIN contracts_workloadclass c ON c.slug = p.batch_class
    WHERE p.archived_at IS NULL
), metered AS (
    SELECT b.pool_id, sum(u.gpu_us)::bigint AS us
    FROM usage_slotusageminute u
    JOIN fleet_slot s ON s.id = u.slot_id
    JOIN batch b ON b.pool_id = s.pool_id AND b.class_id = u.class_id
    WHERE u.minute >= %(since)s AND u.minute < %(until)s
    GROUP BY b.pool_id
), worked AS (
    SELECT b.pool_id, sum(r.requests) AS requests,
           sum(r.prompt_tokens * b.prefill + r.output_tokens * b.decode)::bigint AS us
    FROM usage_rollupminute r JOIN batch b ON b.pool_id = r.pool_id AND b.class_id = r.class_id
    WHERE r.minute >= %(since)s AND r.minute < %(until)s AND r.outcome = %(completed)s
    GROUP BY b.pool_id
)
INSERT INTO jobs_batchefficiency AS e (pool_id, efficiency, work_us, metered_us, measured_at)
SELECT m.pool_id, greatest(%(least)s, least(%(most)s, w.us::float8 / m.us)), w.us, m.us, %(now)s
FROM metered m JOIN worked w USING (pool_id)
WHERE m.us >= %(metered)s AND w.requests >= %(requests)s AND w.us > 0
ORDER BY m.pool_id
ON CONFLICT (pool_id) DO UPDATE SET efficiency = EXCLUDED.efficiency, work_us = EXCLUDED.work_us,
    metered_us = EXCLUDED.metered_us, measured_at = EXCLUDED.measured_at
WHERE e.measured_at <= EXCLUDED.measured_at
"""


def measure_efficiencies(now: datetime, *, completed: int) -> int:
    """Measures every pool's batch efficiency over the last whole hour of minutes; returns how many were measured.

    Under METERED_LEAST_US of GPU time or REQUESTS_LEAST requests it stays unknown. `completed` is the outcome's code.
    """
    # the newest minutes are still being folded
    until = now.replace(second=0, microsecond=0) - timedelta(minutes=2)
    given: dict[str, Any] = {
        "since": until - MEASURED_OVER, "until": until, "now": now, "completed": completed,
        "least": EFFICIENCY_LEAST, "most": EFFICIENCY_MOST, "metered": METERED_LEAST_US, "requests": REQUESTS_LEAST,
    }  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(_MEASURE_SQL, given)
        return int(cursor.rowcount)
