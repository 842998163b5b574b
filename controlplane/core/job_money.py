"""What a job can be charged at most, and what it is expected to be charged: integer nanos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.pricing import RateCard, charge, charge_upper_bound_nanos


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Sums over the items of a job: what is expected of them, and what they can be at most."""

    items: int
    prompt_tokens: int
    output_tokens: int
    prompt_bound_tokens: int
    output_bound_tokens: int


def job_bound_nanos(cards: Sequence[RateCard], size: JobSize, *, stage_timeout_us: int) -> int:
    """The most that a job's items can be charged together, under the dearest of the cards that may apply to it.

    Never less than the sum of the items' own bounds: each of an item's three lines is rounded up by less than a nano,
    so that many are added. 0 without cards: nothing is charged then.
    """
    return max((_bound(card, size, stage_timeout_us) for card in cards), default=0)


def _bound(card: RateCard, size: JobSize, stage_timeout_us: int) -> int:
    together = charge_upper_bound_nanos(
        card, size.prompt_bound_tokens, size.output_bound_tokens, 1, size.items * stage_timeout_us
    )
    return together + 3 * size.items if together else 0


def job_estimate_nanos(card: RateCard, size: JobSize, *, gpu_us: int) -> int:
    """What a job is expected to be charged under a card, batch discount included."""
    return charge(
        card,
        prompt_tokens=size.prompt_tokens,
        cached_tokens=0,
        output_tokens=size.output_tokens,
        gpu_us=gpu_us,
        batch=True,
    ).total_nanos
