"""One decision of the core under a standing backlog, beside the textbook scheduler and the bare data structures.

    python -m benchmarks.core [--quick] [--rounds N] [--cycles N] [--json FILE]

One decision is everything that decides about one request: the admission (taking the snapshot, the scheduler's look at
the queue, the ordered checks) and the dispatch (which class, tenant, request and slot come next, and starting it). The
whole life of a request adds what carries the decisions out: reserving, queueing, the two looks that find nothing to
start, four reports of output, release and settlement. The explanation adds the list of checks and the sample that goes
into the agent's report.

Eight slots of 16 places in a `reserved` pool, all taken; ten requests of each tenant wait, one of them batch. A cycle
is one arrival that queues and one end that lets the next one start, so every step is timed between all the others, as
it runs, not in a loop of its own. Figures are medians over rounds of the mean without the slowest hundredth, which on
a shared machine is other processes' time; the rounds of all sizes, the peer and the limit are interleaved. Exit 1 when
a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from math import log2
from pathlib import Path

from benchmarks.builds import described
from benchmarks.core_peer import Limit, Textbook
from benchmarks.core_world import BANDS, STEPS, World

TENANTS = (10, 100, 1_000, 10_000)
REFERENCE = 1_000
GOAL_DECISION_US = 8.0
GOAL_EXPLAINED_US = 40.0
GOAL_GROWTH = log2(TENANTS[-1]) / log2(TENANTS[0])
"""Cost that grows as log n grows by at most this much from the smallest to the largest."""
GOAL_TEXTBOOK = 5.0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    options.add_argument("--rounds", type=int, default=0)
    options.add_argument("--cycles", type=int, default=0, help="arrivals and ends in each round")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rounds, cycles = given.rounds or (5 if given.quick else 15), given.cycles or (200 if given.quick else 500)
    table = measure(rounds, cycles)
    print_table(table)
    if given.json:
        given.json.write_text(json.dumps(table, indent=1))
    return 0 if all(goal["met"] for goal in table["goals"].values()) else 1


def trimmed_mean_us(nanoseconds: list[int]) -> float:
    """The mean without the slowest fiftieth, in microseconds."""
    kept = sorted(nanoseconds)[: max(1, len(nanoseconds) - max(1, len(nanoseconds) // 50))]
    return sum(kept) / len(kept) / 1_000


def measure(rounds: int, cycles: int) -> dict:
    worlds = {tenants: World(tenants) for tenants in TENANTS}
    textbook, limit = Textbook(REFERENCE, len(BANDS)), Limit(REFERENCE)
    found: dict[int, list[dict[str, float]]] = {tenants: [] for tenants in TENANTS}
    peers: dict[str, list[float]] = {"textbook_us": [], "limit_us": []}
    for number in range(rounds + 1):
        for tenants, world in worlds.items():
            steps = one_round(world, cycles)
            if number:  # the first round warms everything
                found[tenants].append(steps)
        if number:
            peers["textbook_us"].append(trimmed_mean_us([textbook.dispatch() for _ in range(cycles // 4)]))
            peers["limit_us"].append(trimmed_mean_us([limit.dispatch() for _ in range(cycles)]))
    sizes = {
        tenants: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for tenants, rows in found.items()
    }
    table = {
        "tenants": {str(tenants): steps for tenants, steps in sizes.items()},
        **{name: statistics.median(values) for name, values in peers.items()},
        "rounds": rounds,
        "cycles": cycles,
        "versions": {"python": platform.python_version()},
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    return table | {"goals": goals(table, sizes)}


def one_round(world: World, cycles: int) -> dict[str, float]:
    """Microseconds of each step, of a decision, of a decision with its explanation and of a whole life."""
    for values in world.found.values():
        values.clear()
    for sizes in world.draw(cycles):
        world.cycle(sizes)
    steps = {f"{name}_us": trimmed_mean_us(world.found[name]) for name in STEPS}
    explained = trimmed_mean_us([world.explain(sizes) for sizes in world.draw(cycles // 2)])
    decision = steps["admission_us"] + steps["dispatch_us"]
    return steps | {
        "life_us": sum(steps.values()),
        "decision_us": decision,
        "explanation_us": explained,
        "explained_us": decision + explained,
    }


def goals(table: dict, sizes: dict[int, dict[str, float]]) -> dict[str, dict]:
    at = sizes[REFERENCE]
    growth = sizes[TENANTS[-1]]["decision_us"] / sizes[TENANTS[0]]["decision_us"]
    ratio = table["textbook_us"] / at["dispatch_us"]
    return {
        "decision_us": {"value": at["decision_us"], "most": GOAL_DECISION_US,
                        "met": at["decision_us"] <= GOAL_DECISION_US},
        "explained_us": {"value": at["explained_us"], "most": GOAL_EXPLAINED_US,
                         "met": at["explained_us"] <= GOAL_EXPLAINED_US},
        "growth": {"value": growth, "most": GOAL_GROWTH, "met": growth <= GOAL_GROWTH},
        "textbook_ratio": {"value": ratio, "least": GOAL_TEXTBOOK, "met": ratio >= GOAL_TEXTBOOK},
    }  # fmt: skip


def print_table(table: dict) -> None:
    sizes, goals = table["tenants"], table["goals"]
    columns = "".join(f"{f'{int(tenants):,}':>10}" for tenants in sizes)
    print(f"Core decisions: {len(BANDS)} slots, 10 queued requests of each tenant, microseconds, {table['rounds']} "
          f"interleaved rounds of {table['cycles']}")  # fmt: skip
    print(described())
    print(f"{'waiting tenants':<46}{columns}  goal at {REFERENCE:,}")
    for name, title in (
        ("decision_us", "one decision: admission + dispatch"),
        ("admission_us", "  admission: snapshot, look, checks"),
        ("dispatch_us", "  dispatch: class, tenant, request, slot"),
        ("explained_us", "one decision with its explanation"),
        ("life_us", "whole life of a request"),
        ("reserve_us", "  reserve"),
        ("offer_us", "  build and queue the request"),
        ("dispatch_none_us", "  look after the arrival, nothing may start"),
        ("produced_us", "  four reports of output"),
        ("release_us", "  release"),
        ("settle_us", "  settle"),
        ("dispatch_again_us", "  look after the dispatch, nothing may start"),
    ):
        goal = goals.get(name)
        said = f"  at most {goal['most']:.0f}: {verdict(goal)}" if goal else ""
        print(f"{title:<46}" + "".join(f"{steps[name]:>10.2f}" for steps in sizes.values()) + said)
    growth, ratio = goals["growth"], goals["textbook_ratio"]
    print(f"growth from {TENANTS[0]:,} to {TENANTS[-1]:,} tenants {growth['value']:.2f} times; "
          f"log n grows {growth['most']:.1f} times: {verdict(growth)}")  # fmt: skip
    dispatch = sizes[str(REFERENCE)]["dispatch_us"]
    print(f"peer: textbook counters, every tenant looked at, {table['textbook_us']:.1f} us, {ratio['value']:.1f} times "
          f"the dispatch, at least {ratio['least']:.0f}: {verdict(ratio)}")  # fmt: skip
    print(f"limit: one heap, one queue, one entry, no rule at all, {table['limit_us']:.2f} us; the dispatch is "
          f"{dispatch / table['limit_us']:.1f} times that")  # fmt: skip
    print(f"load of this machine {table['load']:.1f} on {table['cores']} cores")


def verdict(goal: dict) -> str:
    return "met" if goal["met"] else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
