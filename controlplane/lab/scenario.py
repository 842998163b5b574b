"""One question to the lab: what arrives, on which places, under which policy. Asked once or of two policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from controlplane.core.slots import ClassKind
from controlplane.lab import servegen
from controlplane.lab.elastic import Autoscaler, with_standby
from controlplane.lab.faults import Conditions, Faults, planned, told
from controlplane.lab.items import JobSpec
from controlplane.lab.pool_control import PoolControl, Wire
from controlplane.lab.reference import Rules, serve
from controlplane.lab.report import report
from controlplane.lab.service import ServiceModel
from controlplane.lab.simulator import Simulator
from controlplane.lab.summary import Replayed, as_columns, difference, summarise
from controlplane.lab.traces import BadLine, Trace, cut, read_trace
from controlplane.lab.watching import Watch
from controlplane.lab.workload import Stream, Workload, assemble, zipf_shares
from controlplane.wire.policy import PolicyDocument

US_PER_S: Final = 1_000_000
US_PER_HOUR: Final = 3_600 * US_PER_S
AFTER_DEADLINE_US: Final = 3_600 * US_PER_S
"""So long a simulation goes on past the last arrival and the last deadline, for what is late."""
REFERENCE: Final = ("fifo", "priority")


@dataclass(frozen=True, slots=True)
class TraceUse:
    """A trace file and what it stands for: the hours [from_h, from_h + for_h) of it, all of it where none are named.

    `tokens` are those of which public traces, where the file has no token counts.
    """

    path: Path
    class_slug: str
    rate: float = 1.0
    stretch: float = 1.0
    format: str = "auto"
    from_h: float = 0.0
    for_h: float | None = None
    tokens: str = "conversation"


@dataclass(frozen=True, slots=True)
class JobUse:
    """A trace file whose requests are the items of one job; hours count from the start of the simulation."""

    path: Path
    deadline_h: float | None
    submitted_h: float = 0.0
    copies: int = 1
    tenant: str = ""
    format: str = "auto"


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives: requests and jobs, with what was wrong with their files."""

    workload: Workload
    jobs: tuple[JobSpec, ...] = ()
    refused: dict[str, tuple[BadLine, ...]] = field(default_factory=dict)
    frozen_us: tuple[tuple[int, int], ...] = ()
    """Spans from the start in which the flex band is frozen: no new loan, loans run on."""


def load(
    traces: Sequence[TraceUse],
    jobs: Sequence[JobUse] = (),
    *,
    tenants: int = 1,
    seed: int = 0,
    hours: float | None = None,
    batch_class: str = "batch",
) -> Load:
    """Read the files. Raises TraceError and OSError as `read_trace` does, ValueError for what makes no sense."""
    refused: dict[str, tuple[BadLine, ...]] = {}
    of_jobs = [TraceUse(job.path, batch_class, format=job.format) for job in jobs]
    read: dict[TraceUse, Trace] = {}
    for use in dict.fromkeys(map(_as_read, [*traces, *of_jobs])):
        trace = read[use] = read_use(use, seed)
        if trace.refused:
            refused[use.path.name] = trace.refused
    named = sorted({request.tenant for use in traces for request in read[_as_read(use)].requests} - {""})
    slugs = named or [f"tenant-{number:03}" for number in range(1, tenants + 1)]
    streams = [Stream(read[_as_read(use)].requests, use.class_slug, use.rate, use.stretch) for use in traces]
    until_us = None if hours is None else round(hours * 3_600 * US_PER_S)
    workload = assemble(streams, slugs, seed=seed, shares=None if named else zipf_shares(len(slugs)), until_us=until_us)
    specs = [_job(job, read[_as_read(use)], slugs[0], batch_class) for job, use in zip(jobs, of_jobs, strict=True)]
    return Load(workload, tuple(specs), refused)


def _as_read(use: TraceUse) -> TraceUse:
    """What two uses of a file have in common when they read the same requests of it."""
    return replace(use, class_slug="", rate=1.0, stretch=1.0)


def read_use(use: TraceUse, seed: int) -> Trace:
    """The requests of a trace, or of client windows that the seed expands, in the hours that are named."""
    from_us = round(use.from_h * US_PER_HOUR)
    until_us = None if use.for_h is None else from_us + round(use.for_h * US_PER_HOUR)
    if use.format == servegen.FORMAT or (use.format == "auto" and servegen.has_windows(use.path)):
        return servegen.expand(use.path, seed=seed, from_us=from_us, until_us=until_us, tokens=use.tokens)
    trace = read_trace(use.path, use.format)
    return trace if from_us == 0 and until_us is None else cut(trace, from_us, until_us)


def _job(use: JobUse, trace: Trace, tenant: str, batch_class: str) -> JobSpec:
    items = [request for _ in range(use.copies) for request in trace.requests]
    return JobSpec(
        use.path.stem,
        use.tenant or tenant,
        batch_class,
        [max(1, request.prompt_tokens) for request in items],
        [max(1, request.output_tokens) for request in items],
        submitted_us=round(use.submitted_h * 3_600 * US_PER_S),
        deadline_us=None if use.deadline_h is None else round(use.deadline_h * 3_600 * US_PER_S),
    )


