"""What an agent costs in front of an inference server, beside nginx as a plain reverse proxy and a proxy from PyPI.

    python -m benchmarks.agent [--quick] [--only NAMES] [--requests N] [--json FILE]

The agent runs as it is deployed, with all parts on: keys and limits of 1,000 tenants, hard budgets for a tenth of them,
admission, fairness, contracts, records, spool and reports to a control plane that takes them. What is measured has one
core, everything else (inference server, clients, control plane) another. Rounds of one table are interleaved; figures
are medians. Parts (`--only`): requests, streams, paced, jitter, overload, memory. Exit 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import agent_servers as servers
from benchmarks.agent_client import Load, rss_kib
from benchmarks.agent_jitter import Streams
from benchmarks.agent_peers import peer
from benchmarks.agent_servers import Server, drive, started
from benchmarks.builds import described

CPU_GOAL = 5.0
CPU_WITHOUT_DECISION_GOAL = 3.5
REQUESTS_PEER_GOAL = 100.0
CHUNKS_GOAL_PER_S = 80_000.0
CHUNKS_PEER_GOAL = 50.0
TTFT_P50_GOAL_MS = 0.3
TTFT_P99_GOAL_MS = 2.0
JITTER_GOAL_MS = 20.0
FLAT_GOAL = 1.10
"""Memory after the last mark over memory after the first."""
WARM = 30_000
"""Requests before the first mark, at least. A second's records and the report that is made of them have their largest
size once a few whole seconds of load are over; the memory they took stays with the process for those that follow."""
PARTS = ("requests", "streams", "paced", "jitter", "overload", "memory")
TOKENS = 32
CONNECTIONS = 32
HALF_LOAD = 0.5
PACE_MS = 10


@dataclass(frozen=True)
class Scale:
    """How long everything takes."""

    seconds: float
    rounds: int
    marks: tuple[int, ...]
    jitter_s: float


FULL = Scale(4.0, 5, (100_000, 500_000, 1_000_000), 15.0)
QUICK = Scale(1.5, 3, (WARM, 2 * WARM, 3 * WARM), 5.0)


@dataclass
class Goal:
    """One line at the end."""

    name: str
    measured: float | None
    goal: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.goal if self.at_least else self.measured <= self.goal


@dataclass
class Told:
    """What all parts found."""

    goals: list[Goal] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def median(rounds: list[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] or float("nan") for one in rounds)


@contextlib.contextmanager
def everything(home: Path, *, peers: bool) -> Iterator[tuple[dict[str, Server], Server]]:
    """The servers of one table by name, and the agent's control plane."""
    with contextlib.ExitStack() as stack:
        inference = stack.enter_context(servers.upstream(home, "--tokens", str(TOKENS)))
        found: dict[str, Server] = {"direct": inference}
        nginx = stack.enter_context(servers.nginx(home, inference))
        if nginx is None:
            say("peer missing: nginx is not installed")
        else:
            found["nginx"] = nginx
        found["forwarder"] = stack.enter_context(servers.forwarder(home, inference))
        found["agent"], control = stack.enter_context(servers.agent(home, inference))
        other = stack.enter_context(peer(home, inference)) if peers else None
        if other is not None:
            found["peer"] = other
        yield found, control


def interleaved(
    found: dict[str, Server], control: Server, scale: Scale, *, stream: bool
) -> dict[str, list[dict[str, Any]]]:
    """Rounds of every server in turn; the first one warms up and does not count.

    What the agent puts off is its cost too: it is counted until every record of the round is at the control plane.
    """
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in found}
    for number in range(scale.rounds + 1):
        for name, server in found.items():
            load = Load(server.port, CONNECTIONS, seconds=scale.seconds, stream=stream, bearer=server.bearer)
            cpu_s = server.cpu_s()
            told = drive(load)
            if name == "agent":
                _told_whole(control, server)
            told["cpu_us"] = (server.cpu_s() - cpu_s) / max(1, told["answers"]) * 1e6
            if number:
                rounds[name].append(told)
    return rounds


