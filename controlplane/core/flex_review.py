"""The weekly look at a flex band: is lending still a spillover, or has it become the partition?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from controlplane.core.flex_policy import SafeRate, exact

WEEK_US = 7 * 24 * 3600 * 1_000_000
#: A slot that one class holds for more than this share of a week belongs to that class.
SETTLED_SHARE = 0.95
#: A p99 that grew by more than this share over the week before is rising.
P99_RISE = 0.20


class ReviewFinding(StrEnum):
    LENDS_OVER_BUDGET = "lends_over_budget"
    QUEUE_P99_RISING = "queue_p99_rising"
    SLACK_SHRINKING = "slack_shrinking"
    RESIZE_PARTITION = "resize_partition"


@dataclass(frozen=True, kw_only=True)
class SlotWeek:
    """Assigned time of one flex slot over the trailing seven days; time that nobody observed is in neither."""

    slot: str
    interactive_us: int
    batch_us: int

    def __post_init__(self) -> None:
        if min(self.interactive_us, self.batch_us) < 0 or self.interactive_us + self.batch_us > WEEK_US:
            raise ValueError(f"slot {self.slot}: assigned times must be 0 or more and fit into one week")


@dataclass(frozen=True, kw_only=True)
class FlexWeek:
    """One pool's trailing seven days beside the seven before. ``None`` is not known and finds nothing."""

    lends: int
    spillover_per_week: int | None
    queue_p99_us: int | None
    queue_p99_before_us: int | None
    mean_slack: float | None
    mean_slack_before: float | None
    interactive_floor: int
    batch_floor: int
    flex_slots: tuple[SlotWeek, ...]
    #: Highest admitted interactive rate of any minute of the trace.
    peak_admitted_per_s: float
    load_limit: float
    safe_rate: SafeRate | None


@dataclass(frozen=True, kw_only=True)
class FloorAdvice:
    """Floor sizes that the week supports. ``supported`` is false when the peak does not fit what interactive keeps."""

    interactive_floor: int
    batch_floor: int
    flex: int
    supported: bool


@dataclass(frozen=True, kw_only=True)
class FlexReview:
    findings: tuple[ReviewFinding, ...]
    settled_with_interactive: tuple[str, ...]
    settled_with_batch: tuple[str, ...]
    #: ``None`` when no slot has settled.
    advice: FloorAdvice | None


def review(week: FlexWeek) -> FlexReview:
    """Findings of the week and, where slots have settled with one class, the floors to make of them."""
    settled_us = exact(SETTLED_SHARE) * WEEK_US
    with_interactive = tuple(sorted(slot.slot for slot in week.flex_slots if slot.interactive_us > settled_us))
    with_batch = tuple(sorted(slot.slot for slot in week.flex_slots if slot.batch_us > settled_us))
    advice = _advise(week, len(with_interactive), len(with_batch)) if with_interactive or with_batch else None
    holding = {
        ReviewFinding.LENDS_OVER_BUDGET: week.spillover_per_week is not None and week.lends > week.spillover_per_week,
        ReviewFinding.QUEUE_P99_RISING: _is_rising(week.queue_p99_us, week.queue_p99_before_us),
        ReviewFinding.SLACK_SHRINKING: _is_less(week.mean_slack, week.mean_slack_before),
        ReviewFinding.RESIZE_PARTITION: advice is not None,
    }
    return FlexReview(
        findings=tuple(finding for finding, holds in holding.items() if holds),
        settled_with_interactive=with_interactive,
        settled_with_batch=with_batch,
        advice=advice,
    )


def interactive_slots_for(rate_per_s: float, *, safe_rate: SafeRate, load_limit: float, at_most: int) -> int | None:
    """Fewest slots whose tested rate keeps this rate under the load limit; ``None`` when ``at_most`` are too few."""
    for slots in range(1, at_most + 1):
        if exact(rate_per_s) < safe_rate.at(slots) * exact(load_limit):
            return slots
    return None


def _advise(week: FlexWeek, to_interactive: int, to_batch: int) -> FloorAdvice:
    """Settled slots become floor of their class; the batch floor grows only as far as the peak leaves interactive."""
    total = week.interactive_floor + week.batch_floor + len(week.flex_slots)
    needed = None
    if week.safe_rate is not None:
        needed = interactive_slots_for(
            week.peak_admitted_per_s, safe_rate=week.safe_rate, load_limit=week.load_limit, at_most=total
        )
    spare_for_batch = total - week.batch_floor - (total if needed is None else needed)
    batch_growth = max(0, min(to_batch, spare_for_batch))
    interactive_floor = week.interactive_floor + to_interactive
    batch_floor = week.batch_floor + batch_growth
    return FloorAdvice(
        interactive_floor=interactive_floor,
        batch_floor=batch_floor,
        flex=total - interactive_floor - batch_floor,
        supported=needed is not None and needed <= total - batch_floor and batch_growth == to_batch,
    )


def _is_rising(now_us: int | None, before_us: int | None) -> bool:
    if now_us is None or before_us is None:
        return False
    return now_us > before_us * (1 + exact(P99_RISE))


def _is_less(now: float | None, before: float | None) -> bool:
    return now is not None and before is not None and math.isfinite(before) and now < before
