"""The latency breakdown by stage of the last minutes: stacks that add up, and each stage's own percentiles beside them.

Rollups are by minute of end. One statement reads every pool's minutes and the open deltas; merging is one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from django.db import connection

from controlplane.core.stage_stack import STACK_STAGES, TailStack
from controlplane.usage.sketch import TTFT, Sketch, merge_groups
from controlplane.web import figures

MINUTES = 15
PERCENTILES = (("p50", 0.50), ("p95", 0.95), ("p99", 0.99))
STAGE_NAMES = {
    "admission": "Admission",
    "queue": "Queue",
    "batch_wait": "Batch wait",
    "preprocess": "Preprocess",
    "prefill": "Prefill",
    "decode": "Decode",
    "return_": "Return",
    "upstream": "Prefill and decode",
}
STAGE_FILLS = {stage: stage.rstrip("_").replace("_", "-") for stage in STACK_STAGES} | {"upstream": "decode"}
_COLOURS = {stage: f"var(--stage-{fill})" for stage, fill in STAGE_FILLS.items()}
_PATTERNS = {"queue": "/", "upstream": "x"}

_SQL = """
SELECT minute, pool_id, class_id, requests, stages FROM usage_rollupminute WHERE minute >= %s AND minute <= %s
 UNION ALL