def table(rounds: dict[str, list[dict[str, Any]]], found: dict[str, Server], *, stream: bool) -> None:
    unit = "chunks/s" if stream else "requests/s"
    say(f"{'':34s}{unit:>12s} {'CPU us':>9s} {'x nginx':>8s} {'p50 ms':>8s} {'p99 ms':>8s}  not 200")
    nginx_us = median(rounds["nginx"], "cpu_us") if "nginx" in rounds else float("nan")
    for name, told in rounds.items():
        rate, cpu_us = median(told, "chunks_per_s" if stream else "per_s"), median(told, "cpu_us")
        bad = sum(count for one in told for status, count in one["statuses"].items() if status != "200")
        label = {"forwarder": "agent without the decision", "peer": found[name].name}.get(name, name)
        say(
            f"{label:34s}{rate:12,.0f} {cpu_us:9.1f} {cpu_us / nginx_us:8.2f} {median(told, 'p50_ms'):8.2f} "
            f"{median(told, 'p99_ms'):8.2f}  {bad or ''}"
        )


def requests(home: Path, scale: Scale, told: Told) -> None:
    """Whole answers, as fast as 32 clients ask."""
    say(f"\n-- {CONNECTIONS} connections, whole answers of {TOKENS} tokens")
    with everything(home, peers=True) as (found, control):
        rounds = interleaved(found, control, scale, stream=False)
        table(rounds, found, stream=False)
        say(f"records at the control plane: {_told_whole(control, found['agent']):,}, one for each answer")
    told.tables["requests"] = rounds
    nginx_us = median(rounds["nginx"], "cpu_us") if "nginx" in rounds else None
    for name, goal in (("agent", CPU_GOAL), ("forwarder", CPU_WITHOUT_DECISION_GOAL)):
        ratio = None if nginx_us is None else median(rounds[name], "cpu_us") / nginx_us
        what = "CPU per request" if name == "agent" else "the same without the decision"
        told.goals.append(Goal(f"{what}, of nginx's", ratio, goal, "x"))
    ratio = median(rounds["agent"], "per_s") / median(rounds["peer"], "per_s") if "peer" in rounds else None
    told.goals.append(Goal("requests/s, of the peer's", ratio, REQUESTS_PEER_GOAL, "x", at_least=True))


def _told_whole(control: Server, agent: Server) -> int:
    """Waits until every answer has its record at the control plane, once; how many those are."""
    until = time.monotonic() + 10
    answered = None
    while time.monotonic() < until:
        taken = servers.counts(control)
        answered = servers.completed(agent)
        if taken["completed"] == answered == taken["distinct"]:
            return answered
        time.sleep(0.1)
    raise SystemExit(f"the control plane has {taken} for {answered} answers")


def streams(home: Path, scale: Scale, told: Told) -> None:
    """Streams whose events come as fast as the inference server can write them."""
    say(f"\n-- {CONNECTIONS} connections, streams of {TOKENS} events without a pause")
    with everything(home, peers=True) as (found, control):
        rounds = interleaved(found, control, scale, stream=True)
        table(rounds, found, stream=True)
    told.tables["streams"] = rounds
    rate = median(rounds["agent"], "chunks_per_s")
    told.goals.append(Goal("events of streams per second", rate, CHUNKS_GOAL_PER_S, "/s", at_least=True))
    ratio = rate / median(rounds["peer"], "chunks_per_s") if "peer" in rounds else None
    told.goals.append(Goal("events per second, of the peer's", ratio, CHUNKS_PEER_GOAL, "x", at_least=True))


def paced(home: Path, scale: Scale, told: Told) -> None:
    """What the agent adds to the time to first token while it is half busy."""
    say(f"\n-- paced streams, {PACE_MS} ms per token: time to first token in ms, direct and through the agent")
    with contextlib.ExitStack() as stack:
        inference = stack.enter_context(servers.upstream(home, "--tokens", str(TOKENS), "--token-ms", str(PACE_MS)))
        agent, _ = stack.enter_context(servers.agent(home, inference, places=4_096))
        nginx = stack.enter_context(servers.nginx(home, inference))
        found = {"direct": inference, **({} if nginx is None else {"nginx": nginx}), "agent": agent}
        probe = _paced_round(agent, inference, 64, scale.seconds)
        busy = max(0.01, probe["busy"])
        half = max(16, min(1_024, int(64 * HALF_LOAD / busy)))
        for connections in sorted({16, half}):
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in found}
            for _ in range(scale.rounds):
                for name, server in found.items():
                    rounds[name].append(_paced_round(server, inference, connections, scale.seconds))
            _paced_line(connections, rounds, told, at_half=connections == half)
            told.tables[f"paced {connections}"] = rounds


