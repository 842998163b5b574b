"""`lab designs`, `lab overload` and `lab capacity`: one load on several fleets or policies, row by row.

What each row is made of is a run of the production policy; a row is compared with the first.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from controlplane.core.capacity import ScalingInput, scaling_signal
from controlplane.lab import faults, interference
from controlplane.lab.arguments import read_safe_rate
from controlplane.lab.faults import Conditions, Elastic, Failure
from controlplane.lab.interference import Bench
from controlplane.lab.policies import document_of
from controlplane.lab.pool_control import Wire
from controlplane.lab.report import NO_GPU, report
from controlplane.lab.scenario import Load, run_policy, simulate
from controlplane.lab.storm import Storm
from controlplane.lab.workload import Workload
from controlplane.wire.policy import PolicyDocument

GIANT: Final = "giant"
GIANT_PROMPT: Final = 32_000
GIANT_SHARE: Final = 10
"""One request in so many is the giant's."""
US_PER_S: Final = 1_000_000
OLD_EVERY_US: Final = 10 * US_PER_S
OLD_LATENCY_US: Final = 2 * US_PER_S
OLD_LOSS: Final = 0.2
JOB_FIGURES: Final = ("job", "done", "items", "finished_s", "deadline_met")
MIN_SHARE_PPM: Final = 200_000
SLOTS_MAX: Final = 512


