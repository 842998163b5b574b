"""Health details for operators: what is in force, what is waiting, what is wrong."""

from __future__ import annotations

from typing import Any, Protocol

from controlplane.agent.engine import Engine
from controlplane.agent.policy_state import LiveList, PolicyState
from controlplane.agent.spool_store import SpoolStore


class ControlState(Protocol):
    """What health tells of the conversation with the control plane."""

    reachable: bool
    trouble: str
    last_answer_us: int
    policy: PolicyState
    live: LiveList

    def epoch_now(self) -> int: ...


def health_details(engine: Engine, store: SpoolStore, control: ControlState) -> dict[str, Any]:
    """JSON of the admin listener's /healthz."""
    now_us = engine.clock.now_us()
    slices = engine.leases.slices_nanos(now_us)
    return {
        "ready": engine.ready,
        "closed_because": engine.closed_because() or None,
        "control_plane": {
            "reachable": control.reachable,
            "trouble": control.trouble or None,
            "last_answer_age_ms": (now_us - control.last_answer_us) // 1000 if control.last_answer_us else None,
        },
        "epoch": control.epoch_now(),
        "revision": engine.revision,
        "refused_revision": control.policy.refused_revision,
        "refused_reason": control.policy.refused_reason or None,
        "live_number": control.live.number,
        "live_problem": control.live.problem or None,
        "requests": {
            "offered": engine.offered,
            "present": len(engine.calls),
            "waiting_for_lease": sum(len(calls) for calls in engine.desk.waiting.values()),
            "ended": {outcome.value: count for outcome, count in engine.outcomes.items() if count},
        },
        "outage": {
            engine.tenant_slug(tenant_id) or str(tenant_id): {
                "slice_left_nanos": slices.get(tenant_id, 0),
                "admitted": away.admitted if away else 0,
                "refused": away.refused if away else 0,
            }
            for tenant_id in sorted(slices.keys() | engine.desk.outage.tenants.keys())
            for away in (engine.desk.outage.tenants.get(tenant_id),)
        },
        "spool": {
            "bytes": store.size_bytes(),
            "reports_waiting": store.unaccepted_reports,
            "epochs_unsealed": [spool.epoch for spool in store.unsealed()],
            "dropped": store.dropped,
        },
        "slots": {
            name: {
                "state": slot.state,
                "running": len(engine.scheduled_slot(name).running),
                "flex": engine.flex.slots[name].state.value if name in engine.flex.slots else None,
            }
            for name, slot in sorted(engine.slots.items())
        },
    }
