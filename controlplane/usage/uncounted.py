"""How much of the last day's usage is in no total, or in it twice, beside what was counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any, Final

from django.db import connection
from django.db.models import F, Sum

from controlplane.core.period import US_PER_QUARTER, from_us, to_us
from controlplane.fleet.models import Agent
from controlplane.usage.models import DuplicateRecord
from controlplane.usage.queries import Scope, totals

OVER: Final = timedelta(days=1)
SHARE_MOST: Final = Fraction(1, 1_000)
"""More of the records, or of the spend, than this is an alert."""
_CHARGES = ("charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "charge_gpu_nanos")

# A copy within one report was counted once: nothing of it is missing.
_ASIDE_SQL = """
SELECT reason, agent_id, sum(records)::bigint, coalesce(sum(nanos), 0),
       coalesce(sum(records) FILTER (WHERE nanos IS NULL), 0)::bigint,
       count(*) FILTER (WHERE reason = 'reports_lost' AND payload -> 'records' = 'null'::jsonb), min(at)
FROM usage_quarantine
WHERE at >= %s AND resolved_at IS NULL AND (records > 0 OR reason = 'reports_lost')
  AND reason <> 'duplicate_in_report'
GROUP BY reason, agent_id ORDER BY 3 DESC, 6 DESC, reason, agent_id
"""


@dataclass(frozen=True, slots=True)
class AsideShare:
    """Undecided entries of one reason and agent. `unpriced` of `records` have no charge that could be true.

    `unknown_reports` are lost reports of which nobody knows how many records they held.
    """

    reason: str
    agent_id: int | None
    agent: str
    records: int
    nanos: int
    unpriced: int
    unknown_reports: int


@dataclass(frozen=True, slots=True)
class Uncounted:
    """`copies` and `copies_nanos` are what attempts that stand twice add too much to the `counted` ones."""

    counted: int = 0
    counted_nanos: int = 0
    copies: int = 0
    copies_nanos: int = 0
    since: datetime | None = None
    groups: tuple[AsideShare, ...] = field(default=())

    @property
    def aside(self) -> int:
        return sum(group.records for group in self.groups)

    @property
    def aside_nanos(self) -> int:
        return sum(group.nanos for group in self.groups)

    @property
    def unpriced(self) -> int:
        return sum(group.unpriced for group in self.groups)

    @property
    def unknown_reports(self) -> int:
        return sum(group.unknown_reports for group in self.groups)

    @property
    def share(self) -> Fraction:
        """Of all records that were reported, those that are in no total or in it twice."""
        return _share(self.aside + self.copies, self.counted + self.aside)

    @property
    def spend_share(self) -> Fraction:
        """The same of charges; with unpriced records it is more than this, nobody knows by how much."""
        return _share(self.aside_nanos + self.copies_nanos, self.counted_nanos + self.aside_nanos)

    @property
    def worst(self) -> Fraction:
        return max(self.share, self.spend_share)


def _share(part: int, whole: int) -> Fraction:
    return Fraction(part, max(whole, part)) if part > 0 else Fraction(0)


def uncounted(now: datetime) -> Uncounted:
    """The last day's, from a whole quarter of an hour on. What people decided on is no longer in it.

    One statement each for what was set aside and for copies; what was counted is read only beside some of these.
    """
    since = from_us(to_us(now - OVER) // US_PER_QUARTER * US_PER_QUARTER)
    with connection.cursor() as cursor:
        cursor.execute(_ASIDE_SQL, [since])
        rows = cursor.fetchall()
    copies = DuplicateRecord.objects.filter(hour__gte=since).aggregate(
        records=Sum(F("copies") - 1), **{name: Sum(name) for name in _CHARGES}
    )
    if not rows and not copies["records"]:
        return Uncounted()
    whole = totals(Scope(since, now + OVER))[0]
    return Uncounted(
        counted=whole.requests,
        counted_nanos=whole.charge_nanos,
        copies=copies["records"] or 0,
        copies_nanos=sum(int(copies[name] or 0) for name in _CHARGES),
        since=min((row[6] for row in rows), default=None),
        groups=_named(rows),
    )


def _named(rows: list[tuple[Any, ...]]) -> tuple[AsideShare, ...]:
    names = dict(Agent.objects.filter(pk__in={row[1] for row in rows if row[1]}).values_list("pk", "name"))
    return tuple(
        AsideShare(reason, agent_id, names.get(agent_id, ""), records, int(nanos), unpriced, unknown)
        for reason, agent_id, records, nanos, unpriced, unknown, _ in rows
    )
