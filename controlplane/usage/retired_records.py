"""Records of days that left the database, read out of their files: one request's, and the largest of an hour.

A file that is gone or is not the one that was written raises ArchiveChanged: what cannot be read is not called none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from controlplane.core.period import from_us
from controlplane.usage.models import RetiredDay, UsageRecord
from controlplane.usage.record_files import rows_where
from controlplane.usage.records import COLUMNS
from controlplane.usage.retirement import checked_file

_NAMES = (*(name for name, _ in COLUMNS), "client_request_id")
_TIMES = frozenset(name for name, kind in COLUMNS if kind == "time")
CHARGE = "charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos"


def retired_days(since: datetime, until: datetime) -> list[RetiredDay]:
    """Days that are no longer in the database and hold records received in [since, until), oldest first."""
    first, last = since.astimezone(UTC).date(), (until - timedelta(microseconds=1)).astimezone(UTC).date()
    return list(RetiredDay.objects.filter(dropped_at__isnull=False, day__gte=first, day__lte=last).order_by("day"))


def records_of_request(request_id: UUID, since: datetime, until: datetime) -> list[UsageRecord]:
    """A request's records that were received in [since, until) and are retired. Raises ArchiveChanged."""
    found: list[UsageRecord] = []
    for day in retired_days(since, until):
        rows = rows_where(checked_file(day), _NAMES, "request_id = ?::UUID", [str(request_id)])
        found += [_record(row) for row in rows]
    return found


def _record(row: Sequence[Any]) -> UsageRecord:
    values = dict(zip(_NAMES, row, strict=True))
    return UsageRecord(**{name: from_us(value) if name in _TIMES else value for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class Ended:
    """Which records: of a pool's tenant and class, ended in [since, until)."""

    pool_id: int
    tenant_id: int
    class_id: int
    since: datetime
    until: datetime


def largest_records(
    wanted: Ended, received_until: datetime, most: int
) -> list[tuple[UUID, datetime, int, int, int, int]]:
    """(request, end, GPU time, prompt, output, charge) by GPU time, of retired days. Raises ArchiveChanged."""
    names = ("request_id", "ended_at", "gpu_us", "prompt_tokens", "output_tokens", CHARGE)
    where = "pool_id = ? AND tenant_id = ? AND class_id = ? AND ended_at >= ? AND ended_at < ?"
    values = [wanted.pool_id, wanted.tenant_id, wanted.class_id, *map(_plain, (wanted.since, wanted.until))]
    found: list[tuple[UUID, datetime, int, int, int, int]] = []
    for day in retired_days(wanted.since, received_until):
        rows = rows_where(
            checked_file(day), names, f"{where} ORDER BY gpu_us DESC, request_id LIMIT {int(most)}", values
        )
        found += [(row[0], from_us(row[1]), *row[2:]) for row in rows]
    return sorted(found, key=lambda row: (-row[2], row[0]))[:most]


def _plain(at: datetime) -> datetime:
    """As the files hold times: UTC without a zone."""
    return at.astimezone(UTC).replace(tzinfo=None)
