"""From a push to the acknowledgement of every agent, beside one Celery message and one update_or_create per agent.

    python -m benchmarks.policy_push [--quick] [--agents N] [--rounds N] [--json FILE]

Ours is the real path: push() in the database, a real Celery worker, one broadcast, pulls from a real uvicorn, one
shared verification, real signed reports whose transactions acknowledge. Interleaved with the peer, one warm-up each.
Exit 1 when less than 99 % of the agents heard of it within 0.25 s, less than 99.9 % acknowledged within the goal (2 s
up to 1,000 agents, 3 s beyond), or the peer takes less than ten times as long.

A process may hold only so many connections: the limit of open files is raised as far as the system lets it. Where
10,000 agents need more (`ulimit -n`, or the broker's own most), several of them share one connection to the broker, and
the peer runs with fewer agents and is scaled up, which its one message per agent makes linear. The table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import uvloop

from benchmarks import push_cpu
from benchmarks.ingest import HTTP, ROOT, START_WITHIN_S, Server, benchmark_database, benchmark_servers, server

GOAL_S, GOAL_S_BEYOND_1000 = 2.0, 3.0
HEARD_GOAL_S = 0.25
ACKED_SHARE = 0.999
RATIO_LEAST = 10.0
TIMEOUT_S = 600.0
# Files that are no agent's connection: the database, the broker, logs.
OTHER_FILES = 500
BROKER_CLIENTS_MOST = 9_000
POOL = "benchmark"
TENANTS = 50
REAL_AGENTS = 21
KEEP_ALIVE = ("--timeout-keep-alive", "600", "--backlog", "4096")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    parser.add_argument("--agents", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    raise_open_files(4 * options.agents + OTHER_FILES)
    with contextlib.ExitStack() as stack:
        stack.enter_context(benchmark_servers())
        redis_url = os.environ["REDIS_URL"]
        database_url = stack.enter_context(benchmark_database())
        keys = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ |= {
            "DATABASE_URL": database_url,
            "CELERY_BROKER_URL": redis_url,
            "FLEXBAND_SIGNING_KEYS": keys,
            "FLEXBAND_AS_OWNER": "true",
            "FLEXBAND_INSECURE_LOOPBACK": "true",
            "FLEXBAND_LOG_LEVEL": "WARNING",
            "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
        }
        import django

        django.setup()
        table = run(options.agents, options.rounds or (3 if options.quick else 7), redis_url)
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    met = table["within_goal"] and table["heard_within_goal"] and table["ratio_to_peer"] >= RATIO_LEAST
    return 0 if met else 1


def raise_open_files(wanted: int) -> None:
    """Lets this process and those that it starts hold so many open files, or as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in ((max(soft, wanted), max(hard, wanted)), (max(soft, min(wanted, hard)), hard)):
        with contextlib.suppress(ValueError, OSError):  # only root may raise the hard limit, up to the kernel's
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            return


def goal_s(agents: int) -> float:
    """Seconds in which 99.9 % of the agents shall have acknowledged."""
    return GOAL_S if agents <= 1_000 else GOAL_S_BEYOND_1000