def _paced_round(server: Server, inference: Server, connections: int, seconds: float) -> dict[str, Any]:
    """`busy` is the server's share of its core, `around` that of clients and inference server of theirs."""
    cpu_s, waited_s, began_s = server.cpu_s(), server.waited_s(), time.monotonic()
    inference_s = inference.cpu_s()
    length_s = TOKENS * PACE_MS / 1000
    one = drive(Load(server.port, connections, seconds=max(2.0, seconds), stream=True, spread_s=length_s))
    one["busy"] = (server.cpu_s() - cpu_s) / max(0.1, one["answers"] / one["per_s"])
    one["waited"] = (server.waited_s() - waited_s) / (time.monotonic() - began_s)
    one["around"] = (inference.cpu_s() - inference_s + one["client_cpu_s"]) / (time.monotonic() - began_s)
    return one


def _paced_line(connections: int, rounds: dict[str, list[dict[str, Any]]], told: Told, *, at_half: bool) -> None:
    def adds(server: str, q: str) -> float:
        return median(rounds[server], f"ttft_{q}_ms") - median(rounds["direct"], f"ttft_{q}_ms")

    added = {q: adds("agent", q) for q in ("p50", "p99")}
    say(
        f"{connections:5d} streams, agent {median(rounds['agent'], 'busy'):4.0%} busy, kept off its core by other "
        f"processes {median(rounds['agent'], 'waited'):4.0%} of the time: "
        f"p50 {median(rounds['direct'], 'ttft_p50_ms'):7.2f} + {added['p50']:6.3f}   "
        f"p99 {median(rounds['direct'], 'ttft_p99_ms'):7.2f} + {added['p99']:6.3f}   "
        f"(clients and inference server {median(rounds['agent'], 'around'):4.0%} busy on theirs)"
    )
    if "nginx" in rounds:
        say(f"{'':5s} nginx on the same core adds p50 {adds('nginx', 'p50'):6.3f}, p99 {adds('nginx', 'p99'):6.3f}")
    if at_half:
        told.goals.append(Goal("added time to first token, p50", added["p50"], TTFT_P50_GOAL_MS, "ms"))
        told.goals.append(Goal("added time to first token, p99", added["p99"], TTFT_P99_GOAL_MS, "ms"))


def jitter(home: Path, scale: Scale, told: Told) -> None:
    """2,000 streams of 30 tokens/s: how long an event stays in the agent, and in nginx on the same core."""
    say("\n-- 2,000 streams of 30 tokens/s: from the inference server's write to the client's socket, per event")
    arguments = ("--tokens", str(30 * 25), "--token-ms", str(1000 / 30), "--stamp")
    with contextlib.ExitStack() as stack:
        inference = stack.enter_context(servers.upstream(home, *arguments))
        nginx = stack.enter_context(servers.nginx(home, inference))
        agent, _ = stack.enter_context(servers.agent(home, inference, places=4_096))
        for name, server in (("direct", inference), ("nginx", nginx), ("agent", agent)):
            if server is None:
                say("peer missing: nginx is not installed")
                continue
            wanted = Streams(server.port, seconds=min(scale.jitter_s, 15.0), pids=server.pids())
            one = json.loads(started("benchmarks.agent_jitter", msgspec.json.encode(wanted).decode()))
            say(
                f"{name:8s} {one['begun']:5d} streams {one['chunks_per_s']:9,.0f} events/s  stay p50 "
                f"{one['stay_p50_ms']:7.3f}  p99 {one['stay_p99_ms']:7.3f}  max {one['stay_max_ms']:7.3f} ms   "
                f"{one['busy']:4.0%} busy, {one['in_kernel']:.0%} of that in the kernel; {one['samples']:,} samples, "
                f"{one['broken']} broken"
            )
            told.tables[f"jitter {name}"] = one
    told.goals.append(Goal("stay of an event in the agent, p99", one["stay_p99_ms"], JITTER_GOAL_MS, "ms"))


