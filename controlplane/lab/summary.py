"""What a replay comes to: waits, residence, objectives, places and Little's law, over all and by class.

Percentiles are nearest rank on the exact values: the smallest that at least that share of the values does not exceed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ticks = NDArray[np.int64]
PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Columns of one replay, by request, in ticks from the first arrival: -1 is never.

    `class_of` indexes `classes`; a refused request has neither start nor end, one that was started and never ended
    (timed out, displaced) has `completed` false and an end.
    """

    classes: tuple[str, ...]
    class_of: NDArray[np.int64]
    arrived: Ticks
    started: Ticks
    ended: Ticks
    completed: NDArray[np.bool_]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    places: int
    ticks_per_ms: int

    def only(self, mask: NDArray[np.bool_]) -> Replayed:
        """The rows of a mask."""
        return Replayed(
            self.classes, self.class_of[mask], self.arrived[mask], self.started[mask], self.ended[mask],
            self.completed[mask], self.prompt[mask], self.output[mask], self.places, self.ticks_per_ms,
        )  # fmt: skip


def summarise(run: Replayed, *, objective_ms: float | None) -> dict[str, Any]:
    """`{"all": ..., "classes": {slug: ...}}`, milliseconds and seconds as floats, missing as null."""
    end = _last(run)
    whole = figures(run, makespan=end, objective_ms=objective_ms)
    by_class = {
        slug: figures(run.only(run.class_of == index), makespan=end, objective_ms=objective_ms)
        for index, slug in enumerate(run.classes)
    }
    return {"all": whole, "classes": by_class}


def _last(run: Replayed) -> int:
    """The makespan: from the first arrival to the last end."""
    return int(run.ended.max()) if len(run.ended) and run.ended.max() > 0 else 0


def figures(run: Replayed, *, makespan: int, objective_ms: float | None) -> dict[str, Any]:
    """The figures of some requests over a makespan in ticks."""
    per_ms = run.ticks_per_ms
    was_started = run.started >= 0
    waits = (run.started - run.arrived)[was_started]
    residence = (run.ended - run.arrived)[run.completed]
    refused = int((~was_started & (run.ended < 0)).sum())
    within = None if objective_ms is None else int((waits <= objective_ms * per_ms).sum())
    ran = was_started & (run.ended >= 0)
    busy = int((run.ended[ran] - run.started[ran]).sum())
    seconds = makespan / per_ms / 1000
    in_system = run.ended >= 0
    present_mean = _present_mean(run.arrived[in_system & was_started], run.ended[in_system & was_started], makespan)
    stayed = (run.ended - run.arrived)[in_system & was_started]
    lambda_w = len(stayed) / makespan * float(stayed.mean()) if len(stayed) and makespan else None
    return {
        "arrivals": len(run.arrived),
        "started": int(was_started.sum()),
        "rejected": refused,
        "completed": int(run.completed.sum()),
        "wait_ms": distribution(waits, per_ms),
        "residence_ms": distribution(residence, per_ms),
        "within_objective_of_arrivals": _share(within, len(run.arrived)),
        "within_objective_of_started": _share(within, int(was_started.sum())),
        "busy_place_s": busy / per_ms / 1000,
        "utilisation": _share(busy, run.places * makespan),
        "in_system_mean": present_mean,
        "lambda_x_w": lambda_w,
        "makespan_s": seconds,
        "tokens": {"prompt": int(run.prompt[run.completed].sum()), "output": int(run.output[run.completed].sum())},
        "longest_queue": longest_queue(run.arrived[was_started], run.started[was_started]),
    }


def distribution(values: Ticks, per_ms: int) -> dict[str, float | None]:
    """Nearest-rank percentiles, maximum and mean in milliseconds."""
    ordered = np.sort(values)
    found: dict[str, float | None] = {f"p{percent}": nearest_rank(ordered, percent, per_ms) for percent in PERCENTILES}
    found["max"] = None if not len(ordered) else int(ordered[-1]) / per_ms
    found["mean"] = None if not len(ordered) else float(ordered.mean()) / per_ms
    return found


def nearest_rank(ordered: Ticks, percent: int, per_ms: int) -> float | None:
    """The value at rank ceil(percent / 100 x n) of ascending values."""
    if not len(ordered):
        return None
    return int(ordered[max(0, -(-percent * len(ordered) // 100) - 1)]) / per_ms


def longest_queue(arrived: Ticks, started: Ticks) -> int:
    """The most that waited at one time; one that starts as it arrives never waited."""
    waited = started > arrived
    if not waited.any():
        return 0
    instants = np.concatenate([started[waited], arrived[waited]])
    steps = np.concatenate([np.full(waited.sum(), -1), np.full(waited.sum(), 1)])
    # At one instant those who start leave before others come: ends are before arrivals.
    return int(np.cumsum(steps[np.lexsort((steps, instants))]).max())


def _present_mean(arrived: Ticks, ended: Ticks, makespan: int) -> float | None:
    """Time average of the number in the system, by its steps and not by anybody's residence."""
    if not makespan or not len(arrived):
        return None
    instants = np.concatenate([arrived, ended])
    order = np.argsort(instants, kind="stable")
    present = np.cumsum(np.concatenate([np.ones(len(arrived), np.int64), -np.ones(len(ended), np.int64)])[order])
    return float((present[:-1] * np.diff(instants[order])).sum()) / makespan


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or not whole else part / whole


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """theirs - ours, number by number; null where either is not known."""
    found: dict[str, Any] = {}
    for name, value in ours.items():
        other = theirs.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found[name] = difference(value, other)
        elif isinstance(value, (int, float)) and isinstance(other, (int, float)):
            found[name] = other - value
        else:
            found[name] = None
    return found


def as_columns(*columns: Sequence[int]) -> list[NDArray[np.int64]]:
    """Sequences of integers as arrays of 64 bits."""
    return [np.asarray(column, dtype=np.int64) for column in columns]
