"""Whether a budget is used up: the one rule, as a value for pages and as SQL for lists that the database sorts.

The limit is the budget's own with the increases of the instant. A hard limit that was lowered counts as lowered at
once, whatever leases are still out; until they are in, more may be spent than it says.
"""

from datetime import datetime
from typing import Any

from django.db.models import BigIntegerField, Case, CharField, F, OuterRef, Q, QuerySet, Subquery, Sum, Value, When
from django.db.models.functions import Coalesce

from controlplane.budgets.increase_queries import in_force
from controlplane.budgets.models import Budget, BudgetIncrease, BudgetWindow

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


def with_spend_state(budgets: QuerySet[Budget], now: datetime) -> QuerySet[Any]:
    """Budgets with `spend_state` in their present window, by the same rule in the database."""
    window = BudgetWindow.objects.filter(budget=OuterRef("pk"), starts_at__lte=now, ends_at__gt=now).order_by("-id")
    raised = BudgetIncrease.objects.filter(in_force(now), budget=OuterRef("pk")).order_by().values("budget")
    return budgets.annotate(
        settled_now=_or_nothing(window.values("settled_nanos")[:1]),
        leased_now=_or_nothing(window.values("leased_nanos")[:1]),
        limit_now=F("limit_nanos") + _or_nothing(raised.annotate(sum=Sum("amount_nanos")).values("sum")),
    ).annotate(
        spend_state=Case(
            When(settled_now__gte=F("limit_now"), hard=True, then=Value(STOPPED)),
            When(settled_now__gte=F("limit_now"), then=Value(OVER)),
            When(_near(), then=Value(NEAR)),
            default=Value(OK),
            output_field=CharField(),
        )
    )


def _near() -> Q:
    return Q(settled_now__gte=F("limit_now") - F("limit_now") / NEAR_PART - F("leased_now"))


def _or_nothing(query: QuerySet[Any]) -> Coalesce:
    return Coalesce(Subquery(query, output_field=BigIntegerField()), Value(0), output_field=BigIntegerField())
