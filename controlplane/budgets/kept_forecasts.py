"""Forecasts of all budgets, kept so that lists can be put in order by them: thousands cannot be made for one page.

A kept forecast is of an instant. It counts while its window runs and for KEPT_FOR at most; the limit that it is
compared with, increases included, is always that of now.
"""

from __future__ import annotations

from datetime import datetime

from django.db.models import Min

from controlplane.budgets.models import Budget, BudgetForecast
from controlplane.budgets.queries import standings
from controlplane.budgets.spend_states import KEPT_FOR

BATCH = 500


def keep_forecasts(now: datetime) -> int:
    """Makes the forecast of every budget in force again; returns how many. Safe to run any number of times."""
    ids = list(Budget.objects.filter(archived_at=None).order_by("pk").values_list("pk", flat=True))
    for start in range(0, len(ids), BATCH):
        rows = Budget.objects.filter(pk__in=ids[start : start + BATCH]).select_related("tenant")
        BudgetForecast.objects.bulk_create(
            (
                BudgetForecast(
                    budget=found.budget, ends_at=found.ends_at, point_nanos=found.forecast_nanos, made_at=now
                )
                for found in sorted(standings(rows, now), key=lambda found: found.budget.pk)
            ),
            update_conflicts=True,
            unique_fields=["budget"],
            update_fields=["ends_at", "point_nanos", "made_at"],
        )
    return len(ids)


def forecasts_made_at(now: datetime) -> datetime | None:
    """The instant of the oldest forecast that counts; None: there is none."""
    counting = BudgetForecast.objects.filter(
        budget__archived_at=None, ends_at__gt=now, made_at__lte=now, made_at__gt=now - KEPT_FOR
    )
    made_at: datetime | None = counting.aggregate(at=Min("made_at"))["at"]
    return made_at
