"""Queue rows by class and tenant from the agents' last words, and Little's law as a light beside them. Pure.

Only agents that were heard lately count. When some are silent the sums are of the others and say so; when all are,
every figure is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from controlplane.core.histogram import Histogram
from controlplane.core.little import LittleLight, LittleVerdict, compare

FRESH = timedelta(seconds=5)
WINDOW_US = 300_000_000
WINDOW_S = 300
HEAD_REASONS = {
    "": "",
    "no_serving_slot": "No slot serves this class now",
    "places_taken": "All places of its slots are taken",
    "slot_reserved": "A slot is reserved for it when memory frees",
    "kv_memory": "KV memory: no slot has room for it",
}


@dataclass(frozen=True, slots=True)
class AgentWord:
    """The last report of one agent; `figures` is `wire.report.LiveFigures` as JSON types."""

    agent_id: int
    name: str
    pool_id: int
    reported_at: datetime | None
    figures: Mapping[str, Any]
    revision: int = 0
    slots: tuple[int, ...] = ()

    def fresh(self, now: datetime) -> bool:
        return self.reported_at is not None and timedelta(seconds=-2) <= now - self.reported_at < FRESH


@dataclass(frozen=True, slots=True)
class Presence:
    """Sums over agents of one class or tenant in it; rates over 5 min. Times are microseconds."""

    depth: int
    oldest_us: int | None
    running: int
    arrivals_per_s: float
    departures_per_s: float
    present: float
    light: LittleLight


def presence(rows: Sequence[Mapping[str, Any]]) -> Presence:
    """Sums and the light of the same class (or tenant) on several agents."""
    arrivals = sum(row["arrivals_per_s"] for row in rows)
    departures = sum(row["departures_per_s"] for row in rows)
    present = sum(row["present_mean"] for row in rows)
    left = [(round(row["departures_per_s"] * WINDOW_S), row["residence_mean_us"]) for row in rows]
    residence_us = sum(count * mean for count, mean in left if mean is not None)
    light = compare(
        observed_present=max(0.0, present),
        arrivals=round(arrivals * WINDOW_S),
        departures=sum(count for count, mean in left if mean is not None),
        residence_us_sum=residence_us,
        window_us=WINDOW_US,
    )
    oldest = [row["oldest_age_us"] for row in rows if row["oldest_age_us"] is not None]
    return Presence(
        depth=sum(row["depth"] for row in rows),
        oldest_us=max(oldest, default=None),
        running=sum(row["running"] for row in rows),
        arrivals_per_s=arrivals,
        departures_per_s=departures,
        present=present,
        light=light,
    )


_LIGHTS = {
    LittleVerdict.STEADY: ("ok", "Within"),
    LittleVerdict.GAP: ("risk", "Gap"),
    LittleVerdict.NOT_STEADY: ("plain", "Not steady"),
}


def _light(own: Presence) -> dict[str, str]:
    if not own.arrivals_per_s:
        return {"light": "plain", "light_word": "No arrivals"}
    state, word = _LIGHTS[own.light.verdict]
    gap = own.light.gap_share
    if own.light.verdict is not LittleVerdict.NOT_STEADY and gap is not None:
        word = f"{word} {gap * 100:.0f} %"
    return {"light": state, "light_word": word}


def _unknown() -> dict[str, Any]:
    names = ("depth", "oldest_us", "running", "arrivals", "departures", "present", "expected", "p95_us", "refused")
    return dict.fromkeys(names) | {
        "light": "unknown", "light_word": "Unknown", "head": "", "head_why": "", "head_url": "", "css": "stale",
    }  # fmt: skip


def _row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = presence(rows)
    expected = own.light.expected if own.arrivals_per_s else None
    return {
        "depth": own.depth,
        "oldest_us": own.oldest_us,
        "running": own.running,
        "arrivals": round(own.arrivals_per_s, 2),
        "departures": round(own.departures_per_s, 2),
        "present": round(own.present, 1),
        "expected": None if expected is None else round(expected, 1),
        "css": "",
        **_light(own),
    }


@dataclass(frozen=True, slots=True)
class QueueNames:
    """What ids are called: classes as (slug, kind), tenants by slug."""

    classes: Mapping[int, tuple[str, str]]
    tenants: Mapping[int, str]


Refused = Mapping[tuple[int, int], Mapping[str, int]]
"""(class id, tenant id) -> reason -> count over 15 min."""


def queue_rows(
    words: Iterable[AgentWord], names: QueueNames, refused: Refused, now: datetime, *, tenant_id: int | None = None
) -> list[dict[str, Any]]:
    """Rows of the queue panel: each class, and under it its tenants; interactive first. `tenant_id` keeps one's own."""
    words = list(words)
    fresh = [word for word in words if word.fresh(now)]
    class_ids = {row["class_id"] for word in words for row in word.figures.get("classes", ())}
    # a class that nobody has (id 0) has no queue: who asked for it is among the refusals
    class_ids |= {class_id for class_id, _ in refused if class_id}
    order = sorted(class_ids, key=lambda c: (names.classes.get(c, ("", ""))[1] != "interactive", _class_slug(names, c)))
    result = []
    for class_id in order:
        own = _tenant_rows(class_id, words, fresh, names, refused, tenant_id)
        if tenant_id is None:
            result.append(_class_row(class_id, words, fresh, names, refused))
        result.extend(own)
    return result


