"""Old days of records leave the database for Parquet files: written, read back, compared, and only then dropped.

Every step may be cut off: a file that is not whole never has its name, a day that is not in `RetiredDay` is written
again, one that is there and not dropped is dropped by the next run after its file was looked at once more.
"""

from __future__ import annotations

import logging
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction

from controlplane.usage.models import RetiredDay
from controlplane.usage.record_files import file_digest, file_name, write_day

log = logging.getLogger(__name__)

DAYS_LEAST = 31
"""A month's records stay for its close, and no agent reports later than 14 days after the end of a request."""
DAYS_PER_RUN = 7
# Any fixed number: one retirement at a time.
RETIRE_LOCK = 0x72657469


class ArchiveChanged(Exception):
    """A file of the archive is gone or is not the one that was written; the message says which."""


def archive() -> Path:
    """The folder of the Parquet files."""
    return Path(settings.USAGE_ARCHIVE)


def keep_days() -> int:
    """How many days of records stay in the database, 0 for all. Raises ImproperlyConfigured for a number between."""
    days = int(settings.USAGE_RECORD_DAYS)
    if days != 0 and days < DAYS_LEAST:
        raise ImproperlyConfigured(f"FLEXBAND_USAGE_RECORD_DAYS is {days}: set {DAYS_LEAST} or more, or 0 to keep all.")
    return days


def stored_days() -> list[date]:
    """Days that have a partition, oldest first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
            " WHERE i.inhparent = 'usage_record'::regclass ORDER BY 1"
        )
        names = [row[0] for row in cursor.fetchall()]
    return [datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC).date() for name in names]


def retire_old_days(now: datetime) -> list[RetiredDay]:
    """Retires what is older than the setting allows, at most DAYS_PER_RUN days; the others follow with the next run."""
    keep = keep_days()
    if keep == 0:
        return []
    first_kept = now.astimezone(UTC).date() - timedelta(days=keep)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", (RETIRE_LOCK,))
        if not cursor.fetchone()[0]:
            return []
        try:
            due = [day for day in stored_days() if day < first_kept]
            return [retire_day(day, now) for day in due[:DAYS_PER_RUN]]
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", (RETIRE_LOCK,))


def retire_day(day: date, now: datetime) -> RetiredDay:
    """Moves one day into its file and drops it from the database. Raises ValueError when the file does not hold it."""
    found = RetiredDay.objects.filter(day=day).first()
    if found is None or not _is_whole(found) or found.records != _stored(day):
        found = _write(day, now)
    # The database counts the rows once more under its lock and refuses to drop what the file does not have.
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT usage_drop_partition(%s)", (day,))
        RetiredDay.objects.filter(day=day).update(dropped_at=now)
    found.dropped_at = now
    log.info("%d usage records of %s are in %s", found.records, day, found.path)
    return found


def _write(day: date, now: datetime) -> RetiredDay:
    table, name = f"usage_record_{day:%Y%m%d}", file_name(day)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_total_relation_size(to_regclass(%s))", (table,))
        table_bytes = cursor.fetchone()[0]
        file = write_day(cursor, table, archive() / name)
    written = {
        "path": name,
        "records": file.records,
        "file_bytes": file.file_bytes,
        "table_bytes": table_bytes,
        "file_digest": file.file_digest,
        "content_digest": file.content_digest,
        "verified_at": now,
        "dropped_at": None,
    }
    return RetiredDay.objects.update_or_create(day=day, defaults=written)[0]


def _stored(day: date) -> int:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM usage_record_{day:%Y%m%d}")  # noqa: S608 - digits of a date
        return int(cursor.fetchone()[0])


def _is_whole(day: RetiredDay) -> bool:
    path = archive() / day.path
    return path.is_file() and file_digest(path) == bytes(day.file_digest)


def checked_file(day: RetiredDay) -> Path:
    """The file of a day that is no longer in the database. Raises ArchiveChanged when it is not the one written."""
    path = archive() / day.path
    try:
        seen = path.stat()
        whole = _digest_of(path, seen.st_mtime_ns, seen.st_size) == bytes(day.file_digest)
    except FileNotFoundError:
        whole = False
    if not whole:
        raise ArchiveChanged(
            f"{path} is missing or was changed: restore the file of {day.day} from a backup of"
            f" the archive (SHA-256 {bytes(day.file_digest).hex()})"
        )
    return path


@lru_cache(maxsize=512)
def _digest_of(path: Path, _changed_ns: int, _size: int) -> bytes:
    """Digest of a file, read once for as long as it looks the same: pages ask for one request of a whole day."""
    return file_digest(path)


def retired_files() -> list[Path]:
    """The files of the days that are no longer in the database. Raises ArchiveChanged for one that was changed."""
    return [checked_file(day) for day in RetiredDay.objects.filter(dropped_at__isnull=False).order_by("day")]
