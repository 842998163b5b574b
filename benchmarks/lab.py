"""The lab's simulator beside simpy's textbook model, on the same arrivals.

    python -m benchmarks.lab [--quick] [--rounds N] [--requests N] [--million] [--json FILE]

200 tenants of Zipf shares send 20 % batch to eight slots of 16 places at 93 % load. `production` is the simulator with
the agent's own objects: admission with limits and buckets, weighted fair queues, size classes, four interactive, two
flex and two batch slots with KV memory, learning, metering, a controller that ticks each second. `fifo` is the
reference model. The peer is simpy with one resource of 128 places and nothing else; its waits must be those of `fifo`
to the microsecond. Times are those of a small model: 20 ms, 20 us a prompt token, 6 ms an output token.

Figures are requests per second of CPU on one core, medians of interleaved rounds. `--million` simulates a million
requests in one go and says how long that took and what memory it needed. Exit 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import platform
import pstats
import random
import resource
import statistics
import sys
from pathlib import Path
from time import process_time

from benchmarks.builds import COMPILED, described
from benchmarks.lab_peer import textbook, version
from controlplane.lab.policies import bands, document_of
from controlplane.lab.pool_control import PoolControl
from controlplane.lab.reference import Rules, serve
from controlplane.lab.service import Constants
from controlplane.lab.simulator import Simulator
from controlplane.lab.workload import Workload, zipf_shares

TENANTS, SLOTS, PLACES, LOAD = 200, 8, 16, 0.93
SERVICE = Constants(20_000, 20, 6_000)
GOAL_PRODUCTION, GOAL_FIFO = 2.0, 5.0
AIM_PER_S, AIM_MILLION_S = 330_000, 3.0
MEMORY_MB = 1_024
PARTS = {
    "admission": ("admission", "admission_snapshot", "reservations", "pricing", "registry", "estimate"),
    "fair queues and dispatch": ("scheduling", "class_queue", "fairness", "size_classes", "queued_request",
                                 "slot_choice", "slots", "minimum_share", "preemption"),
    "metering": ("slot_meter",),
    "figures of the flex band": ("live_figures", "sliding", "histogram", "flex_agent", "flex_host", "grants"),
    "controller and items": ("pool_control", "items", "flex", "flex_demand", "flex_marks", "flex_snapshot"),
    "events and records": ("simulator", "calls", "timeline", "service"),
}  # fmt: skip


def arrivals(requests: int) -> tuple[Workload, list[int]]:
    """The workload and each request's service time."""
    rng = random.Random(7)
    work = Workload(("interactive", "batch"), tuple(f"tenant-{number:03}" for number in range(TENANTS)))
    work.prompt.extend(rng.randint(50, 2_000) for _ in range(requests))
    work.output.extend(rng.randint(10, 400) for _ in range(requests))
    work.asked.extend(2 * output for output in work.output)
    work.class_of.extend(int(rng.random() < 0.2) for _ in range(requests))
    work.tenant_of.extend(rng.choices(range(TENANTS), zipf_shares(TENANTS), k=requests))
    times = [sum(SERVICE.parts(prompt, output, 1)) for prompt, output in zip(work.prompt, work.output, strict=True)]
    per_us, at_us = SLOTS * PLACES * LOAD / (sum(times) / requests), 0.0
    for _ in range(requests):
        at_us += rng.expovariate(per_us)
        work.at_us.append(round(at_us))
    return work, times


def simulator(work: Workload) -> Simulator:
    document = document_of(
        bands(4, 2, 2), work.tenants, places=PLACES, kv_tokens=400_000, safe_rate={4: 100.0, 6: 150.0, 8: 200.0},
        interactive={"max_queue": 10_000, "max_wait_ms": 60_000}, decode_us_per_token=375, prefill_us_per_token=2,
    )  # fmt: skip
    made = Simulator(document, work, SERVICE)
    PoolControl(made).start()
    return made


def timed(function, *given) -> tuple[float, object]:
    gc.collect()
    gc.freeze()
    began = process_time()
    answer = function(*given)
    spent = process_time() - began
    gc.unfreeze()
    return spent, answer


def whole(one: Simulator) -> None:
    """From the first arrival to the columns that a report reads."""
    one.run()
    assert len(one.columns.code) == len(one.workload)


