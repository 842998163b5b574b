"""`lab live`: the three stages of the interference test as real HTTP load at an agent, with the simulator beside them.

Interactive alone, at each of the given rates until one misses, then between the last that met and the one that missed
until the highest rate that meets is known as exactly as was asked; batch alone; both at that rate. Each stage begins
with a warm-up that is kept in the raw results and counts in no figure. Then the service curve is calibrated from what
was measured alone, and the simulator is given the same arrivals, the fleet and that curve.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import shutil
import subprocess
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from controlplane.agent.version import SOFTWARE
from controlplane.lab.arguments import Places, read_counts, read_trace_use
from controlplane.lab.calibration import Calibration, calibrated
from controlplane.lab.interference import say
from controlplane.lab.live_load import BATCH, COMPLETED, INTERACTIVE, Seen, Stage, Target, as_line, run, was_refused
from controlplane.lab.policies import document_of
from controlplane.lab.report import COMPLETED as COMPLETED_CODE
from controlplane.lab.scenario import Load, read_use, simulate
from controlplane.lab.simulator import Simulator
from controlplane.lab.summary import distribution
from controlplane.lab.traces import TraceRequest
from controlplane.lab.workload import Workload
from controlplane.wire.policy import PolicyDocument

ALONE, BATCH_ALONE, BOTH = "interactive alone", "batch alone", "both"
SECONDS_MAX: Final = 3_600.0
AT_ONCE_MAX: Final = 1_024
PRECISION_LEAST: Final = 0.001
NOTE: Final = "measured over HTTP at a real agent; the columns beside it are simulated"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--agent", required=True, metavar="URL", help="where its tenants connect")
    parser.add_argument("--model", required=True)
    parser.add_argument("--key-env", default="FLEXBAND_KEY", help="environment variable with the API key")
    parser.add_argument("--batch-key-env", default="", help="and with that of batch, where it is another one")
    parser.add_argument("--interactive-class", default="interactive", help="sent as x-flexband-class")
    parser.add_argument("--batch-class", default="batch")
    parser.add_argument("--trace", required=True, metavar="FILE[:rate=R]", help="interactive traffic")
    parser.add_argument("--batch", metavar="FILE", help="requests that batch repeats")
    parser.add_argument("--at-once", type=int, default=8, help="batch requests at once")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="times the trace's rate, in this order")
    parser.add_argument(
        "--precision", type=float, default=0.1, help="between the highest rate that met and the lowest that missed"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of a stage, after its warm-up")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of a stage that count in no figure")
    parser.add_argument("--objective-ms", type=float, default=700.0, help="time to first token")
    parser.add_argument("--target", type=float, default=0.99, help="share of offered requests that must meet it")
    parser.add_argument("--quality-bound", type=float, default=0.01, help="truncated or failed at most")
    parser.add_argument("--slots", type=int, default=8, help="the agent's fleet, for the simulation")
    parser.add_argument("--per-slot", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, default=0)
    parser.add_argument("--floor", action="append", default=[], metavar="CLASS=N")
    parser.add_argument("--policy", type=Path, metavar="FILE.json", help="the agent's own policy instead of that fleet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--raw", type=Path, required=True, metavar="FILE.jsonl", help="what every client saw")
    parser.add_argument("--machine", default="", help="what the engine runs on, where that is not this machine")


def live(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measures and simulates. Raises ValueError, TraceError and OSError for what cannot be used."""
    return asyncio.run(measured(options))


