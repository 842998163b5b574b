"""Small simulated nights: interactive traffic that comes and goes beside a batch job, on a band that lends."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from controlplane.lab.items import JobSpec
from controlplane.lab.policies import bands, document_of
from controlplane.lab.pool_control import PoolControl, Wire
from controlplane.lab.service import Constants
from controlplane.lab.simulator import Simulator
from controlplane.lab.workload import Workload

SERVICE = Constants(20_000, 50, 4_000)
MINUTE_US = 60_000_000


def traffic(minutes: int, quiet_per_s: float, busy_per_s: float, *, seed: int = 1, tenants: int = 3) -> Workload:
    """Ten quiet minutes, five busy ones, and so on."""
    rng, work = Random(seed), Workload(("interactive",), tuple(f"t{number}" for number in range(tenants)))
    at_us = 0.0
    while at_us < minutes * MINUTE_US:
        busy = at_us // MINUTE_US % 15 >= 10
        at_us += rng.expovariate(busy_per_s if busy else quiet_per_s) * 1e6
        work.at_us.append(round(at_us))
        work.class_of.append(0)
        work.tenant_of.append(rng.randrange(tenants))
        work.prompt.append(rng.randint(10, 600))
        work.output.append(rng.randint(5, 80))
        work.asked.append(200)
    return work


def job(items: int, deadline_min: float | None, *, output: int = 1_000, seed: int = 2) -> JobSpec:
    rng = Random(seed)
    return JobSpec(
        "night", "t0", "batch", [rng.randint(50, 900) for _ in range(items)],
        [rng.randint(output // 2, output) for _ in range(items)],
        deadline_us=None if deadline_min is None else round(deadline_min * MINUTE_US),
    )  # fmt: skip


def band(tenants=("t0", "t1", "t2"), **changes):
    """Two slots for interactive, two that are lent, one for batch; four places each."""
    base = {
        "places": 4, "safe_rate": {2: 12.0, 4: 24.0}, "prefill_us_per_token": 12, "decode_us_per_token": 1_000,
        "flex": {"lend_hold_s": 20, "cooldown_s": 15, "decision_interval_s": 5, "drain_bound_s": 10},
    }  # fmt: skip
    return document_of(bands(2, 2, 1), list(tenants), **{**base, **changes})


def night(document, work: Workload, jobs, *, minutes: int, wire: Wire | None = None):
    simulator = Simulator(document, work, SERVICE)
    control = PoolControl(simulator, jobs, wire)
    control.start()
    simulator.run(minutes * MINUTE_US)
    return simulator, control


def mooncake_file(folder: Path, requests: int, *, seed: int = 4) -> Path:
    """A look-alike of a Mooncake trace: milliseconds from 0 in batches every three seconds, long prompts."""
    rng, path = Random(seed), folder / "mooncake.jsonl"
    rows = [
        {"timestamp": 3_000 * (number // 10), "input_length": rng.randint(900, 20_000),
         "output_length": rng.randint(1, 600), "hash_ids": [number]}
        for number in range(requests)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def azure_file(folder: Path, requests: int, *, seed: int = 5) -> Path:
    """A look-alike of an Azure code trace: 100 ns, no zone, on and off."""
    rng, path, at = Random(seed), folder / "azure.csv", 0
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(requests):
        at += round(rng.expovariate(8) * 1e7) + (300_000_000 if rng.random() < 0.01 else 0)
        seconds, rest = divmod(at, 10_000_000)
        clock = f"{18 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        lines.append(f"2023-11-16 {clock}.{rest:07},{rng.randint(3, 7_400)},{rng.randint(6, 90)}")
    path.write_text("\r\n".join(lines))
    return path
