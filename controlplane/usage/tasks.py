"""Calendar work of usage: partitions, the fold, the audit, retirement. All may run at any time, any number of times."""

from datetime import UTC, datetime

from celery import shared_task
from django.db import connection

from controlplane.usage.duplicates import audit_closed_hours
from controlplane.usage.partitions import create_days, days_ahead
from controlplane.usage.retirement import retire_old_days
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


@shared_task(name="usage.audit_duplicates")
def audit_duplicates() -> int:
    """Looks through the closed hours for copies; returns how many attempts have some."""
    return sum(audit.duplicates for audit in audit_closed_hours(datetime.now(UTC)))


@shared_task(name="usage.retire_records")
def retire_records() -> int:
    """Moves old days of records into Parquet files; returns how many."""
    return len(retire_old_days(datetime.now(UTC)))
