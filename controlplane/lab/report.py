"""What a simulation comes to, as one JSON-ready document: waits and ends, loans and drains, jobs, slots, tenants.

Percentiles of waits are nearest rank on exact values; the histograms beside them are the fleet's own sketch, so that a
simulated night can be laid over a real one. Unknown is null.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.core.histogram import ZERO_INDEX, Histogram
from controlplane.core.reasons import OUTCOME_CODES, Outcome
from controlplane.core.slots import Isolation
from controlplane.lab.calls import Columns
from controlplane.lab.items import SimulatedJob
from controlplane.lab.pool_control import Loan, PoolControl
from controlplane.lab.simulator import STEP_US, Simulator
from controlplane.lab.summary import Replayed, distribution, summarise

US_PER_S: Final = 1_000_000
COMPLETED: Final = OUTCOME_CODES[Outcome.COMPLETED]
LOANS_SHOWN: Final = 1_000
NO_GPU: Final = "simulated on a virtual clock: no GPU was involved"


def report(
    simulator: Simulator, control: PoolControl | None = None, *, objective_ms: float | None, by_tenant: bool = True
) -> dict[str, Any]:
    """The whole document; read after `run`. Without `by_tenant` its rows and histograms by tenant are left out."""
    run = replayed(simulator)
    summary = summarise(run, objective_ms=objective_ms)
    for slug, figures in summary["classes"].items():
        figures |= _ends(simulator, run, slug, objective_ms)
    return {
        "service": simulator.service.described(),
        "simulated_s": (simulator.now_us() - simulator.start_us) / US_PER_S,
        "objective_ms": objective_ms,
        **summary,
        "preempted": simulator.preempted,
        "outcomes": {outcome.value: count for outcome, count in sorted(simulator.outcomes.items()) if count},
        **({"tenants": _tenants(simulator, run), "histograms": histograms(simulator)} if by_tenant else {}),
        "slots": _slots(simulator),
        "flex": None if control is None else _flex(simulator, control),
        "jobs": [] if control is None else [_job(job, simulator) for job in control.items.jobs],
    }


def replayed(simulator: Simulator) -> Replayed:
    """The workload's requests as the summary reads them."""
    columns, work = simulator.columns, simulator.workload
    code = np.frombuffer(columns.code, np.int8) if len(work) else np.zeros(0, np.int8)
    arrived, started, ended = (_array(columns, name) for name in ("arrived_us", "started_us", "ended_us"))
    refused = code >= 32
    origin = simulator.start_us + (work.at_us[0] if len(work) else 0)
    return Replayed(
        work.classes,
        np.asarray(work.class_of, np.int64),
        arrived - origin,
        np.where(started < 0, -1, started - origin),
        np.where(refused | (ended < 0), -1, ended - origin),
        code == COMPLETED,
        np.asarray(work.prompt, np.int64),
        _array(columns, "output"),
        sum(slot.places for slot in simulator.scheduler.slots),
        1_000,
    )


def _array(columns: Columns, name: str) -> NDArray[np.int64]:
    column = getattr(columns, name)
    return np.frombuffer(column, np.int64) if len(column) else np.zeros(0, np.int64)


def _ends(simulator: Simulator, run: Replayed, slug: str, objective_ms: float | None) -> dict[str, Any]:
    """TTFT of those that completed, its share of all offered, what was poorly served, and refusals by reason.

    Poor are requests that were admitted and truncated, downgraded, or ended without an answer.
    """
    own = run.class_of == run.classes.index(slug)
    columns = simulator.columns
    ttft = (_array(columns, "first_us") - _array(columns, "arrived_us"))[own & run.completed]
    refused: Counter[str] = Counter()
    for (_, class_slug, reason), count in simulator.refused.items():
        if class_slug == slug:
            refused[reason.value] += count
    offered, admitted = int(own.sum()), own & (run.ended >= 0)
    within = None if objective_ms is None else int((ttft <= objective_ms * 1_000).sum())
    served = np.frombuffer(columns.served, np.int16) if len(run.arrived) else np.zeros(0, np.int16)
    queue = simulator.scheduler.class_queue(slug).index
    cut = run.output < np.asarray(simulator.workload.output, np.int64)
    poor = int((admitted & (~run.completed | cut | (served != queue))).sum())
    return {
        "ttft_ms": distribution(ttft, 1_000),
        "ttft_within_objective": None if within is None or not offered else within / offered,
        "poor_share": poor / int(admitted.sum()) if admitted.any() else 0.0,
        "refused": dict(sorted(refused.items())),
        "gpu_s": float(_array(columns, "gpu_us")[own].sum()) / US_PER_S,
    }


def _tenants(simulator: Simulator, run: Replayed) -> list[dict[str, Any]]:
    """Requests, refusals, waits and GPU time by tenant, in the policy's order."""
    tenant_of = np.asarray(simulator.workload.tenant_of, np.int64)
    gpu_us, waits = _array(simulator.columns, "gpu_us"), run.started - run.arrived
    refused: Counter[str] = Counter()
    for (tenant, _, _), count in simulator.refused.items():
        refused[tenant] += count
    rows = []
    for index, slug in enumerate(simulator.workload.tenants):
        own = tenant_of == index
        wait = distribution(waits[own & (run.started >= 0)], 1_000)
        rows.append(
            {
                "tenant": slug, "arrivals": int(own.sum()), "completed": int((own & run.completed).sum()),
                "rejected": refused[slug], "wait_ms_p99": wait["p99"], "gpu_s": float(gpu_us[own].sum()) / US_PER_S,
            }
        )  # fmt: skip
    return rows


