"""What a change to a pool's policy would have done to what it served: the policy in force against the proposed one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from controlplane.experiments.recorded import Recorded, policy_in_force, recorded
from controlplane.fleet.models import Pool
from controlplane.lab.policies import changed
from controlplane.lab.report import NO_GPU
from controlplane.lab.scenario import effects, run_policy
from controlplane.lab.service import ServiceModel


def what_if(
    pool: Pool,
    changes: Mapping[str, Any],
    *,
    since: datetime,
    until: datetime,
    objective_ms: float | None = None,
    service: ServiceModel | None = None,
) -> dict[str, Any]:
    """Both results and the table of effects, in the form of `lab replay`.

    Raises NothingRecorded for a window that cannot be replayed, ValueError for a change that makes no sense.
    """
    document = policy_in_force(pool)
    proposed = changed(document, changes)
    found: Recorded = recorded(pool, document, since, until, service)
    now, then = (
        run_policy(policy, found.load, found.service, objective_ms=objective_ms) for policy in (document, proposed)
    )
    return {
        "note": NO_GPU,
        "pool": pool.slug,
        "since": since.isoformat(),
        "until": until.isoformat(),
        "revision": document.revision,
        "policy": f"revision {document.revision} of {pool.slug}",
        "set": {},
        "slots": len(document.pool.slots),
        "per_slot": max((slot.places for slot in document.pool.slots), default=0),
        "unknown_records": found.unknown,
        "refused_lines": {},
        "result": now,
        "against": {"policy": "the same", "set": dict(changes), "result": then},
        "effects": effects(now, then),
    }
