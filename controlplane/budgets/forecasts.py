"""Forecasts of budgets from the day rollups of their tenants: what a window will hold, when its limit is reached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime

from django.db import connection

from controlplane.core.period import Window, day_windows, from_us, load_zone
from controlplane.core.spend_forecast import DAYS_MIN, DaySpend, Piece, SpendForecast, forecast_spend

DAYS_BACK = 28


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast as pages show it, instants as UTC datetimes; `forecast` None says that it is unknown, with `days`."""

    forecast: SpendForecast | None
    days: int

    @property
    def days_missing(self) -> int:
        return max(0, DAYS_MIN - self.days)

    @property
    def reached_at(self) -> datetime | None:
        return _at(self.forecast.point_us) if self.forecast else None

    @property
    def earliest_at(self) -> datetime | None:
        return _at(self.forecast.earliest_us) if self.forecast else None

    @property
    def latest_at(self) -> datetime | None:
        return _at(self.forecast.latest_us) if self.forecast else None


def _at(us: int | None) -> datetime | None:
    return None if us is None else from_us(us)


# Charges by day of a tenant and its descendants. Root 0 are the days on which anybody reported: on the others the fleet
# was not seen, so that they are unknown and not without spend. Tenants are looked up one by one (LATERAL): the planner
# cannot know how few a recursion finds, and would read every tenant's days.
_DAYS_SQL = """
WITH RECURSIVE span AS (
    SELECT (%(now)s::timestamptz AT TIME ZONE billing_zone)::date AS today FROM tenants_installation WHERE id = 1
), below (root, id, depth) AS (
    SELECT id, id, 0 FROM tenants_tenant WHERE id = ANY(%(tenants)s)
    UNION ALL
    SELECT b.root, child.id, b.depth + 1
      FROM below b CROSS JOIN LATERAL (SELECT id FROM tenants_tenant WHERE parent_id = b.id OFFSET 0) child
     WHERE b.depth < 32
)
SELECT b.root, own.day, sum(own.nanos)::bigint
  FROM below b CROSS JOIN span CROSS JOIN LATERAL (
       SELECT r.day,
              sum(r.charge_prompt_nanos + r.charge_cached_nanos + r.charge_output_nanos + r.charge_gpu_nanos) AS nanos
         FROM usage_rollupday r
        WHERE r.tenant_id = b.id AND r.day >= span.today - %(back)s AND r.day < span.today GROUP BY r.day) own
 GROUP BY 1, 2
UNION ALL
SELECT 0, asked.day::date, 0
  FROM span CROSS JOIN generate_series(span.today - %(back)s, span.today - 1, interval '1 day') AS asked (day)
 WHERE EXISTS (SELECT FROM usage_rollupday r WHERE r.day = asked.day::date)
"""


def spend_days(tenant_ids: Iterable[int], now: datetime) -> dict[int, list[DaySpend]]:
    """Tenant -> complete days of the billing zone from its first charge on, oldest first, at most DAYS_BACK; one query.

    A day without a charge counts as spent nothing when others were served that day, else it is left out.
    """
    wanted = sorted(set(tenant_ids))
    if not wanted:
        return {}
    with connection.cursor() as cursor:
        cursor.execute(_DAYS_SQL, {"now": now, "tenants": wanted, "back": DAYS_BACK})
        rows = cursor.fetchall()
    seen = sorted(day for root, day, _ in rows if root == 0)
    charged: dict[int, dict[date, int]] = {}
    for root, day, nanos in rows:
        if root:
            charged.setdefault(root, {})[day] = nanos
    return {
        root: [DaySpend(day.weekday(), days.get(day, 0)) for day in seen if day >= min(days)]
        for root, days in charged.items()
    }


def outlook(
    days: list[DaySpend], window: Window, zone: str, now: datetime, *, settled_nanos: int, limit_nanos: int
) -> Outlook:
    """The forecast of a window that holds `now`."""
    pieces = []
    for day in day_windows(load_zone(zone), now, window.end):
        starts, ends = max(day.start_us, Window(now, now).start_us), min(day.end_us, window.end_us)
        pieces.append(Piece(starts, ends, date.fromisoformat(day.label).weekday()))
    found = forecast_spend(days, pieces, settled_nanos=settled_nanos, limit_nanos=limit_nanos)
    return Outlook(found, len(days))
