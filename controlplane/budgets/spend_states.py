"""Whether a budget is used up: the one rule, as a value for pages and as SQL for lists that the database sorts.

The limit is the budget's own with the increases of the instant. A hard limit that was lowered counts as lowered at
once, whatever leases are still out; until they are in, more may be spent than it says.
"""

from datetime import datetime

from django.db.models.expressions import RawSQL

NEAR_PART = 5
"""A budget is near its limit when a fifth of it or less is neither settled nor leased."""
STOPPED, OVER, NEAR, OK = "stopped", "over", "near", "ok"


def spend_state(*, settled_nanos: int, leased_nanos: int, limit_nanos: int, hard: bool) -> str:
    """`stopped` (hard and nothing left), `over` (soft, passed), `near` (80 % settled and leased), `ok`."""
    if settled_nanos >= limit_nanos:
        return STOPPED if hard else OVER
    if settled_nanos + leased_nanos >= limit_nanos - limit_nanos // NEAR_PART:
        return NEAR
    return OK


# One pass over budgets with their present windows and increases: lists of all tenants are sorted by it.
_TENANTS_IN_STATE = f"""
SELECT stated.tenant_id FROM (
SELECT budget.tenant_id,
       CASE WHEN sums.settled >= sums.most AND budget.hard THEN '{STOPPED}'
            WHEN sums.settled >= sums.most THEN '{OVER}'
            WHEN sums.settled >= sums.most - sums.most / {NEAR_PART} - sums.leased THEN '{NEAR}'
            ELSE '{OK}' END AS state
  FROM budgets_budget AS budget
  LEFT JOIN budgets_budgetwindow AS present
    ON present.budget_id = budget.id AND present.starts_at <= %s AND present.ends_at > %s
  LEFT JOIN (
       SELECT budget_id, sum(amount_nanos)::bigint AS nanos FROM budgets_budgetincrease
        WHERE starts_at <= %s AND ends_at > %s AND (ended_at IS NULL OR ended_at > %s)
        GROUP BY budget_id) AS raised
    ON raised.budget_id = budget.id
 CROSS JOIN LATERAL (
       SELECT coalesce(present.settled_nanos, 0) AS settled, coalesce(present.leased_nanos, 0) AS leased,
              budget.limit_nanos + coalesce(raised.nanos, 0) AS most) AS sums
 WHERE budget.archived_at IS NULL) AS stated
 WHERE stated.state = ANY(%s)
"""  # noqa: S608 - constants


def tenants_in_state(*states: str, now: datetime) -> RawSQL:
    """Ids of the tenants that have a budget in one of the states in its present window, by the same rule in SQL."""
    return RawSQL(_TENANTS_IN_STATE, [*[now] * 5, list(states)])  # noqa: S611 - constants and parameters
