"""Charges: usage x rate card, in integer nanos of the book currency.

A price per token is nanos per million tokens; the optional GPU price is nanos per slot-hour. A charge has one line per
kind; each line is rounded half to even exactly once, the batch discount included, and the rounding is sign-symmetric
so that a credit of the same usage cancels the charge to the last nano.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from controlplane.core.money import round_ratio

MTOK: Final = 1_000_000
PPM: Final = 1_000_000
HOUR_US: Final = 3_600_000_000


@dataclass(frozen=True, slots=True)
class RateCard:
    """Prices in force at a request's arrival.

    Raises ValueError when a price is negative or the discount is outside 0 to 1,000,000 ppm.
    """

    prompt_nanos_per_mtok: int
    cached_nanos_per_mtok: int
    output_nanos_per_mtok: int
    gpu_nanos_per_slot_hour: int | None = None
    batch_discount_ppm: int = 0
    rate_version: int = 0

    def __post_init__(self) -> None:
        prices = (
            self.prompt_nanos_per_mtok,
            self.cached_nanos_per_mtok,
            self.output_nanos_per_mtok,
            self.gpu_nanos_per_slot_hour or 0,
        )
        if any(price < 0 for price in prices):
            raise ValueError("a price of a rate card cannot be negative; book a credit as a correction instead")
        if not 0 <= self.batch_discount_ppm <= PPM:
            raise ValueError(f"batch_discount_ppm must be between 0 and {PPM:,}, got {self.batch_discount_ppm}")

    @property
    def is_free(self) -> bool:
        """Nothing has a price."""
        return not (
            self.prompt_nanos_per_mtok
            or self.output_nanos_per_mtok
            or self.cached_nanos_per_mtok
            or self.gpu_nanos_per_slot_hour
        )


class ChargeLines(NamedTuple):
    """A charge by line kind, each in nanos; `total_nanos` is their sum."""

    prompt_nanos: int
    cached_nanos: int
    output_nanos: int
    gpu_nanos: int
    total_nanos: int


def charge_upper_bound_nanos(
    card: RateCard, prompt_tokens: int, max_output_tokens: int, n: int = 1, stage_timeout_us: int = 0
) -> int:
    """The most a request can be charged, in nanos: what is reserved from a lease at admission.

    ceil per line of prompt x the dearer of prompt and cached price, n x max_output x output price, and the GPU price
    x the stage timeout where the card has one. The batch discount is left out, so the bound stays one.
    """
    if card.is_free:
        return 0
    dearer = card.prompt_nanos_per_mtok
    if card.cached_nanos_per_mtok > dearer:
        dearer = card.cached_nanos_per_mtok
    bound = -(-prompt_tokens * dearer // MTOK) - (-n * max_output_tokens * card.output_nanos_per_mtok // MTOK)
    if card.gpu_nanos_per_slot_hour is not None:
        bound -= -card.gpu_nanos_per_slot_hour * stage_timeout_us // HOUR_US
    return bound


def capped(lines: ChargeLines, bound_nanos: int) -> ChargeLines:
    """The charge cut to a reservation; first what an engine can inflate: GPU time, output, then the prompt."""
    over = lines.total_nanos - bound_nanos
    if over <= 0:
        return lines
    kept = []
    for nanos in (lines.gpu_nanos, lines.output_nanos, lines.cached_nanos, lines.prompt_nanos):
        cut = min(nanos, over)
        over -= cut
        kept.append(nanos - cut)
    gpu, output, cached, prompt = kept
    return ChargeLines(prompt, cached, output, gpu, prompt + cached + output + gpu)


def charge(
    card: RateCard, *, prompt_tokens: int, cached_tokens: int, output_tokens: int, gpu_us: int, batch: bool = False
) -> ChargeLines:
    """The charge of a request, one rounded line per kind.

    `prompt_tokens` counts the whole prompt; `cached_tokens` is the part of it that came from the prefix cache and is
    priced as cached. Negative usage (all kinds) is a credit. `batch` applies the card's batch discount.
    Raises ValueError when the cached part is larger than the prompt or has the other sign.
    """
    if abs(cached_tokens) > abs(prompt_tokens) or cached_tokens * prompt_tokens < 0:
        raise ValueError(f"cached_tokens {cached_tokens} is not a part of prompt_tokens {prompt_tokens}")
    keep_ppm = PPM - card.batch_discount_ppm if batch else PPM
    prompt = round_ratio((prompt_tokens - cached_tokens) * card.prompt_nanos_per_mtok * keep_ppm, MTOK * PPM)
    cached = round_ratio(cached_tokens * card.cached_nanos_per_mtok * keep_ppm, MTOK * PPM) if cached_tokens else 0
    output = round_ratio(output_tokens * card.output_nanos_per_mtok * keep_ppm, MTOK * PPM)
    hourly = card.gpu_nanos_per_slot_hour
    gpu = round_ratio(gpu_us * hourly * keep_ppm, HOUR_US * PPM) if hourly else 0
    return ChargeLines(prompt, cached, output, gpu, prompt + cached + output + gpu)
