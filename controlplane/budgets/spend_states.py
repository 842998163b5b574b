"""Whether a budget is used up: the one rule, as a value for pages and as SQL for lists that the database sorts.

The limit is the budget's own with the increases of the instant. A hard limit that was lowered counts as lowered at
once, whatever leases are still out; until they are in, more may be spent than it says.
"""

from datetime import datetime, timedelta

from django.db.models.expressions import RawSQL

NEAR_PART = 5
"""A budget is near its limit when a fifth of it or less is neither settled nor leased."""
STOPPED, OVER, NEAR, FORECAST, OK = "stopped", "over", "near", "forecast", "ok"
KEPT_FOR = timedelta(hours=1)
"""A forecast that was kept longer ago counts no longer: nobody made it again."""


def spend_state(*, settled_nanos: int, leased_nanos: int, limit_nanos: int, hard: bool) -> str:
    """`stopped` (hard and nothing left), `over` (soft, passed), `near` (80 % settled and leased), `ok`."""
    if settled_nanos >= limit_nanos:
        return STOPPED if hard else OVER
    if settled_nanos + leased_nanos >= limit_nanos - limit_nanos // NEAR_PART:
        return NEAR
    return OK


# One pass over budgets with their present windows, increases and forecasts: lists of thousands are sorted by it.
_STATED = f"""
SELECT budget.id, budget.tenant_id,
       CASE WHEN sums.settled >= sums.most AND budget.hard THEN '{STOPPED}'
            WHEN sums.settled >= sums.most THEN '{OVER}'
            WHEN sums.settled >= sums.most - sums.most / {NEAR_PART} - sums.leased THEN '{NEAR}'
            WHEN foretold.point_nanos > sums.most THEN '{FORECAST}'
            ELSE '{OK}' END AS state
  FROM budgets_budget AS budget
  LEFT JOIN budgets_budgetwindow AS present
    ON present.budget_id = budget.id AND present.starts_at <= %s AND present.ends_at > %s
  LEFT JOIN (
       SELECT budget_id, sum(amount_nanos)::bigint AS nanos FROM budgets_budgetincrease
        WHERE starts_at <= %s AND ends_at > %s AND (ended_at IS NULL OR ended_at > %s)
        GROUP BY budget_id) AS raised
    ON raised.budget_id = budget.id
  LEFT JOIN budgets_budgetforecast AS foretold
    ON foretold.budget_id = budget.id AND foretold.ends_at > %s AND foretold.made_at <= %s AND foretold.made_at > %s
 CROSS JOIN LATERAL (
       SELECT coalesce(present.settled_nanos, 0) AS settled, coalesce(present.leased_nanos, 0) AS leased,
              budget.limit_nanos + coalesce(raised.nanos, 0) AS most) AS sums
 WHERE budget.archived_at IS NULL
"""  # noqa: S608 - constants


def tenants_in_state(*states: str, now: datetime) -> RawSQL:
    """Ids of the tenants that have a budget in one of the states in its present window, by the same rule in SQL.

    `forecast` goes by what `kept_forecasts` kept.
    """
    return _in_state("tenant_id", states, now)


def budgets_in_state(*states: str, now: datetime) -> RawSQL:
    """Ids of these budgets."""
    return _in_state("id", states, now)


def _in_state(column: str, states: tuple[str, ...], now: datetime) -> RawSQL:
    sql = f"SELECT stated.{column} FROM ({_STATED}) AS stated WHERE stated.state = ANY(%s)"  # noqa: S608 - constants
    return RawSQL(sql, [*[now] * 7, now - KEPT_FOR, list(states)])  # noqa: S611 - constants and parameters
