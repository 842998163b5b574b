"""Straight lines through what was measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def least_squares(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Least squares with every coefficient at least 0: those that come out negative are left out and fitted again."""
    kept = list(range(columns.shape[1]))
    while kept:
        fit, *_ = np.linalg.lstsq(columns[:, kept], values, rcond=None)
        if (fit >= 0).all():
            break
        kept = [at for at, value in zip(kept, fit, strict=True) if value >= 0]
    found = [0.0] * columns.shape[1]
    for at, value in zip(kept, fit if kept else (), strict=True):
        found[at] = float(value)
    return found