def row_of(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What a variant did to each class, to the jobs, and by whom the tenants were hurt."""
    classes = {
        slug: {
            "arrivals": own["arrivals"], "rejected": own["rejected"], "completed": own["completed"],
            "wait_ms_p50": own["wait_ms"]["p50"], "wait_ms_p99": own["wait_ms"]["p99"],
            "ttft_ms_p99": own["ttft_ms"]["p99"], "attained": own["ttft_within_objective"], "refused": own["refused"],
            "longest_queue": own["longest_queue"],
        }
        for slug, own in result["classes"].items()
    }  # fmt: skip
    idle_s = sum(sum(slot["idle_s"].values()) for slot in result["slots"])
    others = [
        row["wait_ms_p99"] for row in result["tenants"] if row["tenant"] != GIANT and row["wait_ms_p99"] is not None
    ]
    return {
        "variant": name, "classes": classes, "outcomes": result["outcomes"], "preempted": result["preempted"],
        "lends": result["flex"]["lends"] if result["flex"] else 0, "idle_slot_s": idle_s,
        "jobs": [{key: job[key] for key in JOB_FIGURES} for job in result["jobs"]],
        "worst_tenant_wait_ms_p99": max(others, default=None),
    }  # fmt: skip


def _documents(bench: Bench, given: Load, **changes: Any) -> PolicyDocument:
    options = {"places": bench.places.per_slot, "kv_tokens": bench.places.kv_tokens, **changes}
    return document_of(options.pop("slot_bands", bench.places.banded), given.workload.tenants, **options)


def designs(options: Mapping[str, Any]) -> dict[str, Any]:
    """The three isolation designs and strict priority on one load."""
    bench = Bench(options)
    given = bench.given(rate=options["forecast"], jobs=True)
    floor = bench.places.banded.count("interactive")
    flexed = floor + bench.places.banded.count("flex")
    safe = {slots: bench.safe_rate(slots)[0] for slots in sorted({floor, flexed} - {0})}
    kinds: dict[str, dict[str, Any]] = {
        "reserved": {"isolation": "reserved", "safe_rate": {slots: rate for slots, rate in safe.items() if rate}},
        "dedicated": {"isolation": "dedicated"},
        "shared": {"isolation": "shared", "batch": {"min_share_ppm": MIN_SHARE_PPM}},
        "strict priority": {"isolation": "shared"},
    }
    rows = []
    for name, changes in kinds.items():
        document = _documents(bench, given, **changes)
        result = run_policy(document, given, bench.service, objective_ms=options["objective_ms"], watch=bench.watch)
        rows.append(row_of(name, result))
    return _answer(bench, rows)


def overload(options: Mapping[str, Any]) -> dict[str, Any]:
    """Part of the fleet gone, sizes doubled, a giant tenant, clients that try again, a slot that breaks while it works,
    servers that come late, and signals that are old.
    """
    bench = Bench(options)
    return _answer(bench, [row_of(name, result) for name, result in _overloads(bench)])


def _overloads(bench: Bench) -> Iterator[tuple[str, dict[str, Any]]]:
    options, given = bench.options, bench.given(rate=bench.options["forecast"], jobs=True)
    ordinary = faults.conditions_of(options)
    safe_rate = read_safe_rate(options["safe_rate"]) if options.get("safe_rate") else None

    def run(load: Load, conditions: Conditions = ordinary, **changes: Any) -> dict[str, Any]:
        document = _documents(bench, load, safe_rate=safe_rate, **changes)
        return run_policy(
            document,
            load,
            bench.service,
            objective_ms=options["objective_ms"],
            watch=bench.watch,
            conditions=conditions,
        )

    yield "as it is", run(given)
    fewer = bench.places.banded[::2] + bench.places.banded[1::4]
    gone = len(bench.places.banded) - len(fewer)
    yield f"{gone} of {len(bench.places.banded)} slots gone", run(given, slot_bands=fewer)
    jobs = tuple(replace(job, outputs=[2 * output for output in job.outputs]) for job in given.jobs)
    work = given.workload
    prompt, output, asked = ([2 * one for one in column] for column in (work.prompt, work.output, work.asked))
    doubled = replace(work, prompt=prompt, output=output, asked=asked)
    yield "sizes doubled", run(replace(given, workload=doubled, jobs=jobs))
    yield "a tenant with giant prompts", run(replace(given, workload=with_giant(given.workload)))
    simulator = Storm(_documents(bench, given, safe_rate=safe_rate), given.workload, bench.service)
    control = simulate(simulator, given, watch=bench.watch)
    yield (
        f"clients try again ({simulator.retried:,} times)",
        report(simulator, control, objective_ms=options["objective_ms"]),
    )
    quarter_us = (given.workload.at_us[-1] if len(given.workload) else 0) // 4
    breaks = Failure("S01", quarter_us, max(1, quarter_us))
    result = run(given, replace(ordinary, failures=(*ordinary.failures, breaks)))
    yield f"a slot breaks while it works ({result['faults']['requests_lost']:,} requests lost)", result
    lag_us = ordinary.elastic.lag_us if ordinary.elastic else Elastic(1).lag_us
    late = replace(ordinary, elastic=Elastic(max(1, gone), lag_us))
    result = run(given, late, slot_bands=fewer)
    yield f"the missing slots come when needed, {lag_us / US_PER_S:g} s late", result
    old = Wire(OLD_EVERY_US, OLD_LATENCY_US, None, OLD_LOSS, ordinary.seed)
    yield f"signals are {OLD_EVERY_US // US_PER_S} s old", run(given, replace(ordinary, wire=old))


def with_giant(work: Workload) -> Workload:
    """One more tenant, whose prompts are as long as they may be: each tenth request is doubled as one of its."""
    rows = []
    for row in range(len(work)):
        own = (work.class_of[row], work.tenant_of[row], work.prompt[row], work.output[row], work.asked[row])
        rows.append((work.at_us[row], row, 0, *own))
        if row % GIANT_SHARE == 0:
            rows.append((work.at_us[row], row, 1, work.class_of[row], len(work.tenants), GIANT_PROMPT, *own[3:]))
    columns = [list(column) for column in zip(*sorted(rows), strict=True)] if rows else [[] for _ in range(8)]
    at_us, _, _, class_of, tenant_of, prompt, output, asked = columns
    return Workload(work.classes, (*work.tenants, GIANT), at_us, class_of, tenant_of, prompt, output, asked)


def capacity(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest slots, in the proportions of the given fleet, that keep the objective and every deadline.

    Beside it what breaks with one slot less, the fleet that can lose one, and the scaling signal's own arithmetic.
    """
    bench = Bench(options)
    given = bench.given(rate=options["forecast"], jobs=True)
    share = {kind: bench.places.banded.count(kind) / len(bench.places.banded) for kind in ("interactive", "batch")}

    def result_of(slots: int) -> dict[str, Any]:
        floors = {kind: min(slots, max(1, round(part * slots))) if part else 0 for kind, part in share.items()}
        floors["batch"] = min(floors["batch"], slots - floors["interactive"])
        places = replace(bench.places, slots=slots, floors=floors)
        document = _documents(bench, given, slot_bands=places.banded, isolation="dedicated")
        return run_policy(document, given, bench.service, objective_ms=options["objective_ms"], watch=bench.watch)

    def broken(result: Mapping[str, Any]) -> list[str]:
        found = [] if bench.meets(result) else ["interactive objective"]
        return found + [f"deadline of {job['job']}" for job in result["jobs"] if job["deadline_met"] is False]

    low, high = 1, 2
    while high <= SLOTS_MAX and broken(result_of(high)):
        low, high = high, high * 2
    if high > SLOTS_MAX:
        return {"note": NO_GPU, "needed_slots": None, "breaks_first": broken(result_of(SLOTS_MAX))}
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if broken(result_of(middle)) else (low, middle)
    needed = low if not broken(result_of(low)) else high
    return {
        "note": NO_GPU, "needed_slots": needed, "with_one_failed": needed + 1,
        "breaks_first": broken(result_of(needed - 1)) if needed > 1 else [],
        "signal": _signal(given, bench),
    }  # fmt: skip


def _signal(given: Load, bench: Bench) -> dict[str, Any]:
    """The scaling signal of the interactive class at the forecast load, from the service model."""
    work = given.workload
    if not len(work) or not work.at_us[-1]:
        return {}
    places = bench.places.per_slot
    times = [
        sum(bench.service.parts(prompt, output, places))
        for prompt, output in zip(work.prompt, work.output, strict=True)
    ]
    signal = scaling_signal(
        ScalingInput(
            now_us=work.at_us[-1], arrival_rate_per_s=len(work) / (work.at_us[-1] / US_PER_S),
            mean_service_us=sum(times) / len(times) / places, backlog_gpu_us=0, target_drain_us=60 * US_PER_S,
            target_utilisation=0.7, start_up_lag_us=300 * US_PER_S,
        )
    )  # fmt: skip
    return {
        "needed_slots": signal.needed_slots, "demand_slots": signal.demand_now_slots,
        "target_utilisation": signal.target_utilisation,
    }  # fmt: skip


def _answer(bench: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "note": NO_GPU, "seed": bench.options["seed"], "bands": bench.places.banded,
        "service": bench.service.described(), "rows": rows,
    }  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    interference.add_arguments(parser)


def add_overload_arguments(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument(
        "--safe-rate", default="", metavar="SLOTS=RATE,...", help="tested rates, so that slots are lent"
    )
    faults.add_arguments(parser)


def text(answer: Mapping[str, Any]) -> str:
    lines = [f"{len(answer['bands'])} slots ({', '.join(answer['bands'])}); {answer['service']}", answer["note"], ""]
    lines.append(
        f"{'milliseconds':<38}{'class':<13}{'arrivals':>9}{'rejected':>9}"
        + "".join(f"{title:>10}" for title in ("wait p50", "wait p99", "TTFT p99", "attained"))
    )
    for row in answer["rows"]:
        title = row["variant"]
        for slug, own in row["classes"].items():
            figures = "".join(
                f"{interference.say(own[name]):>10}" for name in ("wait_ms_p50", "wait_ms_p99", "ttft_ms_p99")
            )
            lines.append(
                f"{title[:37]:<38}{slug[:12]:<13}{own['arrivals']:>9,}{own['rejected']:>9,}{figures}"
                f"{interference.say(own['attained']):>10}"
            )
            title = ""
        jobs = "; ".join(
            f"job {job['job']} {job['done']:,} of {job['items']:,}, deadline {DEADLINES[job['deadline_met']]}"
            for job in row["jobs"]
        )
        lines.append(
            f"{'':<38}preempted {row['preempted']:,}, lends {row['lends']:,}, idle {row['idle_slot_s']:,.0f} slot-s, "
            f"worst tenant's wait p99 {interference.say(row['worst_tenant_wait_ms_p99'])} ms"
            + (f"; {jobs}" if jobs else "")
        )
    return "\n".join(lines)


DEADLINES: Final = {True: "met", False: "MISSED", None: "not decided"}


def capacity_text(answer: Mapping[str, Any]) -> str:
    lines = [answer["note"]]
    if answer["needed_slots"] is None:
        lines.append(f"no fleet of up to {SLOTS_MAX} slots keeps it: {', '.join(answer['breaks_first'])}")
        return "\n".join(lines)
    lines.append(f"{answer['needed_slots']} slots keep every objective; {answer['with_one_failed']} can lose one")
    if answer["breaks_first"]:
        lines.append(f"with one less breaks: {', '.join(answer['breaks_first'])}")
    if answer["signal"]:
        signal = answer["signal"]
        lines.append(
            f"scaling signal of interactive: {signal['demand_slots']:.2f} slots at {signal['target_utilisation']:.0%} "
            f"= {signal['needed_slots']}"
        )
    return "\n".join(lines)