async def measured(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same on an event loop that runs already."""
    _check(options)
    target = _target(options)
    use = read_trace_use(options["trace"])
    trace = read_use(use, options["seed"]).requests
    batch = read_use(read_trace_use(options["batch"]), options["seed"]).requests if options["batch"] else ()
    length_us = round((options["warm_up"] + options["seconds"]) * 1e6)
    every: list[Seen] = []
    with options["raw"].open("wb") as raw:

        async def stage(name: str, rate: float | None, *, with_batch: bool) -> list[Seen]:
            interactive = [] if rate is None else _offered(trace, use.rate * rate, length_us)
            at_once = options["at_once"] if with_batch else 0
            seen = await run(target, Stage(name, interactive, batch, at_once, length_us))
            raw.writelines(as_line(one) for one in seen)
            raw.flush()
            every.extend(seen)
            return seen

        async def alone(rate: float) -> dict[str, Any]:
            return _figures(await stage(alone_at(rate), rate, with_batch=False), options)

        probes = await climb(options["rates"], options["precision"], alone)
        best, found = probes.highest_met, {}
        offered = best or options["rates"][0]
        found[ALONE] = [one for one in every if one.stage == alone_at(offered)]
        if batch:
            found[BATCH_ALONE] = await stage(BATCH_ALONE, None, with_batch=True)
            found[BOTH] = await stage(BOTH, offered, with_batch=True)
    calibration = calibrated(_counted([one for name in (ALONE, BATCH_ALONE) for one in found.get(name, ())], options))
    stages = {}
    for name, seen in found.items():
        simulated = None if calibration is None else _simulated(seen, options, calibration)
        stages[name] = {"measured": _figures(seen, options), "simulated": simulated}
    return {
        "note": NOTE, "agent": target.address, "model": target.model, "seed": options["seed"],
        "warm_up_s": options["warm_up"], "seconds": options["seconds"],
        "objective": {"ttft_ms": options["objective_ms"], "target": options["target"]},
        "highest_rate_met": best, "lowest_rate_missed": probes.lowest_missed, "precision": options["precision"],
        "rates": probes.rows, "stages": stages,
        "calibration": None if calibration is None else calibration.told(),
        "simulated_on": None if calibration is None else calibration.model().described(),
        "machine": machine(options["machine"]), "raw": str(options["raw"]), "requests": len(every),
    }  # fmt: skip


def alone_at(rate: float) -> str:
    """Name of the stage in which interactive is alone at so many times its rate."""
    return f"{ALONE}, {rate:g} times"


@dataclass(slots=True)
class Probes:
    """The rates that were tried, in this order, each with its figures and whether the rungs or the halving named it."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    highest_met: float | None = None
    lowest_missed: float | None = None

    def take(self, rate: float, figures: Mapping[str, Any], *, halved: bool) -> bool:
        """Whether it met."""
        met = bool(figures["met"])
        self.rows.append({**figures, "rate": rate, "halved": halved})
        if met:
            self.highest_met = rate
        else:
            self.lowest_missed = rate
        return met

    def middle(self, precision: float) -> float | None:
        """The rate between the two in ratio, to six digits; None where they are near enough or one is not known."""
        low, high = self.highest_met, self.lowest_missed
        if low is None or high is None or high <= low * (1 + precision):
            return None
        return float(f"{(low * high) ** 0.5:.6g}")


async def climb(
    rates: Sequence[float], precision: float, probe: Callable[[float], Awaitable[Mapping[str, Any]]]
) -> Probes:
    """Each rate in its order until one misses, then the gap under it by halving in ratio, until it is narrow enough.

    Where the first one misses nothing is halved: no rate is known to meet.
    """
    found = Probes()
    for rate in rates:
        if not found.take(rate, await probe(rate), halved=False):
            break
    while (middle := found.middle(precision)) is not None:
        found.take(middle, await probe(middle), halved=True)
    return found


def _check(options: Mapping[str, Any]) -> None:
    if not 0 < options["seconds"] <= SECONDS_MAX or not 0 <= options["warm_up"] <= SECONDS_MAX:
        raise ValueError(f"--seconds is above 0, --warm-up 0 or more, both at most {SECONDS_MAX:g}")
    if not 0 < options["target"] <= 1 or not 1 <= options["at_once"] <= AT_ONCE_MAX:
        raise ValueError(f"--target lies between 0 and 1, --at-once between 1 and {AT_ONCE_MAX}")
    if not options["rates"] or min(options["rates"]) <= 0:
        raise ValueError("--rates are above 0")
    if not PRECISION_LEAST <= options["precision"] < math.inf:
        raise ValueError(f"--precision is {PRECISION_LEAST:g} or more: 0.1 is a tenth")


def _target(options: Mapping[str, Any]) -> Target:
    names = {INTERACTIVE: options["key_env"], BATCH: options["batch_key_env"] or options["key_env"]}
    keys = {kind: os.environ.get(name, "") for kind, name in names.items()}
    for kind, name in names.items():
        if not keys[kind]:
            raise ValueError(f"the environment has no {name} with the API key of {kind}: see --key-env")
    classes = {INTERACTIVE: options["interactive_class"], BATCH: options["batch_class"]}
    return Target(options["agent"].rstrip("/"), options["model"], keys, classes)


def _offered(trace: Sequence[TraceRequest], rate: float, length_us: int) -> list[TraceRequest]:
    """The trace's requests so many times as fast, from its start on again where it ends early."""
    found: list[TraceRequest] = []
    shift_us, span_us = 0, round(trace[-1].at_us / rate) + 1_000_000
    while shift_us < length_us:
        for request in trace:
            at_us = shift_us + round(request.at_us / rate)
            if at_us >= length_us:
                return found
            found.append(TraceRequest(at_us, max(1, request.prompt_tokens), max(1, request.output_tokens)))
        shift_us += span_us
    return found


def _counted(seen: Sequence[Seen], options: Mapping[str, Any]) -> list[Seen]:
    """Without the warm-up."""
    from_us = round(options["warm_up"] * 1e6)
    return [one for one in seen if one.sent_us >= from_us]


def _figures(seen: Sequence[Seen], options: Mapping[str, Any]) -> dict[str, Any]:
    """What the clients saw after the warm-up. Batch that ends after the stage counts in no rate."""
    counted, length_s = _counted(seen, options), options["seconds"]
    own = [one for one in counted if one.kind == INTERACTIVE]
    done = [one for one in own if one.end == COMPLETED]
    ttft = np.asarray([one.first_us - one.sent_us for one in done if one.first_us >= 0], np.int64)
    batch = [one for one in counted if one.kind == BATCH and one.end == COMPLETED]
    within = int((ttft <= options["objective_ms"] * 1_000).sum())
    admitted = [one for one in own if not was_refused(one)]
    poor = sum(one.end != COMPLETED for one in admitted)
    attained = within / len(own) if own else None
    poor_share = poor / len(admitted) if admitted else None
    met = not own or (
        attained is not None and attained >= options["target"] and (poor_share or 0.0) <= options["quality_bound"]
    )
    in_time = [one for one in batch if one.ended_us <= (options["warm_up"] + length_s) * 1e6]
    tokens = sum(one.prompt_tokens + one.output_tokens for one in in_time)
    refused = Counter(one.end for one in own if was_refused(one))
    broken = Counter(one.end for one in admitted if one.end != COMPLETED)
    return {
        "offered": len(own),
        "completed": len(done),
        "refused": dict(sorted(refused.items())),
        "broken": dict(sorted(broken.items())),
        "admitted_per_s": len(admitted) / length_s if own else None,
        "ttft_ms": distribution(ttft, 1_000),
        "attained": attained,
        "poor_share": poor_share,
        "met": met,
        "queue_ms": distribution(np.asarray([one.queue_us for one in done if one.queue_us >= 0], np.int64), 1_000),
        "late_ms": max((one.sent_us - one.planned_us for one in own), default=0) / 1_000,
        "batch_completed": len(batch),
        "batch_tokens_per_s": tokens / length_s if batch else None,
    }


# ---- the simulator, asked the same question ----


def _simulated(seen: Sequence[Seen], options: Mapping[str, Any], calibration: Calibration) -> dict[str, Any]:
    """The arrivals and tokens that were measured on the calibrated curve; the warm-up runs and does not count."""
    document = _document(options)
    interactive, batch = _slugs(document)
    slugs = (interactive, batch)
    work = Workload(slugs, (document.tenants[0].slug,))
    for one in sorted(seen, key=lambda one: one.sent_us):
        work.at_us.append(one.sent_us)
        work.class_of.append(slugs.index(batch if one.kind == BATCH else interactive))
        work.tenant_of.append(0)
        work.prompt.append(max(1, one.prompt_tokens))
        work.output.append(max(1, one.output_tokens))
        work.asked.append(max(1, one.output_tokens))
        work.tail_100ns.append(0)
    from_us = round(options["warm_up"] * 1e6)
    simulator = Simulator(document, work, calibration.model())
    simulate(simulator, Load(work))
    return _read(simulator, from_us, interactive, options)


def _read(simulator: Simulator, from_us: int, interactive: str, options: Mapping[str, Any]) -> dict[str, Any]:
    work, columns = simulator.workload, simulator.columns
    at = np.asarray(work.at_us, np.int64)
    counted = at >= from_us
    own = counted & (np.asarray(work.class_of) == work.classes.index(interactive))
    code = np.frombuffer(columns.code, np.int8)
    done = code == COMPLETED_CODE
    ttft = (np.frombuffer(columns.first_us, np.int64) - np.frombuffer(columns.arrived_us, np.int64))[own & done]
    ended = np.frombuffer(columns.ended_us, np.int64) - simulator.start_us
    waits = (np.frombuffer(columns.started_us, np.int64) - np.frombuffer(columns.arrived_us, np.int64))[own & done]
    batch = counted & ~own & done
    in_time = batch & (ended <= from_us + options["seconds"] * 1e6)
    tokens = np.asarray(work.prompt, np.int64) + np.frombuffer(columns.output, np.int64)
    offered = int(own.sum())
    return {
        "offered": offered, "completed": int((own & done).sum()), "ttft_ms": distribution(ttft, 1_000),
        "queue_ms": distribution(waits, 1_000),
        "attained": int((ttft <= options["objective_ms"] * 1_000).sum()) / offered if offered else None,
        "batch_completed": int(batch.sum()),
        "batch_tokens_per_s": float(tokens[in_time].sum()) / options["seconds"] if batch.any() else None,
    }  # fmt: skip


def _document(options: Mapping[str, Any]) -> PolicyDocument:
    if options["policy"] is not None:
        try:
            return msgspec.json.decode(options["policy"].read_bytes(), type=PolicyDocument)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{options['policy'].name} is no policy: {error}") from None
    places = Places(
        options["slots"], options["per_slot"], read_counts(options["floor"], ("interactive", "batch")),
        options["kv_tokens"],
    )  # fmt: skip
    return document_of(places.banded, ["client"], places=places.per_slot, kv_tokens=places.kv_tokens)


def _slugs(document: PolicyDocument) -> tuple[str, str]:
    return document.pool.interactive_class, document.pool.batch_class


# ---- what it was measured on ----


def machine(told: str) -> dict[str, Any]:
    """The machine that the clients run on, with versions; `told` says what the engine runs on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "engine_runs_on": told or "this machine",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_bytes / 2**30, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "flexband": SOFTWARE,
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    """As the driver names them; none where no driver is."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"], capture_output=True,
            text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


