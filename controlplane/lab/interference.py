"""`lab interference`: interactive alone, batch alone, both under the policy; and whether that is a reason to buy.

Alone, the highest rate that meets the objective is found by bisection on how fast the trace is replayed. A quality
guard holds in all stages: requests that were truncated, failed or downgraded count against it. The verdict is the
core's purchase gate on what the isolated design does at the forecast load and with one slot of its floor failed.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from controlplane.core.capacity import IsolationEvidence, PurchaseReason, purchase_gate
from controlplane.lab.arguments import Places, read_counts, read_job_use, read_model, read_trace_use
from controlplane.lab.policies import bands, document_of
from controlplane.lab.report import NO_GPU
from controlplane.lab.scenario import Load, TraceUse, load, run_policy
from controlplane.lab.service import ServiceModel
from controlplane.lab.watching import Watch

RATE_FACTOR_MAX: Final = 64.0
STEPS: Final = 9
REASONS: Final = {
    PurchaseReason.ISOLATION_SUFFICES: "isolation keeps the objective and batch meets its deadline",
    PurchaseReason.INTERACTIVE_MISSED_AT_FORECAST: "interactive misses its objective at the forecast load",
    PurchaseReason.BATCH_MISSED_AT_FORECAST: "batch misses a deadline at the forecast load",
    PurchaseReason.NO_FAILURE_HEADROOM: "the floor less one slot does not carry the forecast load",
    PurchaseReason.NOT_TESTED: "something was not tested",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", required=True, metavar="FILE[:rate=R]", help="interactive traffic")
    parser.add_argument("--job", action="append", default=[], metavar="FILE:deadline_h=H[:copies=N]")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--per-slot", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, default=0)
    parser.add_argument("--floor", action="append", default=[], metavar="CLASS=N")
    parser.add_argument("--service")
    parser.add_argument("--curve")
    parser.add_argument("--objective-ms", type=float, default=700.0, help="time to first token")
    parser.add_argument("--target", type=float, default=0.99, help="share of offered requests that must meet it")
    parser.add_argument("--quality-bound", type=float, default=0.01, help="truncated, failed or downgraded at most")
    parser.add_argument("--forecast", type=float, default=1.0, help="so many times today's interactive rate")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float)


class Bench:
    """The fleet and the objective of one question."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.watch: Watch | None = options.get("watch")
        self.places = Places(
            options["slots"], options["per_slot"], read_counts(options["floor"], ("interactive", "batch")),
            options["kv_tokens"],
        )  # fmt: skip
        self.service: ServiceModel = read_model(options["service"], options["curve"])
        self.trace = read_trace_use(options["trace"])
        self.jobs = [read_job_use(text) for text in options["job"]]
        if not 0 < options["target"] < 1 or options["forecast"] <= 0:
            raise ValueError("--target lies between 0 and 1, --forecast is above 0")

    def given(self, *, rate: float | None, jobs: bool) -> Load:
        """The load at so many times the trace's rate; None is no interactive traffic."""
        options = self.options
        traces: list[TraceUse] = [] if rate is None else [replace(self.trace, rate=self.trace.rate * rate)]
        return load(
            traces, self.jobs if jobs else [], tenants=options["tenants"], seed=options["seed"], hours=options["hours"]
        )

    def run(self, slot_bands: list[str], given: Load, safe_rate: Mapping[int, float] | None = None) -> dict[str, Any]:
        document = document_of(
            slot_bands, given.workload.tenants, places=self.places.per_slot, kv_tokens=self.places.kv_tokens,
            safe_rate=safe_rate,
        )  # fmt: skip
        return run_policy(document, given, self.service, objective_ms=self.options["objective_ms"], watch=self.watch)

    def meets(self, result: Mapping[str, Any]) -> bool:
        """Objective and quality guard of the interactive class."""
        row = result["classes"].get("interactive")
        if row is None or not row["arrivals"]:
            return True
        attained, poor = row["ttft_within_objective"], row["poor_share"]
        return bool(
            attained is not None and attained >= self.options["target"] and poor <= self.options["quality_bound"]
        )

    def rate_of(self, result: Mapping[str, Any]) -> float:
        """Admitted requests per second over the makespan."""
        row = result["classes"]["interactive"]
        return row["started"] / row["makespan_s"] if row["makespan_s"] else 0.0

    def safe_rate(self, slots: int) -> tuple[float, dict[str, Any] | None]:
        """The highest admitted rate with so many interactive slots, and the run that showed it; 0 when none does."""
        if slots < 1:
            return 0.0, None
        alone = bands(slots, 0, 0)
        return bisect(lambda factor: self.run(alone, self.given(rate=factor, jobs=False)), self.meets, self.rate_of)


def bisect(
    run: Callable[[float], dict[str, Any]],
    meets: Callable[[Mapping[str, Any]], bool],
    rate_of: Callable[[Mapping[str, Any]], float],
) -> tuple[float, dict[str, Any] | None]:
    """The highest factor that meets, by doubling and then halving the gap in ratio; (rate, result)."""
    low, high, best = 0.0, 1.0, None
    while high <= RATE_FACTOR_MAX:
        result = run(high)
        if not meets(result):
            break
        low, best, high = high, result, high * 2
    else:
        return (rate_of(best), best) if best is not None else (0.0, None)
    low = low or high / RATE_FACTOR_MAX
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        result = run(middle)
        if meets(result):
            low, best = middle, result
        else:
            high = middle
    return (rate_of(best), best) if best is not None else (0.0, None)


