"""Calendar work of budgets; may run at any time, any number of times."""

from dataclasses import asdict
from datetime import UTC, datetime

from celery import shared_task

from controlplane.budgets.kept_forecasts import keep_forecasts
from controlplane.budgets.sweep import sweep


@shared_task(name="budgets.sweep")
def sweep_budgets() -> dict[str, int]:
    """Rolls windows over, follows limits, closes leases of sealed epochs, notes thresholds."""
    return asdict(sweep(datetime.now(UTC)))


@shared_task(name="budgets.keep_forecasts")
def keep_budget_forecasts() -> int:
    """Makes the forecasts again by which lists of budgets and tenants are put in order."""
    return keep_forecasts(datetime.now(UTC))
