"""Reading increases of budgets: which are in force at an instant, and what each is."""

from datetime import datetime

from django.db.models import Q, QuerySet

from controlplane.budgets.models import Budget, BudgetIncrease


def not_over(now: datetime) -> Q:
    """Increases that are in force or to come."""
    return Q(ends_at__gt=now) & (Q(ended_at=None) | Q(ended_at__gt=now))


def in_force(now: datetime) -> Q:
    """Increases that count at an instant, as `windows_at` counts them."""
    return not_over(now) & Q(starts_at__lte=now)


def increases_of(budget: Budget) -> QuerySet[BudgetIncrease]:
    """All of a budget, the newest first."""
    return BudgetIncrease.objects.filter(budget=budget).order_by("-id")


def state_of(increase: BudgetIncrease, now: datetime) -> str:
    """`planned`, `in force`, `ended early` or `over`."""
    if increase.ended_at is not None and increase.ended_at <= now:
        return "ended early"
    if increase.ends_at <= now:
        return "over"
    return "planned" if increase.starts_at > now else "in force"