# ---- for people ----


FIGURES: Final = (
    ("offered", "offered"), ("completed", "completed"), ("attained", "attained"), ("ttft_ms.p50", "TTFT p50, ms"),
    ("ttft_ms.p95", "TTFT p95, ms"), ("ttft_ms.p99", "TTFT p99, ms"), ("queue_ms.p95", "queue p95, ms"),
    ("batch_completed", "batch completed"), ("batch_tokens_per_s", "batch, tokens/s"),
)  # fmt: skip


def text(answer: Mapping[str, Any]) -> str:
    on = answer["machine"]
    gpus = ", ".join(on["gpus"]) or "none"
    lines = [
        f"{answer['model']} at {answer['agent']}: {answer['seconds']:g} s a stage, {answer['warm_up_s']:g} s warm-up",
        answer["note"],
        f"{on['cpu']}, {on['cores']} cores, {on['memory_gb']:g} GB, GPUs: {gpus}; the engine on {on['engine_runs_on']}",
        f"{on['system']}, Python {on['python']}, {on['flexband']}, load {on['load']:g}",
        "",
    ]
    for row in answer["rates"]:
        met = "met" if row["met"] else "MISSED"
        lines.append(f"{alone_at(row['rate'])}: {say(row['attained'])} attained, {met}")
    highest, missed = answer["highest_rate_met"], answer["lowest_rate_missed"]
    if highest is None:
        lines.append("no rate met the objective: begin lower")
    else:
        above = "none that was tried missed" if missed is None else f"{missed:g} times missed"
        lines.append(f"highest rate that met the objective: {highest:g} times; {above}")
    for name, stage in answer["stages"].items():
        lines += ["", f"{name:<24}{'measured':>14}{'simulated':>14}"]
        for path, title in FIGURES:
            values = [_at(stage[side], path) for side in ("measured", "simulated")]
            if any(value is not None for value in values):
                lines.append(f"  {title:<22}" + "".join(f"{say(value):>14}" for value in values))
    calibration = answer["calibration"]
    if calibration is None:
        lines += ["", "too few requests completed to calibrate a service curve"]
    else:
        off = [calibration[f"{part}_error_median"] for part in ("prefill", "decode")]
        lines += [
            "",
            f"calibrated on {calibration['requests']:,} requests: --service {calibration['service']}",
            f"simulated on {answer['simulated_on']}",
            f"the constants are off by {off[0]:.1%} of the prefill and {off[1]:.1%} of the decode in the median",
        ]
    return "\n".join([*lines, f"raw results of {answer['requests']:,} requests: {answer['raw']}"])


def _at(document: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(document, Mapping):
            return None
        document = document.get(part)
    return document
