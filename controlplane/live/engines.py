"""What engines say of themselves: memory of the GPU, use of the KV cache, requests per slot and the size of batches.

Engines name different things and some name nothing: what an agent did not report, or reported too long ago, is None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import orjson
import redis

from controlplane.live.queues import AgentWord
from controlplane.web import figures

EVERY: Final = timedelta(seconds=15)
SPAN: Final = timedelta(minutes=15)
#: Kept points that end longer ago are of another time: the lines begin anew.
CONTINUES_WITHIN: Final = timedelta(minutes=2)
FIGURES: Final = ("running", "kv_pct", "gpu_pct", "batch")

Point = dict[str, Any]
"""`at` as ISO text and FIGURES of a pool: mean running requests of a slot, the fullest KV cache and GPU memory in %,
mean requests of an execution."""


def engine_rows(words: Sequence[AgentWord], now: datetime) -> list[dict[str, Any]]:
    """One row for each agent with what its inference server said last."""
    return [_engine_row(word, word.fresh(now)) for word in sorted(words, key=lambda one: one.name)]


def _engine_row(word: AgentWord, fresh: bool) -> dict[str, Any]:
    said: Mapping[str, Any] = (word.figures.get("engine") or {}) if fresh else {}
    used, total = said.get("gpu_used_bytes"), said.get("gpu_total_bytes")
    return {
        "key": str(word.agent_id),
        "name": word.name,
        "engine": said.get("engine") or "",
        "running": said.get("running"),
        "waiting": said.get("waiting"),
        "kv_used": said.get("kv_used"),
        "gpu_used": used / total if used is not None and total else None,
        "css": "" if fresh else "stale",
    }


def slot_rows(words: Sequence[AgentWord], names: Mapping[int, str], now: datetime) -> list[dict[str, Any]]:
    """One row for each slot that its agent reports: what runs there, and how much of its KV memory is promised."""
    rows = [
        {
            "key": names[said["slot_id"]],
            "name": names[said["slot_id"]],
            "agent": word.name,
            "running": said["running"],
            "batch": said["running_batch"],
            "kv_used": _kv_share(said),
        }
        for word in words
        if word.fresh(now)
        for said in word.figures.get("slots", ())
        if said["slot_id"] in names
    ]
    return sorted(rows, key=lambda row: row["key"])


def _kv_share(said: Mapping[str, Any]) -> float | None:
    total = said.get("total_kv_tokens") or 0
    return None if total <= 1 else max(0.0, 1 - said.get("free_kv_tokens", 0) / total)


class EngineLines:
    """Points of every pool over a quarter of an hour; a publisher that starts afresh goes on from the last frame."""

    def __init__(self) -> None:
        self._points: dict[str, deque[Point]] = {}
        self._counted: dict[int, tuple[int, int]] = {}

    def knows(self, pool: str) -> bool:
        return pool in self._points

    def resume(self, pool: str, points: Iterable[Point], now: datetime) -> None:
        """Takes up what was told before; points that are too old, or lie ahead, are left out."""
        kept = [point for point in points if timedelta(0) <= now - datetime.fromisoformat(point["at"]) <= SPAN]
        goes_on = kept and now - datetime.fromisoformat(kept[-1]["at"]) <= CONTINUES_WITHIN
        self._points[pool] = deque(kept if goes_on else ())

    def take(self, pool: str, words: Sequence[AgentWord], now: datetime) -> list[Point]:
        """The pool's points, with one of now where the last is old enough."""
        points = self._points.setdefault(pool, deque())
        if not points or now - datetime.fromisoformat(points[-1]["at"]) >= EVERY:
            points.append(self._point(words, now))
            while now - datetime.fromisoformat(points[0]["at"]) > SPAN:
                points.popleft()
        return list(points)

    def _point(self, words: Sequence[AgentWord], now: datetime) -> Point:
        fresh = [word for word in words if word.fresh(now)]
        slots = [said for word in fresh for said in word.figures.get("slots", ())]
        rows = [_engine_row(word, True) for word in fresh]
        kv = [row["kv_used"] for row in rows if row["kv_used"] is not None]
        kv = kv or [share for said in slots if (share := _kv_share(said)) is not None]
        gpu = [row["gpu_used"] for row in rows if row["gpu_used"] is not None]
        return {
            "at": now.isoformat(),
            "running": round(sum(said["running"] for said in slots) / len(slots), 2) if slots else None,
            "kv_pct": round(max(kv) * 100, 1) if kv else None,
            "gpu_pct": round(max(gpu) * 100, 1) if gpu else None,
            "batch": self._batch(fresh),
        }

    def _batch(self, words: Sequence[AgentWord]) -> float | None:
        """Inferences for each execution since the point before; None where no server counts them."""
        inferences = executions = 0
        for word in words:
            said = word.figures.get("engine") or {}
            now = (said.get("inferences"), said.get("executions"))
            if None in now:
                continue
            before = self._counted.get(word.agent_id)
            self._counted[word.agent_id] = now  # type: ignore[assignment]
            if before is not None and now[0] >= before[0] and now[1] >= before[1]:  # type: ignore[operator]
                inferences += now[0] - before[0]  # type: ignore[operator]
                executions += now[1] - before[1]  # type: ignore[operator]
        return round(inferences / executions, 2) if executions else None


def told_before(client: redis.Redis, keys: Sequence[str]) -> list[list[Point]]:
    """The points in the last frames of topics, by their keys; none where Redis does not answer or has none."""
    try:
        frames: Any = client.mget(list(keys)) if keys else []
    except redis.RedisError:
        return [[] for _ in keys]
    return [_points(raw) for raw in frames]


def _points(raw: bytes | None) -> list[Point]:
    points = None if raw is None else orjson.loads(raw)["data"].get("engine_points")
    return points if isinstance(points, list) else []


def line_figures(points: Sequence[Point]) -> dict[str, Any]:
    """Two charts: shares of memory in per cent, and requests on a slot or in a batch."""
    minutes = [datetime.fromisoformat(point["at"]) for point in points]

    def series(name: str, key: str, colour: str) -> figures.Series:
        return figures.Series(name, [point[key] for point in points], colour)

    memory = [series("KV cache", "kv_pct", "var(--series-1)"), series("GPU memory", "gpu_pct", "var(--series-2)")]
    running = [
        series("Per slot", "running", "var(--series-1)"),
        series("Batch", "batch", "var(--series-2)"),
    ]
    return {
        "memory_figure": figures.line_series(minutes, memory, unit="%", height_px=170),
        "running_figure": figures.line_series(minutes, running, unit="", height_px=170),
    }
