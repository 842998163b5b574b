"""A night of batch work beside interactive traffic: the real system, and the simulator asked the same question.

    python -m benchmarks.night --interactive AZURE.csv --job MOONCAKE.jsonl [--minutes 6] [--items 300] [--rate 3]

Real are PostgreSQL, broker, web, worker, beat, controller and an agent of eight slots, started as `manage.py demo`
does; only the engine is the simulated one. The interactive requests are those of a trace, `--rate` times as fast; the
job's items are the requests of the other one, evenly picked and submitted through the official client, due at the end
of the `--minutes`. The simulator then gets the policy that the agent had, the same arrivals, the same items, and the
instants at which the job could be leased and was due, and at which the burn of a contract froze the band. Beside that
stand a night that was never frozen, where the real one was, and one with nothing lent. Exit 1 when the real deadline
and the simulated one end differently, or when an item has not one result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openai

from benchmarks.night_clients import ask_all, job_file
from controlplane.agent.backends.curves import CURVES
from controlplane.demo.launch import Demo
from controlplane.demo.settings import AgentPlace, Options, agent_port
from controlplane.demo.shape import BIG_MODEL, BIG_POOL, BULK, CHAT
from controlplane.lab.items import JobSpec
from controlplane.lab.policies import changed
from controlplane.lab.scenario import Load, run_policy
from controlplane.lab.service import Tables
from controlplane.lab.traces import Trace, TraceRequest, read_trace
from controlplane.lab.workload import Stream, Workload, assemble
from controlplane.supervisor.supervisor import Supervisor
from controlplane.wire.policy import PolicyDocument

TENANTS = {"acme": 0.5, "globex": 0.35, "initech": 0.15}
JOB_TENANT = "hooli"
GPU = "h100"
LATE = 1.5
"""So many times the night's length a late job is waited for."""
SUBMIT_S, LOOK_EVERY_S = 120, 1.0


@dataclass(frozen=True)
class Question:
    """What arrives and what the job's items are; instants in us from the first arrival on."""

    workload: Workload
    items: list[TraceRequest]
    length_us: int

    def load(self, deadline_us: int, frozen_us: Sequence[Sequence[int]]) -> Load:
        """The same as the simulator takes it."""
        prompts = [request.prompt_tokens for request in self.items]
        outputs = [request.output_tokens for request in self.items]
        job = JobSpec("night", JOB_TENANT, BULK, prompts, outputs, deadline_us=deadline_us)
        return Load(self.workload, (job,), frozen_us=tuple((begin, end) for begin, end in frozen_us))


def question(interactive: Trace, job: Trace, options: argparse.Namespace) -> Question:
    length_us = round(options.minutes * 60e6)
    streams = [Stream(interactive.requests, CHAT, options.rate)]
    workload = assemble(streams, list(TENANTS), seed=options.seed, shares=list(TENANTS.values()), until_us=length_us)
    # The real clients ask for just what they get, so that the engine gives just that.
    workload.asked[:] = workload.output
    every = len(job.requests) / options.items
    picked = [job.requests[int(number * every)] for number in range(options.items)]
    items = [TraceRequest(0, max(1, row.prompt_tokens), max(1, row.output_tokens)) for row in picked]
    return Question(workload, items, length_us)