def sharing(agents: int, files: int) -> tuple[int, int]:
    """(agents per connection to the broker, agents of the peer) that fit into `files` open files and the broker."""
    room = files - OTHER_FILES
    per_broker = 1
    while agents + -(-agents // per_broker) > room or agents / per_broker > BROKER_CLIENTS_MOST:
        per_broker += 1
        if per_broker > 64:
            raise SystemExit(f"{agents:,} agents need more than {files:,} open files: raise `ulimit -n`")
    # Each agent of the peer has a connection to its broker and one to its web server, beside ours that stay open.
    return per_broker, max(1, min(agents, (room - agents) // 2, BROKER_CLIENTS_MOST))


@contextlib.contextmanager
def worker() -> Iterator[psutil.Process]:
    """A real Celery worker, one process; entered when it takes work."""
    command = [
        sys.executable,
        "-m",
        "celery",
        "--skip-checks",
        "-A",
        "controlplane.config.celery",
        "worker",
        "-P",
        "solo",
    ]
    command += ["-Q", "flexband", "-l", "info", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_WITHIN_S
            while b" ready." not in (said := Path(log.name).read_bytes()):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the Celery worker did not start: {said[-2_000:].decode('utf-8', 'replace')}")
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        except TimeoutError:
            print(Path(log.name).read_bytes()[-3_000:].decode("utf-8", "replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(15)


def build(count: int):
    """A pool of `count` agents with their keys, tenants, and keys to sign with."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from django.core.management import call_command
    from django.utils import timezone

    from benchmarks.policy_agents import Shared, SimulatedAgent
    from controlplane.contracts.models import WorkloadClass
    from controlplane.fleet.models import Agent, Pool, ServedModel, Slot
    from controlplane.ledger.models import RateCard
    from controlplane.policy.queries import signing_keys
    from controlplane.policy.signing import ensure_keys
    from controlplane.tenants.models import Installation, Tenant

    call_command("migrate", verbosity=0, skip_checks=True)
    now = timezone.now()
    ensure_keys(now)
    installation = Installation.objects.create(pk=1, name="Benchmark")
    model = ServedModel.objects.create(name="llama-70b")
    for slug, kind in (("chat", "interactive"), ("bulk", "batch")):
        WorkloadClass.objects.create(slug=slug, name=slug, kind=kind, created_at=now, updated_at=now)
        RateCard.objects.create(
            class_slug=slug, model=model, effective_from=now, prompt_nanos_per_mtok=1, cached_nanos_per_mtok=1,
            output_nanos_per_mtok=1, created_at=now, created_by="benchmark",
        )  # fmt: skip
    pool = Pool.objects.create(
        slug=POOL, name=POOL, model=model, gpu_type="H100", isolation="dedicated", interactive_class="chat",
        batch_class="bulk", created_at=now, updated_at=now,
    )  # fmt: skip
    Tenant.objects.bulk_create(
        Tenant(slug=f"tenant-{n}", name="x", classes=["chat", "bulk"], created_at=now, updated_at=now)
        for n in range(TENANTS)
    )
    shared = Shared(str(installation.uuid), POOL, signing_keys())
    keys = [Ed25519PrivateKey.generate() for _ in range(count)]
    rows = Agent.objects.bulk_create(
        Agent(
            name=f"gpu-{n:05d}", pool=pool, state="active", public_key=key.public_key().public_bytes_raw(),
            enrolled_at=now,
        )
        for n, key in enumerate(keys)
    )  # fmt: skip
    Slot.objects.create(pool=pool, agent=rows[0], name="s0", band="interactive")
    return [SimulatedAgent(row.pk, str(row.uuid), key, shared) for row, key in zip(rows, keys)], Tenant, rows


def run(count: int, rounds: int, redis_url: str) -> dict:
    from controlplane.exchange.collector import spare_reports

    agents, tenants, _ = build(count)
    with (
        worker() as celery,
        server("benchmarks.ingest_server:application", {}, *HTTP, *KEEP_ALIVE) as web,
        server("benchmarks.policy_peer:application", {}, "--interface", "wsgi", *KEEP_ALIVE) as peer,
    ):
        spare_reports()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            table = runner.run(measure(agents, tenants, rounds, redis_url, web, celery, peer))
    return table | {"real_agent_ms": real_agent_ms(agents[0].shared)}


def real_agent_ms(shared) -> float:
    """Median milliseconds of a real agent for one bundle: verified, rehearsed, and written durably as in force."""
    from controlplane.agent.policy_state import PolicyState, Trust
    from controlplane.agent.policy_trial import trial_refusal

    trust, took = Trust(shared.installation, shared.pool, shared.signing_keys), []
    for bundle, digest in shared.raw[-1:] * REAL_AGENTS:
        with tempfile.TemporaryDirectory() as state_dir:
            policy = PolicyState(Path(state_dir), trial_refusal)
            began = time.perf_counter()
            applied = policy.consider(bundle, digest, trust, now_us=time.time_ns() // 1000)
            took.append((time.perf_counter() - began) * 1_000)
        if applied is None:
            raise SystemExit(f"a real agent refuses the policy: {policy.refused_reason}")
    return statistics.median(took)


async def measure(
    agents, tenants, rounds: int, redis_url: str, web: Server, celery: psutil.Process, peer_web: Server
) -> dict:
    from benchmarks.policy_agents import connect, gathered

    here, urls = psutil.Process(), (os.environ["DATABASE_URL"], redis_url)
    parts = push_cpu.parts(*urls, web_process=web.process, worker=celery, agents=here)
    peer_parts = push_cpu.parts(*urls, web_process=peer_web.process, agents=here)
    await connect(agents, web.port)
    await gathered(agents, lambda agent: agent.hello(), 50)
    per_broker, peers = sharing(len(agents), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    ours, peer = [], []
    for number in range(rounds + 1):
        mine = await ours_round(agents, tenants, redis_url, number, parts, per_broker)
        theirs = await peer_round(agents[:peers], redis_url, peer_web.port, peer_parts)
        if number:  # the first round warms caches and connections on both sides
            ours.append(mine)
            peer.append(theirs)
    return summarised(ours, peer, len(agents)) | {"agents_per_broker_connection": per_broker, "peer_agents": peers}


async def ours_round(agents, tenants, redis_url: str, number: int, parts: push_cpu.Parts, per_broker: int):
    """One push; the times of every agent, and the CPU seconds until all had acknowledged.

    Raises when one does not acknowledge in time.
    """
    from asgiref.sync import sync_to_async
    from django.utils import timezone

    from benchmarks.policy_agents import Times, jitter, kombu_body, subscribe
    from controlplane.audit.actors import Actor
    from controlplane.policy.actions import push
    from controlplane.policy.models import Delivery, Wave
    from controlplane.wire.nudging import REDIS_TRANSPORT_OPTIONS, ROUTING_KEY, pool_exchange

    times, tasks, loop = Times(), [], asyncio.get_running_loop()
    began = [0.0]
    source = random.Random(number)
    everyone = asyncio.Event()

    async def follow(agent, nudge):
        await asyncio.sleep(jitter(source))
        document = await agent.pull(nudge.digest)
        times.pulled.append(time.perf_counter() - began[0])
        agent.revision = document.revision
        await agent.report()
        times.acked.append(time.perf_counter() - began[0])
        if len(times.acked) == len(agents):
            everyone.set()

    def heard(group, message: bytes):
        if not message.startswith(b"{"):
            return
        for agent in group:
            nudge = agent.shared.nudge(kombu_body(message))
            times.heard.append(time.perf_counter() - began[0])
            tasks.append(loop.create_task(follow(agent, nudge)))

    database = (redis_url.rsplit("/", 1)[-1] or "0") if redis_url.count("/") > 2 else "0"
    prefix = REDIS_TRANSPORT_OPTIONS["global_keyprefix"]
    channel = f"{prefix}/{database}.{pool_exchange(POOL)}/{ROUTING_KEY}"
    groups = [agents[at : at + per_broker] for at in range(0, len(agents), per_broker)]
    for group in groups:
        await subscribe(group[0], redis_url, lambda message, group=group: heard(group, message), "SUBSCRIBE", channel)
    await asyncio.sleep(0.5)
    await sync_to_async(lambda: tenants.objects.filter(slug="tenant-0").update(weight=number + 1))()
    before = parts.cpu_s()
    began[0], began_at = time.perf_counter(), timezone.now()
    revision, push_s = await sync_to_async(push_cpu.timed)(
        lambda: push(actor=Actor.system("benchmark"), reason=f"round {number}", now=timezone.now())
    )
    pushed = time.perf_counter() - began[0]
    await asyncio.wait_for(everyone.wait(), TIMEOUT_S)
    cpu = push_cpu.of_round(before, parts.cpu_s(), push_s)
    await asyncio.gather(*tasks)
    # The worker's clock when it began to sign: what it does before the broadcast counts as the broadcast's time.
    told_at = await sync_to_async(Wave.objects.values_list("sent_at", flat=True).get)(rollout__revision=revision)
    told_s = (told_at - began_at).total_seconds()
    stored = await sync_to_async(lambda: Delivery.objects.filter(rollout__revision=revision, state="acked").count())()
    if stored != len(agents):
        raise SystemExit(f"{stored} of {len(agents)} acknowledgements stored")
    for group in groups:
        group[0].broker._transport.close()
    sizes = {"load": os.getloadavg()[0], "bundle_bytes": agents[0].shared.bundle_bytes}
    return {
        "pushed": pushed,
        "cpu": cpu,
        **sizes,
        "told_p99": sorted(times.heard)[int(len(times.heard) * 0.99)] - told_s,
        **{name: sorted(getattr(times, name)) for name in ("heard", "pulled", "acked")},
    }


async def peer_round(agents, redis_url: str, peer_port: int, parts: push_cpu.Parts):
    """One apply_async per agent to its own queue, one bundle view, one update_or_create per agent."""
    from asgiref.sync import sync_to_async
    from celery import current_app

    from benchmarks.http_load import request_bytes
    from benchmarks.policy_agents import HttpConnection, Times, jitter, subscribe
    from controlplane.policy.models import Delivery, PolicyBundle

    times, tasks, loop = Times(), [], asyncio.get_running_loop()
    began = [0.0]
    source = random.Random(1)
    everyone = asyncio.Event()
    newest = await sync_to_async(
        lambda: PolicyBundle.objects.select_related("revision__rollout").latest("revision_id")
    )()
    rollout = newest.revision.rollout.pk
    await sync_to_async(lambda: Delivery.objects.filter(rollout_id=rollout).update(state="sent"))()
    connections = {}
    for agent in agents:
        _, connections[agent.id] = await loop.create_connection(HttpConnection, "127.0.0.1", peer_port)

    async def follow(agent):
        await asyncio.sleep(jitter(source))
        await connections[agent.id].ask(request_bytes("GET", f"/bundle/{newest.digest}", b"", {}))
        times.pulled.append(time.perf_counter() - began[0])
        await connections[agent.id].ask(request_bytes("POST", f"/ack/{rollout}/{agent.id}", b"", {}))
        times.acked.append(time.perf_counter() - began[0])
        if len(times.acked) == len(agents):
            everyone.set()

    def heard(agent, message: bytes):
        if not message.startswith(b"{"):
            return
        times.heard.append(time.perf_counter() - began[0])
        tasks.append(loop.create_task(follow(agent)))

    for agent in agents:
        queue = f"fb:peer.{agent.id}"
        await subscribe(agent, redis_url, lambda message, agent=agent: heard(agent, message), "BRPOP", queue, "0")
    await asyncio.sleep(0.5)

    def publish():
        for agent in agents:
            current_app.send_task("policy.apply", kwargs={"digest": newest.digest}, queue=f"peer.{agent.id}")

    before = parts.cpu_s()
    began[0] = time.perf_counter()
    _, publish_s = await sync_to_async(push_cpu.timed, thread_sensitive=False)(publish)
    pushed = time.perf_counter() - began[0]
    await asyncio.wait_for(everyone.wait(), TIMEOUT_S)
    cpu = push_cpu.of_round(before, parts.cpu_s(), publish_s)
    await asyncio.gather(*tasks)
    for agent in agents:
        agent.broker._transport.close()
        connections[agent.id]._transport.close()
    return {
        "pushed": pushed,
        "cpu": cpu,
        **{name: sorted(getattr(times, name)) for name in ("heard", "pulled", "acked")},
    }


def summarised(ours: list[dict], peer: list[dict], agents: int) -> dict:
    def middle(rounds: list[dict], name: str, q: float) -> float:
        return statistics.median(found[name][min(len(found[name]) - 1, int(q * len(found[name])))] for found in rounds)

    scale = agents / len(peer[-1]["acked"])
    acked = [found["acked"][max(0, math.ceil(ACKED_SHARE * agents) - 1)] for found in ours]
    table = {
        "agents": agents,
        "goal_s": goal_s(agents),
        "acked_999_s": acked,
        "acked_999_s_worst": max(acked),
        "within_goal": max(acked) <= goal_s(agents),
        "told_p99_s": statistics.median(found["told_p99"] for found in ours),
        "heard_within_goal": max(found["told_p99"] for found in ours) <= HEARD_GOAL_S,
        "rounds": len(ours),
        "cpus": os.cpu_count(),
        "load_average": [found["load"] for found in ours],
        "bundle_bytes": ours[-1]["bundle_bytes"],
        "all_acked_s": [found["acked"][-1] for found in ours],
        "all_acked_s_worst": max(found["acked"][-1] for found in ours),
        "ratio_to_peer": statistics.median(scale * b["acked"][-1] / a["acked"][-1] for a, b in zip(ours, peer)),
        "cpu_s": {name: statistics.median(found["cpu"][name] for found in ours) for name in ours[0]["cpu"]},
        "cpu_us_per_agent": {"ours": push_cpu.per_agent_us(ours), "peer": push_cpu.per_agent_us(peer)},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("celery", "kombu", "django", "uvicorn")},
        },
    }
    for who, rounds in (("ours", ours), ("peer", peer)):
        table[who] = {"published_s": statistics.median(found["pushed"] for found in rounds)}
        for name in ("heard", "pulled", "acked"):
            table[who] |= {
                f"{name}_p50_s": middle(rounds, name, 0.5),
                f"{name}_p99_s": middle(rounds, name, 0.99),
                f"{name}_all_s": middle(rounds, name, 1.0),
            }
    return table


def print_table(table: dict) -> None:
    versions = " ".join(f"{name} {number}" for name, number in table["versions"].items())
    print(f"Policy push: {table['agents']:,} agents in one process, {table['rounds']} interleaved rounds, medians")
    loads = ", ".join(f"{load:.1f}" for load in table["load_average"])
    print(f"{versions}; {table['cpus']} CPUs for agents, servers, worker and database, load of the rounds: {loads}")
    print(f"the simulated agents share one verification of the bundle ({table['bundle_bytes'] / 1024:.0f} KiB); a real "
          f"agent verifies, rehearses and writes it in {table['real_agent_ms']:.1f} ms")  # fmt: skip
    print(
        f"{'seconds since the push':<48}{'published':>10}{'heard':>9}{'pulled':>9}"
        f"{'ack p50':>9}{'ack p99':>9}{'all':>9}"
    )
    names = {
        "ours": "one broadcast, signed pull, reports acknowledge",
        "peer": "peer: apply_async and update_or_create each",
    }
    for who, name in names.items():
        row = table[who]
        print(f"{name:<48}{row['published_s']:>10.3f}{row['heard_all_s']:>9.3f}{row['pulled_all_s']:>9.3f}"
              f"{row['acked_p50_s']:>9.3f}{row['acked_p99_s']:>9.3f}{row['acked_all_s']:>9.3f}")  # fmt: skip
    spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in table["cpu_s"].items())
    print(f"CPU seconds from the push to the last acknowledgement: {spent}")
    print("\n".join(push_cpu.lines(**table["cpu_us_per_agent"])))
    print("all acknowledged, by round: " + ", ".join(f"{seconds:.2f}" for seconds in table["all_acked_s"]) + " s")
    if table["agents_per_broker_connection"] > 1:
        print(f"{table['agents_per_broker_connection']} agents share one connection to the broker (open files)")
    scaled = ""
    if table["peer_agents"] < table["agents"]:
        scaled = f" (measured with {table['peer_agents']:,} agents, scaled to {table['agents']:,})"
    verdict = "met" if table["within_goal"] else "MISSED"
    ratio = "met" if table["ratio_to_peer"] >= RATIO_LEAST else "MISSED"
    print(
        f"99.9 % acknowledged: worst round {table['acked_999_s_worst']:.3f} s, goal <= {table['goal_s']:.0f} s: "
        f"{verdict}; all: median {table['ours']['acked_all_s']:.3f} s, worst {table['all_acked_s_worst']:.3f} s"
    )
    word = "met" if table["heard_within_goal"] else "MISSED"
    print(f"from the broadcast to 99 % having heard it: median {table['told_p99_s']:.3f} s, goal <= {HEARD_GOAL_S} s in"
          f" every round: {word}")  # fmt: skip
    print(f"peer takes {table['ratio_to_peer']:.1f}x as long{scaled}, goal >= {RATIO_LEAST:.0f}x: {ratio}")


if __name__ == "__main__":
    sys.exit(main())
