"""More than a budget's limit for a time: made by one person with a reason, in force at once or later, over by itself.

While it is in force the limit of every window that holds the instant is higher by its amount. Leases taken meanwhile
end with it, so that the limit is back as soon as what runs has ended: until then settled + leased may stay above it.
"""

from datetime import datetime, timedelta

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Sum

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.budgets.actions import follow_increases
from controlplane.budgets.increase_queries import not_over
from controlplane.budgets.models import Budget, BudgetIncrease
from controlplane.budgets.windows import LIMIT_NANOS_MAX
from controlplane.core.money import format_nanos

LONGEST = timedelta(days=366)
AT_ONCE_MAX = 20


def add_increase(
    *,
    budget_id: int,
    amount_nanos: int,
    ends_at: datetime,
    reason: str,
    actor: Actor,
    now: datetime,
    starts_at: datetime | None = None,
) -> BudgetIncrease:
    """Raises a budget's limit by an amount until an instant. Raises ValidationError by field."""
    reason = checked_reason(reason)
    starts = starts_at or now
    with transaction.atomic():
        budget = Budget.objects.select_for_update().get(pk=budget_id)
        if budget.archived_at is not None:
            raise ValidationError("An archived budget cannot be raised: create a new one.")
        planned = BudgetIncrease.objects.filter(not_over(now), budget=budget)
        _check(amount_nanos, starts, ends_at, now)
        if planned.count() >= AT_ONCE_MAX:
            raise ValidationError(f"A budget has at most {AT_ONCE_MAX} increases at a time: end one of them first.")
        together = budget.limit_nanos + (planned.aggregate(sum=Sum("amount_nanos"))["sum"] or 0) + amount_nanos
        if together > LIMIT_NANOS_MAX:
            raise ValidationError({"amount": "Limit and increases together are at most 9,223,372,036.854775807."})
        row = BudgetIncrease.objects.create(
            budget=budget, amount_nanos=amount_nanos, starts_at=starts, ends_at=ends_at, reason=reason, made_at=now,
            made_by=actor.name,
        )  # fmt: skip
        follow_increases(budget, now)
        after = {"amount": format_nanos(amount_nanos), "starts_at": starts, "ends_at": ends_at, "increase": row.pk}
        _record(budget, "budget.increase", actor, now, reason, before=None, after=after)
    return row


def _check(amount_nanos: int, starts_at: datetime, ends_at: datetime, now: datetime) -> None:
    errors = {}
    if not 0 < amount_nanos <= LIMIT_NANOS_MAX:
        errors["amount"] = "Enter an amount over 0."
    if starts_at < now:
        errors["starts_at"] = "Choose an instant that has not passed, or leave it empty: it begins at once."
    if ends_at <= max(starts_at, now):
        errors["ends_at"] = "It ends after it begins: choose a later instant."
    elif ends_at - starts_at > LONGEST:
        errors["ends_at"] = f"An increase lasts at most {LONGEST.days} days: change the limit instead."
    if errors:
        raise ValidationError(errors)


def end_increase(*, increase_id: int, reason: str, actor: Actor, now: datetime) -> BudgetIncrease:
    """Ends an increase before its time; leases that it allowed stay counted until they end. Again changes nothing."""
    reason = checked_reason(reason)
    with transaction.atomic():
        found = BudgetIncrease.objects.get(pk=increase_id)
        budget = Budget.objects.select_for_update().get(pk=found.budget_id)
        row = BudgetIncrease.objects.filter(not_over(now), pk=increase_id).first()
        if row is None:
            return BudgetIncrease.objects.get(pk=increase_id)
        row.ended_at, row.ended_by = now, actor.name
        row.save(update_fields=["ended_at", "ended_by"])
        follow_increases(budget, now)
        _record(
            budget, "budget.increase_end", actor, now, reason, before={"ends_at": row.ends_at, "increase": row.pk},
            after={"ended_at": now},
        )  # fmt: skip
    return row


def _record(
    budget: Budget, action: str, actor: Actor, now: datetime, reason: str, *, before: dict | None, after: dict
) -> None:
    record(
        actor=actor, action=action, noun="budget", object_id=budget.pk, tenant_slug=budget.tenant.slug, before=before,
        after=after, reason=reason, now=now,
    )  # fmt: skip