def histograms(simulator: Simulator) -> list[dict[str, Any]]:
    """By class and tenant: waits, TTFT and residence of completed requests as sparse buckets."""
    work, columns = simulator.workload, simulator.columns
    if not len(work):
        return []
    arrived = _array(columns, "arrived_us")
    done = np.frombuffer(columns.code, np.int8) == COMPLETED
    group = np.asarray(work.class_of, np.int64) * len(work.tenants) + np.asarray(work.tenant_of, np.int64)
    rows = []
    for number in np.unique(group):
        own = (group == number) & done
        class_index, tenant_index = divmod(int(number), len(work.tenants))
        rows.append(
            {"class": work.classes[class_index], "tenant": work.tenants[tenant_index]}
            | {
                name: histogram_of(_array(columns, f"{column}_us")[own] - arrived[own]).to_sparse()
                for name, column in (("wait", "started"), ("ttft", "first"), ("residence", "ended"))
            }
        )
    return rows


def histogram_of(us: NDArray[np.int64]) -> Histogram:
    """The fleet's sketch of many durations at once; bucket by bucket what `Histogram.record` makes of them."""
    found = Histogram()
    zeros = int((us == 0).sum())
    if zeros:
        found.counts[ZERO_INDEX] = zeros
    indexes = np.ceil(np.log2(us[us > 0].astype(np.float64)) * 16).astype(np.int64) - 1
    for index, count in zip(*np.unique(indexes, return_counts=True), strict=True):
        found.counts[int(index)] = int(count)
    return found


def _slots(simulator: Simulator) -> list[dict[str, Any]]:
    banded = simulator.document.pool.isolation != Isolation.SHARED
    now_us = simulator.now_us()
    return [
        {
            "slot": name, "band": band.value, "busy_s": busy_us / US_PER_S,
            "idle_s": {cause.value: us / US_PER_S for cause, us in sorted(idle.items())},
        }
        for name, band, busy_us, idle in simulator.timeline.read(now_us, banded=banded)
    ]  # fmt: skip


def _flex(simulator: Simulator, control: PoolControl) -> dict[str, Any]:
    loans, bound_us = control.loans, control.policy.drain_bound_us
    home = [loan for loan in loans if loan.drain_us is not None]
    recalls = Counter("expired" if loan.reason is None else loan.reason.value for loan in loans if loan.recalled_us)
    longest_us = max((loan.drain_us for loan in home if loan.drain_us is not None), default=None)
    lent_us = sum((loan.home_us or simulator.now_us()) - loan.lent_us for loan in loans)
    return {
        "lends": len(loans),
        "recalls": dict(sorted(recalls.items())),
        "trips": len(control.trips),
        "lent_slot_s": lent_us / US_PER_S,
        "drain_bound_s": bound_us / US_PER_S,
        "drains": len(home),
        # The agent cancels at its first step past the bound.
        "drains_within_bound": sum((loan.drain_us or 0) <= bound_us + STEP_US for loan in home),
        "drain_longest_s": None if longest_us is None else longest_us / US_PER_S,
        "overdue": sum(loan.overdue for loan in loans),
        "loans": [_loan(loan, simulator.start_us) for loan in loans[:LOANS_SHOWN]],
        "minutes": [
            {"at_s": (at_us - simulator.start_us) / US_PER_S, "slack": None if slack <= -1e9 else slack, "lent": lent,
             "wait_p95_ms": p95_us / 1_000}
            for at_us, slack, lent, p95_us in control.samples
        ],
    }  # fmt: skip


def _loan(loan: Loan, start_us: int) -> dict[str, Any]:
    def since_start(at_us: int | None) -> float | None:
        return None if at_us is None else (at_us - start_us) / US_PER_S

    return {
        "slot": loan.slot, "lent_s": since_start(loan.lent_us), "recalled_s": since_start(loan.recalled_us),
        "home_s": since_start(loan.home_us), "reason": None if loan.reason is None else loan.reason.value,
        "drain_s": None if loan.drain_us is None else loan.drain_us / US_PER_S,
    }  # fmt: skip


def _job(job: SimulatedJob, simulator: Simulator) -> dict[str, Any]:
    spec, items = job.spec, len(job.spec.prompts)
    finished_us = None if job.finished_us is None else job.finished_us - simulator.start_us
    ended = _array(job.columns, "ended_us")
    done = np.frombuffer(job.columns.code, np.int8) == COMPLETED
    tokens = int(np.asarray(spec.prompts)[done].sum()), int(_array(job.columns, "output")[done].sum())
    span_us = (int(ended.max()) if done.any() else simulator.now_us()) - simulator.start_us - spec.submitted_us
    return {
        "job": spec.name, "tenant": spec.tenant, "items": items, "done": job.done, "parked": job.parked,
        "submitted_s": spec.submitted_us / US_PER_S,
        "deadline_s": None if spec.deadline_us is None else spec.deadline_us / US_PER_S,
        "finished_s": None if finished_us is None else finished_us / US_PER_S,
        "deadline_met": deadline_met(spec.deadline_us, finished_us, simulator.now_us() - simulator.start_us),
        "gpu_s": float(_array(job.columns, "gpu_us").sum()) / US_PER_S,
        "tokens": {"prompt": tokens[0], "output": tokens[1]},
        "tokens_per_s": sum(tokens) / span_us * US_PER_S if span_us > 0 else None,
    }  # fmt: skip


def deadline_met(deadline_us: int | None, finished_us: int | None, simulated_us: int) -> bool | None:
    """None for best effort, and for a job that the simulation left unfinished before its deadline."""
    if deadline_us is None:
        return None
    if finished_us is not None:
        return finished_us <= deadline_us
    return False if simulated_us >= deadline_us else None
