"""Health details for operators: what is in force, what is waiting, what is wrong."""

from __future__ import annotations

from typing import Any, Protocol

from controlplane.agent.engine import Engine
from controlplane.agent.gpu_watch import GpuWatch
from controlplane.agent.policy_state import LiveList, PolicyState
from controlplane.agent.readiness import not_ready
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
        "not_ready": not_ready(engine),
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
        "inference_server": _server(engine),
        "requests": {
            "offered": engine.offered,
            "present": len(engine.calls),
            "waiting_for_lease": sum(len(calls) for calls in engine.desk.waiting.values()),
            "ended": {outcome.value: count for outcome, count in engine.outcomes.items() if count},
        },
        "items": _items(engine),
        "outage": {
            engine.registry.tenant_slug(tenant_id) or str(tenant_id): {
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
            "reports_dropped": store.reports_dropped,
        },
        "clock": _clock(engine),
        "traces": _traces(engine),
        "slots": {
            name: {
                "state": slot.state,
                "running": len(engine.scheduled_slot(name).running),
                "flex": engine.flex.slots[name].state.value if name in engine.flex.slots else None,
                "fence": engine.flex.slots[name].grant.fence if name in engine.flex.slots else None,
            }
            for name, slot in sorted(engine.slots.items())
        },
    }


def _server(engine: Engine) -> dict[str, Any] | None:
    """What the server behind `--upstream` says of itself; null is unknown."""
    watch = engine.readiness.watch
    if watch is None:
        return None
    reading, age_s = watch.reading, watch.reading_age_s
    return {
        "state": engine.readiness.state,
        "why": engine.readiness.why or None,
        "engine": reading.engine or None,
        "running": reading.running,
        "waiting": reading.waiting,
        "kv_used": reading.kv_used,
        "gpus": None if watch.gpus is None else _gpus(watch.gpus),
        "figures_age_ms": None if age_s is None else round(age_s * 1000),
        "figures_failed": watch.failed,
        "restarts": watch.totals.restarts,
    }


def _gpus(watch: GpuWatch) -> dict[str, Any]:
    """What DCGM's exporter says of the server's GPUs; null is unknown."""
    memory, age_s = watch.memory, watch.age_s
    return {
        "used_bytes": memory.used_bytes,
        "total_bytes": memory.total_bytes,
        "age_ms": None if age_s is None else round(age_s * 1000),
        "failed": watch.failed,
    }


def _items(engine: Engine) -> dict[str, Any]:
    """Batch items that are leased to this agent, and what became of earlier ones."""
    items, slugs = engine.items, {entry.policy.id: slug for slug, entry in engine.registry.classes.items()}
    by_class: dict[str, dict[str, int]] = {}
    for (class_id, phase), count in sorted(items.counts().items()):
        by_class.setdefault(slugs.get(class_id, f"class-{class_id}"), {})[phase.value] = count
    ended: dict[str, dict[str, int]] = {}
    for (class_id, outcome), count in sorted(items.done.items()):
        ended.setdefault(slugs.get(class_id, f"class-{class_id}"), {})[outcome.value] = count
    return {"held": by_class, "held_bytes": items.held.bytes, "ended": ended, "lapsed": items.lapsed}


def _clock(engine: Engine) -> dict[str, Any] | None:
    """This machine's clock minus the control plane's; None is not known."""
    offset = engine.clock.offset
    reading = offset.reading()
    if reading is None:
        return None
    return {"offset_us": reading.offset_us, "error_us": reading.error_us, "off": offset.is_off()}


def _traces(engine: Engine) -> dict[str, int] | None:
    """None while tracing is off."""
    tracer = engine.tracer
    return None if tracer is None else {"exported": tracer.exported, "dropped": tracer.dropped, "failed": tracer.failed}
