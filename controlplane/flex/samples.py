"""Samples of pools as they were seen live: a row that says only what differs is made whole from the row it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from controlplane.core.period import to_us
from controlplane.flex import evidence
from controlplane.flex.models import PoolSample


def sample_at(pool_id: int, at: datetime) -> PoolSample | None:
    """The pool's last sample at or before an instant, its figures whole; None where none is kept."""
    sample = PoolSample.objects.filter(pool_id=pool_id, at__lte=at).order_by("-at").first()
    if sample is None or sample.whole_at is None:
        return sample
    whole = PoolSample.objects.filter(pool_id=pool_id, at=sample.whole_at, whole_at=None).first()
    sample.figures = figures_of(sample, sample.figures, None if whole is None else whole.figures)
    return sample


def figures_of(row: Any, figures: Any, whole: Any) -> dict[str, Any]:
    """Figures of a row with the columns of `PoolSample`, made whole from those of the row at its `whole_at`.

    Both may be JSON text. Without that row, which nothing removes before this one, nothing is known: empty.
    """
    said = _as_dict(figures)
    if row.whole_at is None:
        return said
    base = _as_dict(whole)
    if "seen" not in base:
        return {}
    return evidence.made_whole(
        base,
        said,
        at_us=to_us(row.at),
        p95_queue_us=row.p95_queue_us,
        admitted_per_s=row.admitted_per_s,
        telemetry_age_us=row.telemetry_age_us,
    )


def _as_dict(figures: Any) -> dict[str, Any]:
    # Django switches psycopg's JSON loader off for raw cursors, so jsonb arrives as text there.
    said = json.loads(figures) if isinstance(figures, (str, bytes)) else figures
    return dict(said) if isinstance(said, Mapping) else {}
