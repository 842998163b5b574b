"""Which slot takes a request: least outstanding work, power of two choices over stale signals, longest cached prefix.

Stale signals herd: everyone who reads the same old figures sends to the same slot. So slots whose signals are older
than 250 ms are compared two at a time, picked at random (Mitzenmacher, "The Power of Two Choices", 2001); the random
numbers come from a generator that the caller seeds and passes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

STALE_AFTER_US: Final = 250_000
NEAR_NUMERATOR: Final = 110
NEAR_DENOMINATOR: Final = 100


@dataclass(slots=True)
class SlotSignal:
    """What is known of one slot; `signal_at_us` is when `outstanding_gpu_us` was true.

    `models` None serves every model, `free_kv_tokens` None has no KV memory to run short of.
    """

    slot: str
    outstanding_gpu_us: int
    signal_at_us: int
    ready: bool = True
    draining: bool = False
    models: frozenset[str] | None = None
    free_kv_tokens: int | None = None
    cached_prefix_tokens: int = 0


def may_take(signal: SlotSignal, model: str | None, kv_tokens: int) -> bool:
    """Whether the slot is ready, not draining, has the model and the memory."""
    return (
        signal.ready
        and not signal.draining
        and (model is None or signal.models is None or model in signal.models)
        and (signal.free_kv_tokens is None or kv_tokens <= signal.free_kv_tokens)
    )


def place(
    signals: Iterable[SlotSignal], *, model: str | None, kv_tokens: int, now_us: int, rng: Random
) -> SlotSignal | None:
    """The slot for a request, None when no slot may take it.

    While every signal is fresh all candidates are compared; as soon as one is stale, two picked by `rng` are.
    Among those within 10 % of the least outstanding work the longest cached prefix wins, then the slot's name.
    """
    candidates = [signal for signal in signals if may_take(signal, model, kv_tokens)]
    if len(candidates) > 2 and any(now_us - signal.signal_at_us > STALE_AFTER_US for signal in candidates):
        candidates = rng.sample(sorted(candidates, key=lambda signal: signal.slot), 2)
    return least_loaded(candidates)


def least_loaded(candidates: Sequence[SlotSignal]) -> SlotSignal | None:
    """Least outstanding gpu_us; within 10 % of it the longest cached prefix, then less work, then the name."""
    if not candidates:
        return None
    least = min(signal.outstanding_gpu_us for signal in candidates)
    near = [signal for signal in candidates if is_near(signal.outstanding_gpu_us, least)]
    return min(near, key=lambda signal: (-signal.cached_prefix_tokens, signal.outstanding_gpu_us, signal.slot))


def is_near(outstanding_gpu_us: int, least_gpu_us: int) -> bool:
    """Within 10 % of the least outstanding work."""
    return outstanding_gpu_us * NEAR_DENOMINATOR <= least_gpu_us * NEAR_NUMERATOR