def overload(home: Path, scale: Scale, told: Told) -> None:
    """Ten times more than the slots carry: queue and memory stay bounded, the rest is refused at once."""
    places, answer_ms, queue = 16, 50.0, 64
    rate = 10 * places / answer_ms * 1000
    say(f"\n-- {rate:,.0f} requests/s where the slots carry a tenth, and {queue} may wait")
    with contextlib.ExitStack() as stack:
        inference = stack.enter_context(servers.upstream(home, "--answer-ms", str(answer_ms)))
        agent, control = stack.enter_context(servers.agent(home, inference, places=places, max_queue=queue))
        drive(Load(agent.port, 512, seconds=scale.seconds, rate_per_s=rate))
        sizes = [rss_kib(agent.pid)]
        for _ in range(scale.rounds):
            one = drive(Load(agent.port, 512, seconds=scale.seconds, rate_per_s=rate))
            sizes.append(rss_kib(agent.pid))
        time.sleep(2.0)
        counts = servers.counts(control)
    say(f"statuses of the last round {one['statuses']}, unsent {one['unsent']}; p99 of served {one['p99_ms']:.0f} ms")
    say(f"deepest queue reported {counts['queue_depth_max']}, refused {counts['refused']:,}; MiB resident:")
    say("  " + "  ".join(f"{size / 1024:.1f}" for size in sizes))
    told.tables["overload"] = {"last": one, "rss_kib": sizes, "counts": counts}
    told.goals.append(Goal("memory under ten times the load", sizes[-1] / sizes[0], FLAT_GOAL, "x"))
    told.goals.append(Goal("deepest queue", float(counts["queue_depth_max"]), float(queue), ""))


def memory(home: Path, scale: Scale, told: Told, marks: tuple[int, ...]) -> None:
    """Resident memory over very many requests."""
    say(f"\n-- {marks[-1]:,} requests through one agent, the first {marks[0]:,} to warm up")
    with contextlib.ExitStack() as stack:
        inference = stack.enter_context(servers.upstream(home))
        agent, control = stack.enter_context(servers.agent(home, inference))
        load = Load(agent.port, CONNECTIONS, requests=marks[-1], marks=list(marks), rss_of=agent.pid)
        one = drive(load)
        _told_whole(control, agent)
    say("   ".join(f"after {number:,}: {kib / 1024:.1f} MiB" for number, kib in one["rss_kib"]))
    told.tables["memory"] = one
    told.goals.append(Goal("memory at the end, of the first mark's", _growth(one["rss_kib"]), FLAT_GOAL, "x"))


def _growth(rss: list[list[int]]) -> float:
    return rss[-1][1] / rss[0][1]


def print_goals(goals: list[Goal]) -> bool:
    say(f"\n{'':44s}{'measured':>12s}  {'goal':>12s}")
    for goal in goals:
        sign = ">=" if goal.at_least else "<="
        measured = "no peer" if goal.measured is None else f"{goal.measured:,.2f}"
        word = {True: "met", False: "MISSED", None: ""}[goal.met]
        say(f"{goal.name:44s}{measured:>12s}  {sign} {goal.goal:>8,.1f} {goal.unit:2s} {word}")
    return all(goal.met is not False for goal in goals)


def about() -> dict[str, str]:
    """What ran on what."""
    found = {name: version(name) for name in ("uvloop", "httptools", "msgspec")}
    return {"python": platform.python_version(), "machine": platform.machine(), "cores": str(os.cpu_count()), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short rounds, for a look")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}")
    parser.add_argument("--requests", type=int, default=0, help="length of the part `memory`")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    scale, parts = QUICK if given.quick else FULL, given.only.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; known are {', '.join(PARTS)}")
    if len(servers.CORES) < 2:
        say("this needs two cores")
        return 2
    marks = scale.marks
    if given.requests:
        if given.requests < 3 * WARM:
            parser.error(f"--requests is at least {3 * WARM}: memory is looked at from {WARM} on")
        marks = (max(WARM, given.requests // 10), given.requests // 2, given.requests)
    told = Told(tables={"about": about(), "load_before": os.getloadavg()})
    say(described())
    say(f"{about()}; load before {os.getloadavg()[0]:.1f}")
    made = {"requests": requests, "streams": streams, "paced": paced, "jitter": jitter, "overload": overload}
    with tempfile.TemporaryDirectory(prefix="flexband-bench-") as home:
        for number, part in enumerate(one for one in PARTS if one in parts):
            own = Path(home) / str(number)
            own.mkdir()
            if part == "memory":
                memory(own, scale, told, marks)
            else:
                made[part](own, scale, told)
    met = print_goals(told.goals)
    say(f"load after {os.getloadavg()[0]:.1f} (of others too: the ratios are what counts)")
    if given.json:
        goals = [{**vars(goal), "met": goal.met} for goal in told.goals]
        given.json.write_text(json.dumps({"goals": goals, **told.tables}, indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
