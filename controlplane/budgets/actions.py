"""What may be done to budgets: lock, load, decide, apply, audit, in one transaction.

Amounts are integer nanos. A window's limit follows the budget's at once when it is raised; lowered, it goes down to
what is settled and leased at once and further as agents give leases back: what is leased may be spent already.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import F, Value
from django.db.models.functions import Greatest

from controlplane.audit.actions import changes as changed_fields
from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.budgets.models import Budget, BudgetWindow
from controlplane.budgets.windows import LIMIT_NANOS_MAX, row_of, windows_at
from controlplane.core.money import format_nanos
from controlplane.core.period import load_zone
from controlplane.tenants.actions import Stale, only
from controlplane.tenants.models import Tenant

PERCENT_MAX = 200
THRESHOLDS_MAX = 10
EDITABLE = ("name", "limit_nanos", "hard", "thresholds_percent")
CALENDAR = ("period", "anchor_day", "zone")


def create_budget(
    *, tenant_id: int, name: str, limit_nanos: int, reason: str, actor: Actor, now: datetime, **values: Any
) -> Budget:
    """A new budget, in force from now on. `values`: period, anchor_day, zone, hard, thresholds_percent.

    It counts from the start of its present window; what was spent in it before is not known to it.
    """
    reason = checked_reason(reason)
    only(values, (*EDITABLE, *CALENDAR))
    with transaction.atomic():
        tenant = Tenant.objects.select_for_update().get(pk=tenant_id)
        if tenant.state == Tenant.State.ARCHIVED:
            raise ValidationError("An archived tenant gets no budget.")
        budget = Budget(
            tenant=tenant, name=name.strip(), limit_nanos=limit_nanos, created_at=now, updated_at=now, **values
        )
        _check(budget)
        budget.save(force_insert=True)
        _record(budget, "budget.create", actor, now, reason, after=snapshot(budget))
    return budget


def edit_budget(
    *, budget_id: int, version: int, changes: Mapping[str, Any], reason: str, actor: Actor, now: datetime
) -> Budget:
    """Changes name, limit, stop and thresholds; its calendar only while nothing was spent in it.

    Raises Stale when `version` is not the row's, ValidationError for values that cannot be used.
    """
    reason = checked_reason(reason)
    only(changes, (*EDITABLE, *CALENDAR))
    with transaction.atomic():
        budget = _locked(budget_id, version)
        before = snapshot(budget)
        for field, value in changes.items():
            setattr(budget, field, value)
        _check(budget)
        old, new = changed_fields(before, snapshot(budget))
        if not new:
            return budget
        if set(new) & set(CALENDAR):
            _move_calendar(budget)
        budget.version += 1
        budget.updated_at = now
        budget.save(update_fields=[*changes, "version", "updated_at"])
        _follow(budget, now)
        _record(budget, "budget.edit", actor, now, reason, before=old, after=new)
    return budget


def archive_budget(*, budget_id: int, version: int, reason: str, actor: Actor, now: datetime) -> Budget:
    """The budget limits nothing from now on; its windows stay. Leases taken from it still settle in them."""
    reason = checked_reason(reason)
    with transaction.atomic():
        budget = _locked(budget_id, version)
        budget.archived_at = budget.updated_at = now
        budget.version += 1
        budget.save(update_fields=["archived_at", "updated_at", "version"])
        _record(budget, "budget.archive", actor, now, reason, before=snapshot(budget), after={"archived_at": now})
    return budget


def snapshot(budget: Budget) -> dict[str, Any]:
    """The fields that the audit log compares; money as a decimal string beside its nanos."""
    values = {field: getattr(budget, field) for field in (*EDITABLE, *CALENDAR)}
    return {
        **values,
        "thresholds_percent": list(budget.thresholds_percent),
        "period": str(budget.period),
        "limit": format_nanos(budget.limit_nanos),
    }


def _locked(budget_id: int, version: int) -> Budget:
    budget = Budget.objects.select_for_update().get(pk=budget_id)
    if budget.version != version:
        raise Stale(budget)
    if budget.archived_at is not None:
        raise ValidationError("An archived budget cannot be changed: create a new one.")
    return budget


def _check(budget: Budget) -> None:
    errors: dict[str, str] = {}
    budget.name = budget.name.strip()
    if not 0 < len(budget.name) <= 120:
        errors["name"] = "Give the budget a name of at most 120 characters."
    if not 0 <= budget.limit_nanos <= LIMIT_NANOS_MAX:
        errors["limit"] = "The limit is 0 or more and at most 9,223,372,036.854775807."
    if budget.period not in Budget.Period.values:
        errors["period"] = "Choose day, week or month."
    if not 1 <= budget.anchor_day <= 31:
        errors["anchor_day"] = "The first day is 1 to 31."
    elif budget.period != Budget.Period.MONTH and budget.anchor_day != 1:
        errors["anchor_day"] = "Only a month can begin on another day: leave it at 1."
    try:
        load_zone(budget.zone)
    except ValueError as error:
        errors["zone"] = f"{str(error)[0].upper()}{str(error)[1:]}."
    marks = budget.thresholds_percent
    if (
        marks != sorted(set(marks))
        or len(marks) > THRESHOLDS_MAX
        or any(not 1 <= mark <= PERCENT_MAX for mark in marks)
    ):
        errors["thresholds_percent"] = (
            f"Write at most {THRESHOLDS_MAX} rising percentages from 1 to {PERCENT_MAX}, such as 50, 80, 100."
        )
    if errors:
        raise ValidationError(errors)


def _move_calendar(budget: Budget) -> None:
    """What was spent is never reset: a budget that was used keeps its calendar; an unused one drops its windows."""
    windows = list(BudgetWindow.objects.select_for_update().filter(budget=budget).order_by("pk"))
    if any(window.settled_nanos or window.leased_nanos or window.leases.exists() for window in windows):
        raise ValidationError(
            {"period": "Something was spent in this budget: archive it and create one with the other calendar."}
        )
    BudgetWindow.objects.filter(budget=budget).delete()


def _follow(budget: Budget, now: datetime) -> None:
    """Present and later windows take the limit as far as what is settled and leased leaves room."""
    ids = list(
        BudgetWindow.objects.select_for_update()
        .filter(budget=budget, ends_at__gt=now)
        .order_by("pk")
        .values_list("pk", flat=True)
    )
    limit: Any = budget.limit_nanos
    if budget.hard:
        limit = Greatest(Value(budget.limit_nanos), F("settled_nanos") + F("leased_nanos"))
    BudgetWindow.objects.filter(pk__in=ids).update(limit_nanos=limit, hard=budget.hard)
    if ids:
        follow_increases(budget, now)


def follow_increases(budget: Budget, now: datetime) -> None:
    """The present window takes the limit with the increases of this instant, as the next lease would see it."""
    with connection.cursor() as cursor:
        windows_at(cursor, [(row_of(budget), now)], lock=True)


def _record(
    budget: Budget,
    action: str,
    actor: Actor,
    now: datetime,
    reason: str,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    record(
        actor=actor,
        action=action,
        noun="budget",
        object_id=budget.pk,
        tenant_slug=budget.tenant.slug,
        before=before,
        after=after,
        reason=reason,
        now=now,
    )
