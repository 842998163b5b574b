"""Calendar work of contracts. It may run at any time, any number of times, doubled too."""

from celery import shared_task
from django.utils import timezone

from controlplane.contracts.hours import fold_hours


@shared_task(name="contracts.fold_hours", ignore_result=True)
def fold_counts() -> int:
    """Adds up hours of objectives that are over; returns how many."""
    return fold_hours(timezone.now())
