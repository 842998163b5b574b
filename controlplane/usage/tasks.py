"""Calendar work of usage: partitions ahead of time, and the fold. Both may run at any time, any number of times."""

from datetime import UTC, datetime

from celery import shared_task
from django.db import connection

from controlplane.usage.partitions import create_days, days_ahead
from controlplane.usage.rollups import fold


@shared_task(name="usage.create_partitions")
def create_partitions() -> int:
    """Creates the partitions of today and the days ahead; returns how many were missing."""
    with connection.cursor() as cursor:
        return len(create_days(cursor, days_ahead(datetime.now(UTC))))


@shared_task(name="usage.fold")
def fold_closed_minutes() -> int:
    """Folds the deltas of closed minutes; returns how many."""
    return fold(datetime.now(UTC))
