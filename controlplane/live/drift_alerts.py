"""The alert of agents that do not run the revision they were asked to run, for longer than a rollout takes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from controlplane.live.attention import link
from controlplane.live.readings import Reading
from controlplane.live.strip import iso
from controlplane.policy.queries import AgentDrift

#: Agents pull within seconds; one that has not after so long will not by itself.
DRIFTS_AFTER: Final = timedelta(seconds=60)
AGENTS_NAMED: Final = 5
DRIFTING: Final = ("refused", "must_upgrade", "behind")


def drift_alerts(reading: Reading) -> Iterator[dict[str, Any]]:
    """One alert for each pool. Silent agents are not in it: they have one of their own."""
    by_pool: dict[str, list[AgentDrift]] = {}
    for row in reading.drift:
        if row.state in DRIFTING and row.since is not None and reading.now - row.since >= DRIFTS_AFTER:
            by_pool.setdefault(row.pool, []).append(row)
    silent = {w.agent_id for words in reading.words.values() for w in words if not w.fresh(reading.now)}
    for pool, rows in by_pool.items():
        heard = [row for row in rows if row.agent_id not in silent]
        if heard:
            yield _drift(pool, heard)


def _drift(pool: str, rows: list[AgentDrift]) -> dict[str, Any]:
    desired = max(row.desired or 0 for row in rows)
    refused = any(row.state != "behind" for row in rows)
    who = "1 agent" if len(rows) == 1 else f"{len(rows)} agents"
    return {
        "key": f"drift-{pool}",
        "kind": "drift",
        "pool": pool,
        "contract": "",
        "causes": [_cause(row) for row in rows[:AGENTS_NAMED]],
        "grade": "risk",
        "word": "Refused" if refused else "Drifting",
        "title": f"{who} in {pool} not on revision {desired}",
        "text": (
            f"Asked for more than {DRIFTS_AFTER.total_seconds():.0f} s ago. The last good revision holds there;"
            " keys, suspensions, freezes and loans reach it all the same."
        ),
        "since": iso(min(row.since for row in rows if row.since is not None)),
        "url": link("policy-drift"),
    }


def _cause(row: AgentDrift) -> dict[str, str]:
    runs = f"runs revision {row.applied}" if row.applied else "runs no revision"
    word = {"refused": "refused: ", "must_upgrade": "must be upgraded: "}.get(row.state, "")
    why = f"; {word}{row.reason}" if word else ""
    return {"label": row.name, "value": f"{runs}, asked for {row.desired}{why}", "url": link("agent", row.agent_id)}
