"""What `make chaos` does: kills parts of a running system at random, 500 times; goes on where it stopped.

    make chaos                                  # 500 kills, a new seed unless the log has one
    make chaos ARGS="--kills 50 --seed 7"       # 50, from this seed
    make chaos ARGS="--again"                   # forgets the log and begins anew

A night is 25 kills and then every check. Each night that held is one line of the log; a night that was interrupted or
failed is run again with its own seed. Exit status 0: as many kills as asked for held. 1: something was lost or counted
twice; the night's folder stays and is named.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from controlplane.supervisor.supervisor import Supervisor
from tests.chaos.job_night import VICTIMS, Night, run_night
from tests.chaos.job_system import JobSystem
from tests.e2e.demo_run import ROOT

KILLS = 500
KILLS_PER_NIGHT = sum(VICTIMS.values())
KILLS_MOST = 100_000
SEED_MOST = 1_000_000_000


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make chaos", description="Kills parts of a running system at random; goes on where it stopped."
    )
    parser.add_argument("--kills", type=int, default=KILLS, help=f"how many in all, {KILLS_PER_NIGHT} a night")
    parser.add_argument("--seed", type=int, help="where chance begins; default: the log's, else a new one")
    parser.add_argument("--log", type=Path, default=ROOT / "var" / "chaos.jsonl", help="one line a night")
    parser.add_argument("--again", action="store_true", help="begin anew whatever the log has")
    options = parser.parse_args(arguments)
    if not 1 <= options.kills <= KILLS_MOST:
        parser.error(f"--kills is 1 to {KILLS_MOST:,}")
    return options


def read_log(path: Path) -> list[dict[str, Any]]:
    """The nights that held; a line that was cut off by a kill of this program is none."""
    nights = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            nights.append(json.loads(line))
        except ValueError:
            continue
    return nights


def night_seed(seed: int, number: int) -> int:
    """The seed of a night: the same for the same run and number, whatever ran before."""
    return random.Random(f"{seed}/{number}").randrange(1_000_000)


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as log:
        log.write(("" if whole else "\n") + json.dumps(row) + "\n")
        log.flush()
        os.fsync(log.fileno())


def run(seed: int, number: int) -> Night:
    """One night in a folder of its own, which is only left where something did not hold."""
    folder = Path(tempfile.mkdtemp(prefix=f"flexband-chaos-{number}-"))
    try:
        with Supervisor(folder / "var", say=lambda line: None) as supervisor:
            night = run_night(JobSystem(folder, supervisor), night_seed(seed, number))
    except Exception:
        say(f"night {number} (seed {night_seed(seed, number)}) did not hold: its folder is {folder}")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if supervisor.stopped_by_signal:
        # the supervisor's block swallows the request to stop
        shutil.rmtree(folder, ignore_errors=True)
        raise KeyboardInterrupt
    shutil.rmtree(folder, ignore_errors=True)
    return night


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def summary(nights: list[dict[str, Any]]) -> str:
    """The line to quote."""
    killed: dict[str, int] = {}
    for night in nights:
        for name, count in night["killed"].items():
            killed[name] = killed.get(name, 0) + count
    names = ", ".join(f"{name} {count}" for name, count in sorted(killed.items()))
    items = sum(effort["items"] for night in nights for effort in night["efforts"].values())
    again = sum(effort["again"] for night in nights for effort in night["efforts"].values())
    hours = sum(night["total_s"] for night in nights) / 3600
    return (
        f"chaos: {sum(killed.values())} kills ({names}) in {len(nights)} nights, {hours:.1f} h: {items:,} items, "
        f"{again:,} tried again; nothing lost, nothing counted twice in records, rollups, ledger, budgets"
    )


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.again:
        options.log.unlink(missing_ok=True)
    nights = read_log(options.log)
    seed = options.seed
    if seed is None:
        seed = nights[-1]["run_seed"] if nights else random.SystemRandom().randrange(SEED_MOST)
    nights = [night for night in nights if night["run_seed"] == seed]
    done = {night["number"] for night in nights}
    wanted = -(-options.kills // KILLS_PER_NIGHT)
    say(f"chaos: seed {seed}, {len(done)} of {wanted} nights are in {options.log}")
    for number in range(1, wanted + 1):
        if number in done:
            continue
        night = run(seed, number)
        row = {"run_seed": seed, "number": number, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        nights.append({**row, **json.loads(json.dumps(night.to_json()))})
        append(options.log, nights[-1])
        say(f"night {number} of {wanted}, seed {night.seed}")
        for line in night.lines():
            say(f"  {line}")
    say(summary([night for night in nights if night["number"] <= wanted]))
    return 0
