"""A rehearsal of a revision: everything that applying it would build is built once beside what is in force.

What cannot be built refuses the revision with its reason, so that applying can never stop half-way.
"""

from __future__ import annotations

from pathlib import Path

from controlplane.agent.batching import batch_policy
from controlplane.agent.objectives import ObjectiveLedger
from controlplane.agent.policy_state import LiveList
from controlplane.agent.registry import Registry
from controlplane.agent.rescheduling import build
from controlplane.agent.safe_rate import own_safe_rate
from controlplane.core.flex_policy import FlexPolicy
from controlplane.wire.policy import PolicyDocument


def trial_refusal(document: PolicyDocument) -> str | None:
    """Why a document cannot be applied, or None."""
    flex = document.pool.flex
    try:
        build(document, document.pool.slots)
        batch_policy(document)
        registry = Registry()
        registry.apply_policy(document, LiveList(Path()), 0)
        ObjectiveLedger().apply_policy(document)
        own_safe_rate(document, 0, {}, 0)
        FlexPolicy(lend_p95_us=flex.lend_p95_ms * 1000, drain_bound_us=flex.drain_bound_s * 1_000_000)
    except (ValueError, KeyError) as error:
        return f"the policy cannot be applied: {error}"
    return None
