"""`lab replay`: traces and jobs through one policy, or through two side by side."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, Final

from controlplane.lab import faults
from controlplane.lab.arguments import (
    Places,
    read_changes,
    read_counts,
    read_job_use,
    read_model,
    read_policy,
    read_safe_rate,
    read_trace_use,
)
from controlplane.lab.faults import Conditions
from controlplane.lab.reference import Rules
from controlplane.lab.report import NO_GPU
from controlplane.lab.scenario import Load, batch_classes_of, effects, load, run_policy, run_reference
from controlplane.lab.service import ServiceModel
from controlplane.wire.policy import PolicyDocument

LINES_SHOWN: Final = 20
COUNTS: Final = (
    "arrivals", "started", "rejected", "completed", "longest_queue", "utilisation", "in_system_mean", "lambda_x_w",
    "within_objective_of_arrivals", "within_objective_of_started", "makespan_s",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", action="append", default=[], metavar="FILE[:class=C][:rate=R][:stretch=S]")
    parser.add_argument(
        "--job", action="append", default=[], metavar="FILE[:deadline_h=H][:submitted_h=H][:copies=N]",
        help="the requests of a trace as the items of one batch job",
    )  # fmt: skip
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--per-slot", type=int, default=1, help="requests that a slot runs at once")
    parser.add_argument("--kv-tokens", type=int, default=0, help="KV memory of a slot, 0 is no bound")
    parser.add_argument("--service", help="base_ms=50,prompt_us=125,output_us=30000")
    parser.add_argument("--curve", help="measured tables instead of constants: h100 or a100")
    parser.add_argument("--policy", default="fifo", metavar="fifo|priority|shared|reserved|dedicated|FILE.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="a change to the policy")
    parser.add_argument("--against", metavar="POLICY", help="a second policy, side by side")
    parser.add_argument("--propose", action="append", default=[], metavar="PATH=VALUE",
                        help="a change to the second policy (the first one where --against names none)")  # fmt: skip
    parser.add_argument("--floor", action="append", default=[], metavar="CLASS=N")
    parser.add_argument("--safe-rate", default="", metavar="SLOTS=RATE,...", help="tested interactive requests/s")
    parser.add_argument("--queue-bound", type=int)
    parser.add_argument("--objective-ms", type=float)
    parser.add_argument("--tenants", type=int, default=8, help="tenants to draw from where the trace names none")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--hours", type=float, help="arrivals after that are cut off")
    faults.add_arguments(parser)


def replay(options: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of the command. Raises ValueError, TraceError or OSError for what cannot be used."""
    if not options["trace"] and not options["job"]:
        raise ValueError("name what is to be replayed with --trace FILE, or --job FILE")
    for name in ("slots", "per_slot", "tenants"):
        if options[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} is 1 or more")
    places = Places(
        options["slots"], options["per_slot"], read_counts(options["floor"], ("interactive", "batch")),
        options["kv_tokens"], options["queue_bound"],
        read_safe_rate(options["safe_rate"]) if options["safe_rate"] else None,
    )  # fmt: skip
    service = read_model(options["service"], options["curve"])
    given = load(
        [read_trace_use(text) for text in options["trace"]], [read_job_use(text) for text in options["job"]],
        tenants=options["tenants"], seed=options["seed"], hours=options["hours"],
    )  # fmt: skip
    ours, conditions = read_changes(options["set"]), faults.conditions_of(options)
    tenants = given.workload.tenants
    policy = read_policy(options["policy"], places, tenants, ours)
    answer: dict[str, Any] = {
        "note": NO_GPU, "seed": options["seed"], "policy": options["policy"], "set": ours, "slots": options["slots"],
        "per_slot": options["per_slot"],
        "refused_lines": {
            name: [{"line": bad.line, "reason": bad.reason} for bad in lines] for name, lines in given.refused.items()
        },
        "result": _run(policy, given, service, options, conditions),
    }  # fmt: skip
    if options["against"] or options["propose"]:
        name = options["against"] or options["policy"]
        theirs = {**({} if options["against"] else ours), **read_changes(options["propose"])}
        proposed = _run(read_policy(name, places, tenants, theirs), given, service, options, conditions)
        answer |= {
            "against": {"policy": name, "set": theirs, "result": proposed},
            "effects": effects(answer["result"], proposed),
        }
    return answer