def _class_slug(names: QueueNames, class_id: int) -> str:
    return names.classes.get(class_id, (f"class {class_id}", ""))[0]


def _class_row(
    class_id: int, words: Sequence[AgentWord], fresh: Sequence[AgentWord], names: QueueNames, refused: Refused
) -> dict[str, Any]:
    slug, kind = names.classes.get(class_id, (f"class {class_id}", ""))
    rows = [(w, row) for w in fresh for row in w.figures.get("classes", ()) if row["class_id"] == class_id]
    said = _unknown() if not rows else _row([row for _, row in rows])
    total: dict[str, int] = {}
    for (klass, _), counts in refused.items():
        if klass == class_id:
            for reason, count in counts.items():
                total[reason] = total.get(reason, 0) + count
    if rows:
        waits = Histogram()
        for _, row in rows:
            for index, count in row.get("wait_60s", ()):
                waits.counts[index] = waits.counts.get(index, 0) + count
        p95_us = waits.quantile_us(0.95)
        said["p95_us"] = 0 if p95_us is None else p95_us
        said |= _head([row for _, row in rows])
        said |= _refusals(total)
    silent = len(words) - len(fresh)
    return {
        "key": f"c{class_id}", "name": slug, "kind": kind, "kind_shown": kind, "level": "", **said,
        "note": f"without {silent} silent agent{'s' if silent > 1 else ''}" if rows and silent else "",
    }  # fmt: skip


def _head(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The head that has waited longest among the agents' heads."""
    heads = [row for row in rows if row["head_request_id"]]
    if not heads:
        return {"head": "", "head_why": "", "head_url": ""}
    head = max(heads, key=lambda row: row["oldest_age_us"] or 0)
    request_id = head["head_request_id"]
    return {
        "head": request_id[-6:],
        "head_why": HEAD_REASONS.get(head["head_reason"], head["head_reason"]),
        "head_url": f"/requests/{request_id}/",
    }


def _refusals(counts: Mapping[str, int]) -> dict[str, Any]:
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return {"refused": sum(counts.values()), "refused_why": ", ".join(f"{count} {reason}" for reason, count in ordered)}


def _learnt(rows: Sequence[Mapping[str, Any]]) -> str:
    """What agents learnt of a tenant's requests, and what admission makes of it; empty while nothing was learnt."""
    known = [(row["bias"], row["expected_output"]) for row in rows if row.get("bias") is not None]
    if not known:
        return ""
    biases, outputs = [bias for bias, _ in known], [output for _, output in known]
    return (
        f"its GPU time counts {_span(biases, '.2f')} times the estimate in waits and admission;"
        f" {_span(outputs, '.0f')} output tokens expected"
    )


def _span(values: Sequence[float], form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def _tenant_rows(
    class_id: int,
    words: Sequence[AgentWord],
    fresh: Sequence[AgentWord],
    names: QueueNames,
    refused: Refused,
    only: int | None,
) -> list[dict[str, Any]]:
    def said_by(chosen: Sequence[AgentWord]) -> dict[int, list[Mapping[str, Any]]]:
        found: dict[int, list[Mapping[str, Any]]] = {}
        for word in chosen:
            for row in word.figures.get("tenants", ()):
                if row["class_id"] == class_id and only in (None, row["tenant_id"]):
                    found.setdefault(row["tenant_id"], []).append(row)
        return found

    live, ever = said_by(fresh), said_by(words)
    ids = set(ever) | {t for c, t in refused if c == class_id and only in (None, t)}
    result = []
    for tenant_id in sorted(ids, key=lambda t: names.tenants.get(t, "")):
        counts = refused.get((class_id, tenant_id), {})
        rows = live.get(tenant_id)
        if rows is None and not fresh:
            said: dict[str, Any] = _unknown()
        elif rows is None:
            said = _row([]) | _refusals(counts)
        else:
            said = _row(rows) | _refusals(counts) | {"note": _learnt(rows)}
        slug = names.tenants.get(tenant_id, f"tenant {tenant_id}")
        klass, kind = names.classes.get(class_id, (f"class {class_id}", ""))
        result.append(
            {
                "head": "", "head_why": "", "head_url": "", "note": "", "p95_us": None, "refused_why": "", "kind": kind,
                **said, "key": f"c{class_id}t{tenant_id}", "name": slug if only is None else klass,
                "level": "level-1" if only is None else "", "kind_shown": "" if only is None else kind,
            }
        )  # fmt: skip
    return result
