"""What this agent has learnt of its tenants' requests, kept over restarts: bias, expected output, tokens per byte.

It is a statistic of one agent and no decision of anybody else's: losing it costs some requests' worth of learning. So
it is written once a minute and at an orderly end, and what cannot be read or cannot be true is left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from controlplane.agent.atomic_file import write_atomic
from controlplane.core.estimate import BIAS_MAX, BIAS_MIN, TOKENS_PER_BYTE_MAX, DemandEstimate

log = logging.getLogger(__name__)

FILE: Final = "estimates.json"
ROWS_MAX: Final = 100_000
EVERY_S: Final = 60.0

Estimates = Mapping[tuple[int, int], DemandEstimate]
"""(tenant id, class id) -> estimate."""


class EstimateRow(msgspec.Struct, array_like=True, frozen=True):
    """One tenant's requests of one class."""

    tenant_id: int
    class_id: int
    bias: float
    expected_output: float | None
    tokens_per_byte: float


_decoder = msgspec.json.Decoder(list[EstimateRow])


def encode(estimates: Estimates) -> bytes:
    """Those that have learnt something."""
    rows = [
        EstimateRow(tenant_id, class_id, one.bias, one.expected_output, one.tokens_per_byte)
        for (tenant_id, class_id), one in estimates.items()
        if one.expected_output is not None
    ]
    return msgspec.json.encode(rows[:ROWS_MAX])


def save(state_dir: Path, body: bytes) -> None:
    """Write what `encode` made; a disk that is full costs the file and nothing else."""
    try:
        write_atomic(state_dir / FILE, body)
    except OSError as error:
        log.warning("what was learnt of requests could not be kept: %s", error)


def load(state_dir: Path) -> dict[tuple[int, int], DemandEstimate]:
    """What the process before had learnt; empty where there is nothing or it cannot be read."""
    try:
        rows = _decoder.decode((state_dir / FILE).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("what was learnt of requests cannot be read, it is learnt anew: %s", error)
        return {}
    return {(row.tenant_id, row.class_id): _estimate(row) for row in rows[:ROWS_MAX] if _is_possible(row)}


def _is_possible(row: EstimateRow) -> bool:
    numbers = (row.bias, row.tokens_per_byte, row.expected_output or 0.0)
    return all(math.isfinite(number) and number >= 0 for number in numbers)


def _estimate(row: EstimateRow) -> DemandEstimate:
    estimate = DemandEstimate(
        expected_output=row.expected_output, tokens_per_byte=min(row.tokens_per_byte, TOKENS_PER_BYTE_MAX)
    )
    estimate.bias = min(BIAS_MAX, max(BIAS_MIN, row.bias))
    return estimate