def run_policy(
    document: PolicyDocument,
    given: Load,
    service: ServiceModel,
    *,
    objective_ms: float | None = None,
    watch: Watch | None = None,
    conditions: Conditions | None = None,
) -> dict[str, Any]:
    """The production policy on a load; what went wrong is told where anything was to."""
    if conditions is None or conditions.ordinary:
        simulator = Simulator(document, given.workload, service)
        return report(simulator, simulate(simulator, given, watch=watch), objective_ms=objective_ms)
    elastic = conditions.elastic
    if elastic is not None:
        document = with_standby(document, elastic.slots)
    simulator = Simulator(document, given.workload, service)
    slots = [slot.spec.name for slot in simulator.scheduler.slots]
    last_us = given.workload.at_us[-1] if len(given.workload) else horizon_us(given)
    # What is not there at first is told before anything may break.
    scaler = None if elastic is None else Autoscaler(simulator, elastic)
    faults = Faults(simulator, planned(conditions, slots, last_us))
    control = simulate(simulator, given, wire=conditions.wire, watch=watch)
    found = report(simulator, control, objective_ms=objective_ms)
    found["conditions"] = told(conditions)
    found["faults"] = {**faults.told(), "reports_lost": control.reports_lost}
    if scaler is not None:
        found["scaling"] = scaler.told()
    return found


def simulate(simulator: Simulator, given: Load, *, wire: Wire | None = None, watch: Watch | None = None) -> PoolControl:
    """Runs a simulator with its control plane to the end."""
    control = PoolControl(simulator, given.jobs, wire, watch)
    control.frozen_us = given.frozen_us
    if watch is not None:
        watch.begin(given.workload.at_us[-1] if len(given.workload) else horizon_us(given))
    control.start()
    simulator.run(horizon_us(given))
    if watch is not None:
        watch.end()
    return control


def horizon_us(given: Load) -> int:
    """When a simulation is ended at the latest."""
    last_us = given.workload.at_us[-1] if len(given.workload) else 0
    return max([last_us, *(job.deadline_us or job.submitted_us for job in given.jobs)]) + AFTER_DEADLINE_US


def run_reference(
    rules: Rules, given: Load, service: ServiceModel, batch_classes: frozenset[str], *, objective_ms: float | None
) -> dict[str, Any]:
    """The exact reference model on a load, in ticks of 100 ns; its jobs are no part of it."""
    work = given.workload
    times = [
        10 * sum(service.parts(prompt, output, 1)) for prompt, output in zip(work.prompt, work.output, strict=True)
    ]
    batch_of = [slug in batch_classes for slug in work.classes]
    is_batch = [int(batch_of[index]) for index in work.class_of]
    at = [10 * at_us + tail for at_us, tail in zip(work.at_us, work.tail_100ns, strict=True)]
    served = serve(at, times, is_batch, rules)
    arrived, class_of, prompt, output = as_columns(at, work.class_of, work.prompt, work.output)
    started, ended = as_columns(served.started, served.ended)
    origin = at[0] if at else 0
    run = Replayed(
        work.classes, class_of, arrived - origin, np.where(started < 0, -1, started - origin),
        np.where(ended < 0, -1, ended - origin), ended >= 0, prompt, output, rules.places, 10_000,
    )  # fmt: skip
    return {"service": service.described(), "objective_ms": objective_ms, **summarise(run, objective_ms=objective_ms)}


def batch_classes_of(document: PolicyDocument) -> frozenset[str]:
    """Slugs of the batch classes."""
    return frozenset(klass.slug for klass in document.classes if klass.kind == ClassKind.BATCH)


EFFECTS: Final = (
    ("ttft_ms.p99", "TTFT p99, ms"), ("wait_ms.p50", "wait p50, ms"), ("wait_ms.p95", "wait p95, ms"),
    ("wait_ms.p99", "wait p99, ms"), ("within_objective_of_arrivals", "attainment, share of arrivals"),
    ("completed", "completed"), ("rejected", "refused"), ("gpu_s", "GPU time, s"),
)  # fmt: skip
POOL_EFFECTS: Final = (
    ("flex.lends", "lends"), ("flex.trips", "trips"), ("flex.lent_slot_s", "lent slot time, s"),
    ("flex.drains_within_bound", "drains within the bound"), ("flex.overdue", "overdue drains"),
    ("preempted", "preempted attempts"), ("all.utilisation", "utilisation by requests"),
)  # fmt: skip
JOB_EFFECTS: Final = (
    ("finished_s", "finished after, s"), ("tokens_per_s", "tokens/s"), ("deadline_met", "deadline met"),
    ("done", "items done"),
)  # fmt: skip


def effects(current: Mapping[str, Any], proposed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of a what-if: for each class, job and the pool, a figure now, as proposed, and their difference."""
    rows = []
    for slug in current["classes"]:
        rows += _rows(f"class {slug}", current["classes"][slug], proposed["classes"].get(slug, {}), EFFECTS)
    rows += _rows("pool", current, proposed, POOL_EFFECTS)
    for ours, theirs in zip(current.get("jobs", ()), proposed.get("jobs", ()), strict=False):
        rows += _rows(f"job {ours['job']}", ours, theirs, JOB_EFFECTS)
    return rows


def _rows(of: str, current: Mapping[str, Any], proposed: Mapping[str, Any], names: Any) -> list[dict[str, Any]]:
    rows = []
    for path, title in names:
        ours, theirs = _lookup(current, path), _lookup(proposed, path)
        if ours is None and theirs is None:
            continue
        change = difference({"": ours}, {"": theirs})[""] if not isinstance(ours, bool) else None
        rows.append({"of": of, "figure": title, "current": ours, "proposed": theirs, "change": change})
    return rows


def _lookup(document: Mapping[str, Any], path: str) -> Any:
    value: Any = document
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value
