"""`lab batching`: how large batches of one-shot work should grow and how long they may wait, on a service-time curve.

Batches close by the core's own rule (`core.batching`); those that are closed wait for the first free worker.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

import numpy as np

from controlplane.core.batching import Batch, Batcher, BatchPolicy, Member, ServiceTime
from controlplane.lab.summary import nearest_rank

SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
WAITS_MS: Final = (0.0, 2.0, 5.0, 10.0, 25.0, 50.0)
KNEE_SHARE: Final = 0.95
NEVER_US: Final = 1 << 61
REQUESTS_MAX: Final = 1_000_000


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--rate", type=float, default=200.0, help="arrivals per second")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fixed-ms", type=float, default=4.0, help="time of a batch besides its inputs")
    parser.add_argument("--per-input-ms", type=float, default=0.5)
    parser.add_argument("--workers", type=int, default=1, help="batches that run at once")
    parser.add_argument("--slow", type=float, default=1.0, help="the last worker takes so many times as long")
    parser.add_argument("--burst", type=float, default=1.0, help="so many times the rate for one second in ten")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--waits-ms", type=float, nargs="+", default=list(WAITS_MS))


def arrivals_us(requests: int, rate: float, seed: int, burst: float) -> list[int]:
    """Poisson arrivals, `burst` times as dense in the first of every ten seconds."""
    rng, at_s, found = Random(seed), 0.0, []  # noqa: S311  a simulation
    for _ in range(requests):
        at_s += rng.expovariate(rate * (burst if at_s % 10 < 1 else 1.0))
        found.append(round(at_s * 1e6))
    return found


def cell(at_us: Sequence[int], policy: BatchPolicy, curve: ServiceTime, *, workers: int, slow: float) -> dict[str, Any]:
    """One size and wait: latencies from arrival to answer, throughput, mean batch."""
    batcher, ready, busy = Batcher(policy), deque[Batch](), list[tuple[int, int, Batch]]()
    free, latencies, batches, end_us = list(range(workers)), [], 0, 0
    row = 0
    while True:
        arrival_us = at_us[row] if row < len(at_us) else NEVER_US
        due_us = batcher.next_due_us()
        close_us = NEVER_US if due_us is None else due_us
        done_us = busy[0][0] if busy else NEVER_US
        now_us = min(done_us, close_us, arrival_us)
        if now_us == NEVER_US:
            break
        if done_us == now_us:
            _, worker, batch = heappop(busy)
            latencies += [now_us - member.arrived_us for member in batch.members]
            heappush(free, worker)
            end_us = now_us
        elif close_us == now_us:
            ready.extend(batcher.due(now_us))
        else:
            ready.extend(batcher.offer(Member(row, "", now_us), now_us))
            row += 1
        while ready and free:
            batch, worker = ready.popleft(), heappop(free)
            time_us = curve.service_us(batch.inputs)
            batches += 1
            heappush(busy, (now_us + (round(time_us * slow) if worker == workers - 1 else time_us), worker, batch))
    ordered = np.sort(np.asarray(latencies, np.int64))
    return {
        "max_batch_size": policy.max_batch_size, "max_wait_ms": policy.max_wait_us / 1_000,
        **{f"p{percent}_ms": nearest_rank(ordered, percent, 1_000) for percent in (50, 95, 99)},
        "throughput_per_s": len(latencies) / end_us * 1e6 if end_us else None,
        "mean_batch": len(latencies) / batches if batches else None, "knee": False,
    }  # fmt: skip


def sweep(options: Mapping[str, Any]) -> dict[str, Any]:
    """All cells, the first with batches of 1 that wait for nobody; `knee` marks the best trade.

    Raises ValueError for numbers that make no sense.
    """
    if not 1 <= options["requests"] <= REQUESTS_MAX or options["rate"] <= 0 or options["workers"] < 1:
        raise ValueError(f"requests are 1 to {REQUESTS_MAX:,}, the rate is above 0, workers are 1 or more")
    if options["slow"] < 1 or options["burst"] <= 0:
        raise ValueError("--slow is 1 or more and --burst above 0")
    curve = ServiceTime(round(options["fixed_ms"] * 1_000), round(options["per_input_ms"] * 1_000))
    at_us = arrivals_us(options["requests"], options["rate"], options["seed"], options["burst"])
    pairs = [(1, 0.0)] + [
        (size, wait_ms) for size in sorted(set(options["sizes"]) - {1}) for wait_ms in sorted(set(options["waits_ms"]))
    ]
    cells = [
        cell(at_us, BatchPolicy(size, round(wait_ms * 1_000)), curve, workers=options["workers"], slow=options["slow"])
        for size, wait_ms in pairs
    ]
    best = max(row["throughput_per_s"] or 0.0 for row in cells)
    enough = [row for row in cells if (row["throughput_per_s"] or 0.0) >= KNEE_SHARE * best]
    min(enough, key=lambda row: (row["p95_ms"], row["max_batch_size"]))["knee"] = True
    names = ("requests", "rate", "seed", "workers", "slow", "burst", "fixed_ms", "per_input_ms")
    return {
        "note": "simulated on a curve: no GPU was involved",
        **{name: options[name] for name in names},
        "cells": cells,
    }


def text(answer: Mapping[str, Any]) -> str:
    lines = [
        f"{answer['requests']:,} requests at {answer['rate']:g}/s, seed {answer['seed']}, {answer['workers']} workers; "
        f"a batch takes {answer['fixed_ms']:g} ms and {answer['per_input_ms']:g} ms for each input",
        answer["note"],
        "",
        f"{'size':>6}{'wait, ms':>10}{'p50, ms':>10}{'p95, ms':>10}{'p99, ms':>10}{'per s':>10}{'mean batch':>12}",
    ]
    for row in answer["cells"]:
        lines.append(
            f"{row['max_batch_size']:>6}{row['max_wait_ms']:>10g}{row['p50_ms']:>10,.1f}{row['p95_ms']:>10,.1f}"
            f"{row['p99_ms']:>10,.1f}{row['throughput_per_s']:>10,.1f}{row['mean_batch']:>12,.2f}"
            + ("  <- knee" if row["knee"] else "")
        )
    return "\n".join(
        [*lines, "", f"knee: the least p95 of the cells with at least {KNEE_SHARE:.0%} of the best throughput"]
    )