SELECT minute, pool_id, class_id, requests, stages FROM usage_rollupdelta WHERE minute >= %s AND minute <= %s
"""


@dataclass(frozen=True)
class Breakdowns:
    """Sketches by (pool, class, minute); `at` is when they were read."""

    at: datetime
    minutes: Sequence[datetime] = ()
    by_minute: Mapping[tuple[int, int, datetime], Sketch] = field(default_factory=dict)
    requests: Mapping[tuple[int, int, datetime], int] = field(default_factory=dict)
    memo: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)
    """What was computed from this reading: it serves several ticks and several topics."""

    def of(self, pool_id: int, class_ids: Sequence[int], minute: datetime | None = None) -> Sketch:
        """Merged over classes, and over all minutes unless one is named."""
        merged = Sketch()
        for at in self.minutes if minute is None else (minute,):
            for class_id in class_ids:
                sketch = self.by_minute.get((pool_id, class_id, at))
                if sketch is not None:
                    merged.merge(sketch)
        return merged

    def newest(self, pool_id: int, class_ids: Sequence[int], count: int = 2) -> Sketch:
        """Merged over the newest `count` minutes in which requests ended."""
        busy = [m for m in self.minutes if any((pool_id, c, m) in self.by_minute for c in class_ids)]
        merged = Sketch()
        for minute in busy[-count:]:
            merged.merge(self.of(pool_id, class_ids, minute))
        return merged


def read(now: datetime, minutes: int = MINUTES) -> Breakdowns:
    """The last `minutes` minutes of every pool and class, the running one included."""
    last = now.replace(second=0, microsecond=0)
    window = [last - timedelta(minutes=back) for back in range(minutes - 1, -1, -1)]
    with connection.cursor() as cursor:
        cursor.execute(_SQL, [window[0], last, window[0], last])
        rows = cursor.fetchall()
    keys = sorted({(pool, klass, minute) for minute, pool, klass, _, _ in rows})
    number = {key: at for at, key in enumerate(keys)}
    groups = np.array([number[pool, klass, minute] for minute, pool, klass, _, _ in rows], dtype=np.int64)
    merged = merge_groups(groups, len(keys), [bytes(row[4]) for row in rows]) if keys else []
    requests: dict[tuple[int, int, datetime], int] = {}
    for minute, pool, klass, count, _ in rows:
        requests[pool, klass, minute] = requests.get((pool, klass, minute), 0) + count
    sketches = {key: Sketch.from_bytes(blob) for key, blob in zip(keys, merged, strict=True)}
    return Breakdowns(now, window, sketches, requests)


@dataclass(frozen=True, slots=True)
class WorstStage:
    """The stage that takes most of the time of the slowest requests, and since which minute without a break."""

    stage: str
    share: float
    us: int
    total_us: int
    since: datetime

    @property
    def name(self) -> str:
        return STAGE_NAMES[self.stage]


def worst_stage(breakdowns: Breakdowns, pool_id: int, class_ids: Sequence[int], q: float = 0.95) -> WorstStage | None:
    """Over the two newest minutes with requests; `since` follows the same stage back. None without requests."""
    key = ("worst", pool_id, *class_ids, q)
    if key not in breakdowns.memo:
        breakdowns.memo[key] = _worst_stage(breakdowns, pool_id, class_ids, q)
    found: WorstStage | None = breakdowns.memo[key]
    return found


def _worst_stage(breakdowns: Breakdowns, pool_id: int, class_ids: Sequence[int], q: float) -> WorstStage | None:
    tails: list[tuple[datetime, TailStack]] = []
    for minute in breakdowns.minutes:
        tail = breakdowns.of(pool_id, class_ids, minute).stack.tail(q)
        if tail is not None and tail.sum_us:
            tails.append((minute, tail))
    if not tails:
        return None
    tail = breakdowns.newest(pool_id, class_ids).stack.tail(q)
    if tail is None or not tail.sum_us:
        return None
    stage = _top(tail)
    since = tails[-1][0]
    for minute, older in reversed(tails):
        if _top(older) != stage:
            break
        since = minute
    return WorstStage(stage, tail.stage_sums_us[stage] / tail.sum_us, tail.stage_means_us[stage], tail.mean_us, since)


def _top(tail: TailStack) -> str:
    return max(STACK_STAGES, key=lambda stage: tail.stage_sums_us[stage])


def stage_state(breakdowns: Breakdowns, pool_id: int, class_ids: Sequence[int]) -> dict[str, Any]:
    """Frame parts of the breakdown panel: a table of all percentiles and one figure for each."""
    key = ("state", pool_id, *class_ids)
    if key not in breakdowns.memo:
        breakdowns.memo[key] = _stage_state(breakdowns, pool_id, class_ids)
    state: dict[str, Any] = breakdowns.memo[key]
    return state


def _stage_state(breakdowns: Breakdowns, pool_id: int, class_ids: Sequence[int]) -> dict[str, Any]:
    whole = breakdowns.of(pool_id, class_ids)
    worst = worst_stage(breakdowns, pool_id, class_ids)
    shown = [
        stage for stage in STACK_STAGES if any(row[1 + STACK_STAGES.index(stage)] for row in whole.stack.rows.values())
    ]
    tails = {name: whole.stack.tail(q) for name, q in PERCENTILES}
    return {
        "stages_at": breakdowns.at.isoformat(),
        "stages_count": whole.stack.count,
        "stages_rows": [_stage_row(stage, whole, tails) for stage in shown],
        "stages_total": {f"mean_{name}": tail.mean_us if tail else None for name, tail in tails.items()}
        | {f"e2e_{name}": whole.stack.histogram().quantile_us(q) for name, q in PERCENTILES}
        | {f"ttft_{name}": whole.histograms[TTFT].quantile_us(q) for name, q in PERCENTILES},
        "stages_say": _sentence(worst),
        "worst": None if worst is None else {
            "stage": worst.stage, "name": worst.name, "share": worst.share, "us": worst.us,
            "total_us": worst.total_us, "since": worst.since.isoformat(), "fill": STAGE_FILLS[worst.stage],
        },
        **{f"stack_{name}": _figure(breakdowns, pool_id, class_ids, shown, q) for name, q in PERCENTILES},
    }  # fmt: skip


def _sentence(worst: WorstStage | None) -> str:
    if worst is None:
        return "No request has ended in the last 15 minutes."
    return f"{worst.name} takes {worst.share * 100:.0f} % of the time of the slowest 5 % of requests."


def _stage_row(stage: str, whole: Sketch, tails: Mapping[str, TailStack | None]) -> dict[str, Any]:
    row: dict[str, Any] = {"key": stage, "name": STAGE_NAMES[stage], "fill": "swatch fill-" + STAGE_FILLS[stage]}
    for name, q in PERCENTILES:
        tail = tails[name]
        row[f"own_{name}"] = whole.histograms[stage].quantile_us(q)
        row[f"mean_{name}"] = tail.stage_means_us[stage] if tail else None
        row[f"share_{name}"] = tail.stage_sums_us[stage] / tail.sum_us if tail and tail.sum_us else None
    return row


def _figure(
    breakdowns: Breakdowns, pool_id: int, class_ids: Sequence[int], shown: Sequence[str], q: float
) -> dict[str, Any]:
    """Bars by minute; a minute without requests is a gap."""
    tails = [breakdowns.of(pool_id, class_ids, minute).stack.tail(q) for minute in breakdowns.minutes]
    series = [
        figures.Series(
            STAGE_NAMES[stage],
            [None if tail is None else round(tail.stage_means_us[stage] / 1_000, 1) for tail in tails],
            _COLOURS[stage],
            _PATTERNS.get(stage, ""),
        )
        for stage in shown
    ]
    return figures.stacked_bars(list(breakdowns.minutes), series, unit="ms", decimals=1, height_px=260)


def strip_parts(
    breakdowns: Breakdowns, pool_id: int, class_ids: Sequence[int], q: float = 0.95
) -> list[dict[str, Any]]:
    """The newest two minutes with requests as one bar: each stage's share of the slowest requests' time."""
    tail = breakdowns.newest(pool_id, class_ids).stack.tail(q)
    if tail is None or not tail.sum_us:
        return []
    return [
        {
            "key": stage,
            "fill": f"fill-{STAGE_FILLS[stage]}",
            "share": tail.stage_sums_us[stage] / tail.sum_us,
            "title": f"{STAGE_NAMES[stage]} {tail.stage_means_us[stage] / 1000:,.1f} ms",
        }
        for stage in STACK_STAGES
        if tail.stage_sums_us[stage]
    ]