def _run(
    policy: Rules | PolicyDocument,
    given: Load,
    service: ServiceModel,
    options: Mapping[str, Any],
    conditions: Conditions,
) -> dict[str, Any]:
    objective_ms, watch = options["objective_ms"], options.get("watch")
    if isinstance(policy, Rules):
        if not conditions.ordinary:
            raise ValueError("fifo and priority are reference models in which nothing goes wrong: name another policy")
        if given.jobs:
            raise ValueError("fifo and priority are reference models without jobs: replay the file with --trace")
        return run_reference(policy, given, service, frozenset({"batch"}), objective_ms=objective_ms)
    known = {klass.slug for klass in policy.classes}
    if unknown := sorted({*given.workload.classes, *batch_classes_of(policy)} - known):
        raise ValueError(f"the policy has no class {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return run_policy(policy, given, service, objective_ms=objective_ms, watch=watch, conditions=conditions)


# For people


def text(answer: Mapping[str, Any]) -> str:
    """The answer as lines."""
    lines = [f"{answer['policy']}, {answer['slots']} slots of {answer['per_slot']}; {answer['result']['service']}"]
    lines += [NO_GPU, ""]
    for name, bad in answer["refused_lines"].items():
        lines.append(f"{name}: {len(bad)} lines were left out")
        lines += [f"  line {row['line']}: {row['reason']}" for row in bad[:LINES_SHOWN]]
    lines += _table(answer["result"])
    if "effects" in answer:
        lines += ["", f"against {answer['against']['policy']} with {answer['against']['set'] or 'no change'}"]
        lines.append(f"{'':<32}{'figure':<32}{'now':>14}{'proposed':>14}{'change':>14}")
        lines += [
            f"{row['of'][:30]:<32}{row['figure']:<32}{_say(row['current']):>14}{_say(row['proposed']):>14}"
            f"{_say(row['change'], signed=True):>14}"
            for row in answer["effects"]
        ]
    return "\n".join(lines)


def _table(result: Mapping[str, Any]) -> list[str]:
    groups = {"all": result["all"], **result["classes"]}
    lines = [f"{'':<32}" + "".join(f"{name:>14}" for name in groups)]
    for name in COUNTS:
        title = name.replace("_", " ")
        lines.append(f"{title:<32}" + "".join(f"{_say(row[name]):>14}" for row in groups.values()))
    for name in ("wait_ms", "residence_ms", "ttft_ms"):
        for which in ("p50", "p90", "p95", "p99", "max", "mean"):
            row = [group[name][which] if name in group else None for group in groups.values()]
            if any(value is not None for value in row):
                title = f"{name.removesuffix('_ms')} {which}, ms"
                lines.append(f"{title:<32}" + "".join(f"{_say(value):>14}" for value in row))
    return lines + _flex_lines(result) + _fault_lines(result) + [_job_line(job) for job in result.get("jobs", ())]


def _fault_lines(result: Mapping[str, Any]) -> list[str]:
    if "faults" not in result:
        return []
    came = result["faults"]
    lines = [
        f"slots broken {came['slots_broken']}, requests lost {came['requests_lost']}, tried again "
        f"{came['requests_retried']}; reports lost {came['reports_lost']}"
    ]
    if "scaling" in result:
        orders = result["scaling"]["orders"]
        first = (
            f", the first after {orders[0]['ordered_s']:,.0f} s, ready at {orders[0]['ready_s']:,.0f} s"
            if orders
            else ""
        )
        lines.append(f"slots ordered {len(orders)}{first}; given back {result['scaling']['returned']}")
    return lines


def _flex_lines(result: Mapping[str, Any]) -> list[str]:
    flex = result.get("flex")
    if flex is None:
        return []
    reasons = ", ".join(f"{count} {reason}" for reason, count in flex["recalls"].items()) or "none"
    return [
        "",
        f"lends {flex['lends']}, recalls: {reasons}; trips {flex['trips']}; lent {flex['lent_slot_s']:,.0f} slot-s",
        f"drains {flex['drains']}, within the bound of {flex['drain_bound_s']:g} s {flex['drains_within_bound']}, "
        f"longest {_say(flex['drain_longest_s'])} s, overdue {flex['overdue']}",
    ]


def _job_line(job: Mapping[str, Any]) -> str:
    verdict = {True: "deadline met", False: "deadline MISSED", None: "no verdict"}[job["deadline_met"]]
    if job["deadline_s"] is None:
        verdict = "best effort"
    finished = "unfinished" if job["finished_s"] is None else f"finished after {job['finished_s']:,.1f} s"
    due = "" if job["deadline_s"] is None else f" of {job['deadline_s']:,.0f} s"
    return (
        f"job {job['job']}: {job['done']:,} of {job['items']:,} items, {job['parked']:,} parked, {finished}{due}: "
        f"{verdict}; {_say(job['tokens_per_s'])} tokens/s"
    )


def _say(value: Any, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    sign = "+" if signed and value > 0 else ""
    return (
        f"{sign}{value:,}"
        if isinstance(value, int)
        else f"{sign}{value:,.4g}"
        if abs(value) < 10
        else f"{sign}{value:,.1f}"
    )