def interference(options: Mapping[str, Any]) -> dict[str, Any]:
    """Stages, table and verdict. Raises ValueError, TraceError and OSError for what cannot be used."""
    bench = Bench(options)
    banded = bench.places.banded
    floor, flex = banded.count("interactive"), banded.count("flex")
    rates = {slots: bench.safe_rate(slots) for slots in sorted({floor - 1, floor, floor + flex} - {0})}
    table = {slots: rate for slots, (rate, _) in rates.items() if rate > 0 and slots >= floor}
    today = bench.given(rate=1.0, jobs=True)
    forecast = bench.given(rate=options["forecast"], jobs=True)
    foreseen = bench.run(banded, forecast, table)
    stages = {
        "interactive_alone": rates[floor + flex][1],
        "batch_alone": bench.run(banded, bench.given(rate=None, jobs=True), table) if bench.jobs else None,
        "both": bench.run(banded, today, table),
        "both_at_forecast": foreseen,
    }
    work = forecast.workload
    per_s = len(work) / (work.at_us[-1] / 1e6) if len(work) and work.at_us[-1] else 0.0
    evidence = IsolationEvidence(
        interactive_met=bench.meets(foreseen),
        batch_met=_deadlines_met(foreseen),
        forecast_rate_per_s=per_s,
        safe_rate_one_failed_per_s=rates[floor - 1][0] if floor > 1 else 0.0,
    )
    decision = purchase_gate(evidence)
    return {
        "note": NO_GPU,
        "seed": options["seed"], "bands": banded, "service": bench.service.described(),
        "objective": {"ttft_ms": options["objective_ms"], "target": options["target"]},
        "safe_rates": {str(slots): rate for slots, (rate, _) in rates.items()},
        "stages": {name: None if stage is None else _row(stage, len(banded)) for name, stage in stages.items()},
        "evidence": {
            "interactive_met": evidence.interactive_met, "batch_met": evidence.batch_met,
            "forecast_rate_per_s": per_s, "safe_rate_one_failed_per_s": evidence.safe_rate_one_failed_per_s,
        },
        "verdict": decision.verdict.value, "reasons": [reason.value for reason in decision.reasons],
    }  # fmt: skip


def _deadlines_met(result: Mapping[str, Any]) -> bool | None:
    """Whether every deadline was met; None where no job has one, or one is not decided."""
    verdicts = [job["deadline_met"] for job in result["jobs"] if job["deadline_s"] is not None]
    if False in verdicts:
        return False
    return True if verdicts and None not in verdicts else None


def _row(result: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """One stage of the table."""
    own, jobs = result["classes"].get("interactive"), result["jobs"]
    tokens = sum(sum(job["tokens"].values()) for job in jobs)
    gpu_s, busy_s = sum(job["gpu_s"] for job in jobs), sum(slot["busy_s"] for slot in result["slots"])
    every = tokens + (sum(own["tokens"].values()) if own else 0)
    return {
        "admitted_per_s": own["started"] / own["makespan_s"] if own and own["makespan_s"] else None,
        "ttft_ms": own["ttft_ms"] if own else None,
        "attained": own["ttft_within_objective"] if own else None,
        "rejected_share": own["rejected"] / own["arrivals"] if own and own["arrivals"] else None,
        "poor_share": own["poor_share"] if own else None,
        "longest_queue": own["longest_queue"] if own else None,
        "batch_done": sum(job["done"] for job in jobs) if jobs else None,
        "batch_items": sum(job["items"] for job in jobs) if jobs else None,
        "batch_tokens_per_gpu_s": tokens / gpu_s if gpu_s else None,
        "tokens_per_busy_slot_s": every / busy_s if busy_s else None,
        "lends": result["flex"]["lends"] if result["flex"] else None,
        "deadlines_met": _deadlines_met(result),
    }


def text(answer: Mapping[str, Any]) -> str:
    objective = answer["objective"]
    lines = [
        f"{len(answer['bands'])} slots ({', '.join(answer['bands'])}); {answer['service']}",
        f"objective: {objective['target']:.1%} of offered requests begin to answer within {objective['ttft_ms']:g} ms",
        answer["note"], "",
        "highest admitted rate that meets it, alone: "
        + ", ".join(f"{slots} slots {rate:,.2f}/s" for slots, rate in answer["safe_rates"].items()), "",
    ]  # fmt: skip
    stages = {name: stage for name, stage in answer["stages"].items() if stage is not None}
    lines.append(f"{'':<28}" + "".join(f"{name.replace('_', ' '):>20}" for name in stages))
    for name in next(iter(stages.values())):
        if name == "ttft_ms":
            for which in ("p50", "p95", "p99"):
                row = [None if stage[name] is None else stage[name][which] for stage in stages.values()]
                lines.append(f"{f'TTFT {which}, ms':<28}" + "".join(f"{say(value):>20}" for value in row))
        else:
            lines.append(f"{name.replace('_', ' '):<28}" + "".join(f"{say(s[name]):>20}" for s in stages.values()))
    evidence = answer["evidence"]
    lines += [
        "",
        f"forecast {evidence['forecast_rate_per_s']:,.2f}/s; the floor less one slot carries "
        f"{say(evidence['safe_rate_one_failed_per_s'])}/s",
        f"verdict: {answer['verdict'].replace('_', ' ')}, because "
        + "; ".join(REASONS[PurchaseReason(reason)] for reason in answer["reasons"]),
    ]
    return "\n".join(lines)


def say(value: Any) -> str:
    """A figure for a table; a dash for what is not known."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"
