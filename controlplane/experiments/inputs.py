"""Files that experiments are made of: kept once by their digest, compressed, for as long as operators say."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from controlplane.experiments.models import Experiment, InputFile
from controlplane.wire.signing import digest_hex

DAYS_LEAST: Final = 7
FILES_A_RUN: Final = 1_000
KEEP_LOCK: Final = 0x6C616269
"""Any fixed number: shared by those who refer to files, taken alone to end some."""


def store(files: Mapping[str, bytes], now: datetime) -> dict[str, str]:
    """File name -> sha256 of its content. Call in the transaction that refers to them."""
    hold()
    found = {name: digest_hex(content) for name, content in files.items()}
    InputFile.objects.bulk_create(
        [
            InputFile(sha256=found[name], content=zlib.compress(files[name], 6), size=len(files[name]), created_at=now)
            for name in sorted(files, key=found.__getitem__)
        ],
        ignore_conflicts=True,
    )  # fmt: skip
    return found


def hold() -> None:
    """No file is ended before this transaction is over."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", [KEEP_LOCK])


def read(row: Experiment) -> dict[str, bytes]:
    """File name -> content. Raises ValueError for one that was changed or is gone."""
    kept = InputFile.objects.in_bulk(list(set(row.inputs.values())))
    files = {}
    for name, sha256 in row.inputs.items():
        content = zlib.decompress(bytes(kept[sha256].content)) if sha256 in kept else b""
        if digest_hex(content) != sha256:
            raise ValueError(f"{name} of experiment {row.pk} is not what was kept: it has ended, or was changed")
        files[name] = content
    return files


def gone(row: Experiment) -> bool:
    """Whether some of its files have ended: it cannot be run again."""
    wanted = set(row.inputs.values())
    return InputFile.objects.filter(sha256__in=wanted).count() < len(wanted)


def keep_days() -> int:
    """Days that inputs stay after the experiment's end, 0 for ever. Raises ImproperlyConfigured for too few."""
    days = int(settings.EXPERIMENT_INPUT_DAYS)
    if days != 0 and days < DAYS_LEAST:
        raise ImproperlyConfigured(
            f"FLEXBAND_EXPERIMENT_INPUT_DAYS is {days}: set {DAYS_LEAST} or more, or 0 to keep all."
        )
    return days


def end_old(now: datetime) -> int:
    """Ends files that nothing needs any more, at most FILES_A_RUN; returns how many.

    Kept are files of experiments at work or ended less than `keep_days` ago, of those that have a link, whose rates
    a pool took over, or whose draft was pushed, and files that were stored less than `keep_days` ago.
    """
    days = keep_days()
    if days == 0:
        return 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT experiments_end_inputs(%s, %s)", [now - timedelta(days=days), FILES_A_RUN])
        return int(cursor.fetchone()[0])