def measure(requests: int, rounds: int) -> dict:
    work, times = arrivals(requests)
    found: dict[str, list[float]] = {"production": [], "fifo": [], "simpy": []}
    ended = 0
    for number in range(rounds + 1):
        one = simulator(work)
        production_s, _ = timed(whole, one)
        ended = one.outcomes.total() + one.refused.total()
        fifo_s, served = timed(serve, work.at_us, times, work.class_of, Rules(SLOTS * PLACES))
        rates = {"production": requests / production_s, "fifo": requests / fifo_s}
        if version() is not None:
            peer_s, waited_us = textbook(work.at_us, times, SLOTS * PLACES)
            rates["simpy"] = requests / peer_s
            assert waited_us == sum(served.started) - sum(work.at_us), "the two models do not agree"
        if number:  # the first round warms everything
            for name, rate in rates.items():
                found[name].append(rate)
    assert ended == requests, "requests were lost"
    return {name: statistics.median(values) for name, values in found.items() if values}


def parts(requests: int) -> dict[str, float]:
    """Share of the simulator's own time by part, profiled; of compiled code a profile says nothing."""
    one, profile = simulator(arrivals(requests)[0]), cProfile.Profile()
    profile.runcall(one.run)
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    by_module = {module: part for part, modules in PARTS.items() for module in modules}
    for (path, _, _), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():
        part = by_module.get(Path(path).stem, "the rest: built-in functions")
        spent[part] = spent.get(part, 0.0) + own_s
    total = sum(spent.values())
    return {part: own_s / total for part, own_s in spent.items()}


def million() -> dict[str, float]:
    work, _ = arrivals(1_000_000)
    one = simulator(work)
    spent, _ = timed(whole, one)
    return {"s": spent, "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def goals(rates: dict[str, float], whole: dict[str, float] | None) -> dict[str, dict]:
    found = {}
    if "simpy" in rates:
        for name, least in (("production", GOAL_PRODUCTION), ("fifo", GOAL_FIFO)):
            ratio = rates[name] / rates["simpy"]
            found[f"{name}_ratio"] = {"value": ratio, "least": least, "met": ratio >= least}
    if whole is not None:
        value = whole["memory_mb"]
        found["memory_mb"] = {"value": value, "most": MEMORY_MB, "met": value <= MEMORY_MB}
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer and shorter rounds, for a look")
    options.add_argument("--rounds", type=int, default=0)
    options.add_argument("--requests", type=int, default=0)
    options.add_argument("--million", action="store_true")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    requests = given.requests or (20_000 if given.quick else 100_000)
    rates = measure(requests, given.rounds or (3 if given.quick else 5))
    whole = million() if given.million else None
    table = {
        "requests": requests, "per_s": rates, "goals": goals(rates, whole), "million": whole,
        "parts": {} if COMPILED else parts(requests // 5), "load": os.getloadavg()[0], "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "simpy": version()},
    }  # fmt: skip
    print_table(table)
    if given.json:
        given.json.write_text(json.dumps(table, indent=1))
    return 0 if all(goal["met"] for goal in table["goals"].values()) else 1


def print_table(table: dict) -> None:
    rates, found = table["per_s"], table["goals"]
    print(f"Simulator: {table['requests']:,} requests of {TENANTS} tenants on {SLOTS} slots of {PLACES} places, "
          f"load {LOAD:.0%}; requests per second of CPU on one core")  # fmt: skip
    print(described())
    for name in ("production", "fifo"):
        goal = found.get(f"{name}_ratio")
        said = (
            "" if goal is None else (f"  {goal['value']:.2f} times simpy, at least {goal['least']:g}: {verdict(goal)}")
        )
        print(f"{name:<14}{rates[name]:>12,.0f}{said}")
    if "simpy" in rates:
        print(f"{'simpy':<14}{rates['simpy']:>12,.0f}  {table['versions']['simpy']}, one resource, one queue")
    else:
        print("peer missing: simpy is not installed, so there is nothing to compare with")
    aimed = "reached" if rates["production"] >= AIM_PER_S else "not reached"
    print(f"aim for production: {AIM_PER_S:,} a second, {aimed}")
    whole = table["million"]
    took = 1e6 / rates["production"] if whole is None else whole["s"]
    said = "by that rate" if whole is None else f"measured, {whole['memory_mb']:,.0f} MB of memory at most"
    print(f"a million requests: {took:,.1f} s ({said}); the aim is {AIM_MILLION_S:g} s")
    print("of compiled code a profile says nothing" if COMPILED else "where the time of production goes, profiled:")
    for part, share in sorted(table["parts"].items(), key=lambda row: -row[1]):
        print(f"  {part:<32}{share:>7.1%}")
    print(f"load of this machine {table['load']:.1f} on {table['cores']} cores")


def verdict(goal: dict) -> str:
    return "met" if goal["met"] else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