class Night(Demo):
    """The demo's processes with one agent; this process is their clients."""

    def __init__(self, options: Options, asked: Question, say: Callable[[str], None]) -> None:
        super().__init__(options, say)
        self.asked = asked

    def run_night(self) -> dict[str, Any]:
        """Raises SupervisorError when a process does not come up or dies."""
        with Supervisor(self.options.var_dir, say=self.say) as supervisor:
            port, admin = (agent_port(preferred) for preferred in (9_041, 9_141))
            self.places = [AgentPlace("gpu-1", BIG_POOL, 8, port, admin, GPU)]
            self._servers(supervisor)
            self._organisation(supervisor)
            seeded = json.loads((self.folder / "seeded.json").read_bytes())
            self._system(supervisor)
            self._agents(supervisor, seeded["enrolment_tokens"])
            os.environ |= {**self.app, "FLEXBAND_LOG_LEVEL": "WARNING"}
            import django

            django.setup()
            with ThreadPoolExecutor(1) as pool:
                found = self._measure(pool, supervisor, seeded["keys"])
        return found

    def _measure(self, pool: ThreadPoolExecutor, supervisor: Supervisor, keys: dict[str, str]) -> dict[str, Any]:
        from benchmarks.night_figures import document, real_figures

        client = openai.OpenAI(api_key=keys[JOB_TENANT], base_url=f"{self.address}/v1", max_retries=5, timeout=120)
        due_s = time.time() + self.asked.length_us / 1e6
        batch_id = watched(supervisor, pool.submit(submit, client, self.asked.items, due_s))
        began_s = time.time()
        self.say(f"  the job can be leased {self.asked.length_us / 1e6 - due_s + began_s:.1f} s after it was written")
        clients = pool.submit(asyncio.run, ask_all(self.asked.workload, self.places[0].address, keys, BIG_MODEL))
        answers = watched(supervisor, clients)
        until_s = began_s + LATE * self.asked.length_us / 1e6
        while client.batches.retrieve(batch_id).status not in ("completed", "expired") and time.time() < until_s:
            supervisor.check()
            time.sleep(LOOK_EVERY_S)
        figures = real_figures(BIG_POOL, batch_id, round(began_s * 1e6))
        figures["interactive"] = answers
        figures["load"] = os.getloadavg()[1]
        return {
            "real": figures, "document": msgspec.to_builtins(document(BIG_POOL)),
            "deadline_us": round((due_s - began_s) * 1e6),
        }  # fmt: skip


def watched(supervisor: Supervisor, future: Future[Any]) -> Any:
    """The result of a future; meanwhile dead processes are noticed."""
    while not future.done():
        supervisor.check()
        time.sleep(0.2)
    return future.result()


def submit(client: openai.OpenAI, items: list[TraceRequest], due_s: float) -> str:
    """The batch once its items can be leased. Raises SystemExit with the control plane's words when it is refused."""
    uploaded = client.files.create(file=("night.jsonl", job_file(items, BIG_MODEL)), purpose="batch")
    due = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(due_s))
    made = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"name": "night", "class": BULK, "pool": BIG_POOL, "deadline": due, "if_late": "refuse"},
    )  # fmt: skip
    until = time.monotonic() + SUBMIT_S
    while (batch := client.batches.retrieve(made.id)).status == "validating" and time.monotonic() < until:
        time.sleep(0.1)
    if batch.status != "in_progress":
        raise SystemExit(f"the job is {batch.status}: {batch.errors}")
    return made.id


def simulated(load: Load, document: PolicyDocument) -> dict[str, Any]:
    """The simulator's answer in the form of the real figures."""
    found = run_policy(document, load, Tables(CURVES[GPU]))
    job, flex, chat = found["jobs"][0], found["flex"], found["classes"][CHAT]
    return {
        "lends": flex["lends"], "recalls": flex["recalls"], "lent_slot_s": flex["lent_slot_s"],
        "drains": flex["drains"], "drain_longest_s": flex["drain_longest_s"], "overdue": flex["overdue"],
        "job": {name: job[name] for name in ("items", "done", "parked", "finished_s", "deadline_s", "deadline_met")}
        | {"gpu_s": job["gpu_s"], "preempted": found["preempted"]},
        "loans": flex["loans"],
        "interactive": {
            "offered": chat["arrivals"], "completed": chat["completed"], "refused": chat["refused"],
            "queue_ms": chat["wait_ms"], "ttft_ms": chat["ttft_ms"],
        },
    }  # fmt: skip


# ---- telling ----


def rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    job, chat = figures["job"], figures["interactive"]
    recalls = ", ".join(f"{count} {reason}" for reason, count in figures["recalls"].items()) or "none"
    verdict = {True: "met", False: "MISSED", None: "unknown"}[job["deadline_met"]]
    refused = ", ".join(f"{count} {reason}" for reason, count in chat["refused"].items()) or "none"
    return [
        ("lends", str(figures["lends"])),
        ("recalls", recalls),
        ("lent, slot-s", say_number(figures["lent_slot_s"])),
        ("drains home, longest, s", f"{figures['drains']}, {say_number(figures['drain_longest_s'])}"),
        ("overdue", str(figures["overdue"])),
        ("kept from lending, s", _kept(figures.get("not_lent_s"))),
        ("items done of", f"{job['done']:,} of {job['items']:,}"),
        ("finished after, s", say_number(job["finished_s"])),
        ("due after, s", say_number(job["deadline_s"])),
        ("deadline", verdict),
        ("attempts preempted", str(job["preempted"])),
        ("GPU time of results, s", say_number(job["gpu_s"])),
        ("interactive completed of", f"{chat['completed']:,} of {chat['offered']:,}"),
        ("interactive refused", refused),
        *((f"queue wait {name}, ms", say_number(chat["queue_ms"][name])) for name in ("p50", "p95", "p99")),
        *((f"TTFT {name}, ms", say_number(chat["ttft_ms"][name])) for name in ("p50", "p95", "p99")),
    ]


def _kept(seconds: dict[str, float] | None) -> str:
    """The checks that did not hold for longest."""
    return "–" if seconds is None else ", ".join(f"{name} {s:,.0f}" for name, s in list(seconds.items())[:3])


def say_number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def table(columns: dict[str, dict[str, Any]]) -> str:
    told = {name: rows(figures) for name, figures in columns.items()}
    lines = [f"{'':<26}" + "".join(f"{name:>38}" for name in told)]
    for at, (title, _) in enumerate(next(iter(told.values()))):
        lines.append(f"{title:<26}" + "".join(f"{found[at][1]:>38}" for found in told.values()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interactive", type=Path, required=True, help="a trace of interactive requests")
    parser.add_argument("--job", type=Path, required=True, help="a trace whose requests are the job's items")
    parser.add_argument("--minutes", type=float, default=6.0, help="arrivals end and the job is due then")
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3.0, help="so many times as fast as the interactive trace")
    parser.add_argument("--seed", type=int, default=7, help="of the tenants")
    parser.add_argument("--port", type=int, default=8_041)
    parser.add_argument("--again", type=Path, help="a --json of an earlier night: only the simulator is asked")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    interactive, job = read_trace(options.interactive), read_trace(options.job)
    asked = question(interactive, job, options)
    if options.again:
        measured = json.loads(options.again.read_text())
    else:
        parsed = Trace("night", (*asked.items, *interactive.requests), ())
        with tempfile.TemporaryDirectory() as folder:
            place = Options(options.port, 3, Path(folder) / "var", seed=options.seed, headless=True, parsed=parsed)
            measured = Night(place, asked, lambda line: print(line, flush=True)).run_night()
    document = msgspec.convert(measured["document"], PolicyDocument)
    real, due_us = measured["real"], measured["deadline_us"]
    load = asked.load(due_us, real["frozen_us"])
    columns = {"real": real, "simulated": simulated(load, document)}
    if real["frozen_us"]:
        columns["never frozen"] = simulated(asked.load(due_us, ()), document)
    columns["nothing lent"] = simulated(load, changed(document, {"pool.flex.max_lent": 0}))
    print(table(columns), flush=True)
    if options.json:
        options.json.write_text(json.dumps(measured | {"columns": columns}))
    return 0 if agree(columns) else 1


def agree(columns: dict[str, dict[str, Any]]) -> bool:
    """Whether each item was done once and the deadline ended as the simulator said."""
    real, said = columns["real"]["job"], columns["simulated"]["job"]
    return real["done"] == real["items"] and real["deadline_met"] == said["deadline_met"]


if __name__ == "__main__":
    sys.exit(main())
