"""A service curve from what was measured: constants by least squares, and tables of prefill and decode.

What a client sees is queue, prefill and decode: the queue is told by the agent, the first token ends the prefill, and
what is left is decode. Nothing is fitted to fewer than `FEW` requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.agent.backends.curves import ServiceCurve
from controlplane.lab.fit import least_squares
from controlplane.lab.live_load import COMPLETED, Seen
from controlplane.lab.service import Constants, ServiceModel, Tables

FEW: Final = 20
BUCKETS: Final = 6
RUNNING: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants, tables of [prompt tokens, ms] and [requests at once, ms a token], and the error of the constants."""

    service: Constants
    prefill_ms: list[list[float]]
    decode_ms: list[list[float]]
    requests: int
    prefill_error: float
    decode_error: float

    def model(self) -> ServiceModel:
        """The tables, by which a decode step is longer the more run at once; the constants where there are too few."""
        prefill, decode = (tuple((int(at), ms) for at, ms in table) for table in (self.prefill_ms, self.decode_ms))
        if len(prefill) < 2 or len(decode) < 2:
            return self.service
        return Tables(ServiceCurve("this measurement", prefill, decode))

    def told(self) -> dict[str, Any]:
        return {
            "service": self.service.described(), "prefill_ms": self.prefill_ms, "decode_ms": self.decode_ms,
            "requests": self.requests, "prefill_error_median": self.prefill_error,
            "decode_error_median": self.decode_error,
        }  # fmt: skip


def calibrated(seen: Sequence[Seen]) -> Calibration | None:
    """None where too few completed to say anything."""
    done = [one for one in seen if one.end == COMPLETED and one.first_us >= 0 and one.output_tokens > 0]
    if len(done) < FEW:
        return None
    prompt = np.asarray([one.prompt_tokens for one in done], float)
    output = np.asarray([one.output_tokens for one in done], float)
    prefill = np.asarray([max(1, one.first_us - one.sent_us - max(0, one.queue_us)) for one in done], float)
    decode = np.asarray([one.ended_us - one.first_us for one in done], float)
    base_us, prompt_us = least_squares(np.column_stack([np.ones_like(prompt), prompt]), prefill)
    output_us = float(decode.sum() / output.sum())
    service = Constants(max(1, round(base_us)), round(prompt_us), round(output_us))
    return Calibration(
        service, _prefill_table(prompt, prefill), _decode_table(done), len(done),
        _error(prefill, service.base_us + prompt * service.prompt_us), _error(decode, output * service.output_us),
    )  # fmt: skip


def _error(measured: NDArray[np.float64], modelled: NDArray[np.float64]) -> float:
    """Median of how far the model is off, as a share of what was measured."""
    return float(np.median(np.abs(modelled - measured) / np.maximum(1.0, measured)))


def _prefill_table(prompt: NDArray[np.float64], prefill: NDArray[np.float64]) -> list[list[float]]:
    """Medians of equal groups by prompt length."""
    order = np.argsort(prompt, kind="stable")
    found: dict[int, float] = {}
    for part in np.array_split(order, min(BUCKETS, len(order))):
        found[int(np.median(prompt[part]))] = round(float(np.median(prefill[part])) / 1_000, 3)
    return [[at, ms] for at, ms in sorted(found.items())]


def _decode_table(done: Sequence[Seen]) -> list[list[float]]:
    """Median time of a token by how many requests decoded at once, those with at least three."""
    begins = np.sort(np.asarray([one.first_us for one in done]))
    ends = np.sort(np.asarray([one.ended_us for one in done]))
    groups: dict[int, list[float]] = {}
    for one in done:
        if one.output_tokens < 2:
            continue
        middle = (one.first_us + one.ended_us) // 2
        running = int(np.searchsorted(begins, middle, "right") - np.searchsorted(ends, middle, "right"))
        bucket = max((bound for bound in RUNNING if bound <= running), default=1)
        groups.setdefault(bucket, []).append((one.ended_us - one.first_us) / (one.output_tokens - 1) / 1_000)
    return [[bucket, round(float(np.median(steps)), 3)] for bucket, steps in sorted(groups.items()) if len(steps) > 2]
