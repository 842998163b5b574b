"""Frames to viewers: the web process beside Channels' `group_send` and a bare protocol, and 10,000 viewers at once.

    python -m benchmarks.live [--quick] [--rounds N] [--viewers N] [--json FILE]

500 viewers look at ten topics; the rate of frames is raised by a quarter until less than 98 % of them arrive or p99
is 250 ms or more, each kind of server in turn. The server has one core; Redis, publisher and viewers have the other.
Ours is the real web process with real sessions and the controller's own publisher, its limit of four frames a second
lifted by its clock. Then 10,000 viewers of two web processes get four frames a second each on both cores.
Exit 1 when a goal is missed: at least 12 times the deliveries of `group_send`, at most 3.3 times the CPU of the bare
protocol for each, and 98 % of what 10,000 viewers are told with p99 under 250 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ingest import ROOT, START_WITHIN_S, Server, benchmark_database, benchmark_servers, free_port, server
from benchmarks.live_clients import CONNECT_WITHIN_S, STAMP_BASE

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
os.environ.setdefault("FLEXBAND_SECRET_KEY", "benchmark")

RATIO_LEAST = 12.0
CPU_TO_RAW_MOST = 3.3
P99_MS_UNDER = 250
DELIVERED_LEAST = 0.98
VIEWERS, MANY, MANY_HZ = 500, 10_000, 4.0
TOPICS = [f"pool:bench-{number}" for number in range(10)]
FILLER = "x" * 360
"""Makes a frame some 510 bytes long, as a pool's change of a second is."""
STEP = 1.25
#: Where not even this is kept up, nothing is said.
LOWEST_PER_S = 200.0
FIRST_PER_S = {"ours": 8_000.0, "group_send": 800.0, "group_send, pub/sub": 1_200.0, "bare protocol": 16_000.0}
#: A publisher that tells less than this of what it should is the limit itself.
PACE_LEAST = 0.9
#: Files of a process that are no viewer's socket.
OTHER_FILES = 300
OWN_WS = ("--ws", "controlplane.config.asgi:WebSocketProtocol")
PEER_WS = ("--ws", "websockets-sansio", "--ws-per-message-deflate", "false")
WS = ("--backlog", "4096",
      "--timeout-graceful-shutdown", "1", "--log-level", "critical")  # fmt: skip

Offer = Callable[[float, float], tuple[int, float]]
"""(frames a second for each topic, seconds) -> frames told, seconds it took."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, shorter steps, 2,000 viewers: for a look")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--viewers", type=int, default=0, help="of the second part")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    many = options.viewers or (2_000 if options.quick else MANY)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < many + OTHER_FILES:
        raise SystemExit(f"{many:,} viewers need more than {files:,} open files: raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with contextlib.ExitStack() as stack:
        stack.enter_context(benchmark_servers())
        os.environ |= {
            "DATABASE_URL": stack.enter_context(benchmark_database()),
            "FLEXBAND_SIGNING_KEYS": stack.enter_context(tempfile.TemporaryDirectory()),
            "FLEXBAND_AS_OWNER": "true",
            "FLEXBAND_INSECURE_LOOPBACK": "true",
            "FLEXBAND_LOG_LEVEL": "WARNING",
        }
        import django

        django.setup()
        table = run(options.quick, options.rounds or (1 if options.quick else 3), many)
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return 0 if all(table["goals"].values()) else 1


def sessions(count: int) -> list[str]:
    """Session keys of `count` browsers of fifty people, as signing in would have written them."""
    from django.conf import settings
    from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.utils import timezone
    from django.utils.crypto import get_random_string

    from controlplane.access.models import Session
    from controlplane.access.session_store import SessionStore
    from controlplane.tenants.models import Installation, Member

    call_command("migrate", verbosity=0, skip_checks=True)
    Installation.objects.get_or_create(pk=1, defaults={"name": "Benchmark"})
    now, data = timezone.now(), {}
    for number in range(50):
        user = User.objects.create(username=f"viewer-{number}", password="!")
        Member.objects.create(user=user, role="viewer")
        said = {
            SESSION_KEY: str(user.pk),
            BACKEND_SESSION_KEY: settings.AUTHENTICATION_BACKENDS[0],
            HASH_SESSION_KEY: user.get_session_auth_hash(),
        }
        data[user.pk] = SessionStore().encode(said)
    people = list(data)
    rows = [
        Session(
            session_key=get_random_string(32), session_data=data[people[number % len(people)]],
            user_id=people[number % len(people)], expire_date=now + timedelta(hours=2),
            last_used_at=now,
        )
        for number in range(count)
    ]  # fmt: skip
    Session.objects.bulk_create(rows, batch_size=1_000)
    return [row.session_key for row in rows]


# ---- viewers ----


class Crowd:
    """A process of viewers; entered when each has had its first frame."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.processor = psutil.Process(process.pid)

    def measure(self) -> None:
        self._say("measure")

    def report(self) -> dict[str, Any]:
        self._say("report")
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def _say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def crowd(ports: list[int], keys: list[str], sources: list[str]) -> Iterator[Crowd]:
    """One viewer for each session key, over servers and topics by turns."""
    viewers = [
        [ports[number % len(ports)], TOPICS[number // len(ports) % len(TOPICS)], key] for number, key in enumerate(keys)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"viewers": viewers, "sources": sources}, file)
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.live_clients", file.name],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            if "ready" not in process.stdout.readline():
                raise SystemExit(f"the viewers were not served within {CONNECT_WITHIN_S:.0f} s")
            yield Crowd(process)
        finally:
            process.terminate()
            process.wait(20)


# ---- what is told ----


def _state() -> dict[str, Any]:
    return {"figures": {"t_us": time.monotonic_ns() // 1_000 + STAMP_BASE, "filler": FILLER}}


class Paced:
    """Tells all topics at an even pace; what it could not tell in time it leaves out, as a controller does."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __call__(self, per_s: float, seconds: float) -> tuple[int, float]:
        began, told = time.perf_counter(), 0
        while (now := time.perf_counter() - began) < seconds:
            if now < told / per_s:
                time.sleep(told / per_s - now)
            self._tell()
            told += 1
        return told * len(TOPICS), time.perf_counter() - began


def publisher() -> Callable[[], None]:
    """The controller's publisher, over a clock by which every round is due."""
    import redis
    from django.conf import settings
    from django.utils import timezone

    from controlplane.live.frames import Publisher

    own, clock_s = Publisher(redis.Redis.from_url(settings.REDIS_URL)), iter(range(1, 10**9))

    def tell() -> None:
        own.publish(((topic, _state()) for topic in TOPICS), timezone.now(), clock_s=float(next(clock_s)))

    return tell


def group_sender(layer: str, runner: asyncio.Runner) -> Callable[[], None]:
    """`group_send` of the same frames to the groups of the peer."""
    from channels.layers import ChannelLayerManager
    from django.test import override_settings

    from benchmarks.live_peer import group_of, layer_settings
    from controlplane.live.frames import encode

    with override_settings(CHANNEL_LAYERS=layer_settings(layer)):
        own, seq = ChannelLayerManager()["default"], iter(range(1, 10**9))

    async def tell() -> None:
        number = next(seq)
        for topic in TOPICS:
            text = encode("delta", topic, 1, number, "2026-11-29T20:00:00+00:00", _state()).decode()
            await own.group_send(group_of(topic), {"type": "frame", "text": text})

    return lambda: runner.run(tell())


# ---- the comparison ----


@dataclass(frozen=True)
class Kind:
    """A server with its viewers and the way in which frames are told to it."""

    name: str
    server: Server
    crowd: Crowd
    offer: Offer


@dataclass(frozen=True)
class Sustained:
    """The last rate that was kept up, and what it cost."""

    per_s: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_us: float
    publisher_bound: bool


def sustained(kind: Kind, seconds: float) -> Sustained:
    """Raises the rate until it is not kept up; on a busy machine the first one may be too high."""
    rate, best = FIRST_PER_S[kind.name], Sustained(0.0, None, None, float("nan"), False)
    while True:
        kind.crowd.measure()
        cpu_s = kind.server.cpu_s()
        frames, took_s = kind.offer(rate / VIEWERS, seconds)
        time.sleep(0.4)
        cpu_s = kind.server.cpu_s() - cpu_s
        seen = kind.crowd.report()
        wanted = frames * VIEWERS / len(TOPICS)
        if seen["frames"] < DELIVERED_LEAST * wanted or (seen["p99_ms"] or P99_MS_UNDER) >= P99_MS_UNDER:
            if best.per_s or rate < LOWEST_PER_S:
                return best
            rate /= 2 * STEP
            continue
        best = Sustained(
            seen["frames"] / took_s, seen["p50_ms"], seen["p99_ms"], cpu_s * 1e6 / seen["frames"],
            wanted / took_s < PACE_LEAST * rate,
        )  # fmt: skip
        if best.publisher_bound:
            return best
        rate *= STEP


@contextlib.contextmanager
def raw_server() -> Iterator[Server]:
    """The bare protocol, as `server` runs the others."""
    from controlplane.live.frames import CHANNEL_PREFIX

    port = free_port()
    command = [sys.executable, "-m", "benchmarks.live_raw", str(port), CHANNEL_PREFIX, *TOPICS]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        _listening(port, process)
        yield Server(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(10)


def _listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the bare protocol did not start")
        time.sleep(0.1)


def compare(keys: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Each kind of server in turn, `rounds` times; the median rate of each."""
    found: dict[str, list[Sustained]] = {name: [] for name in FIRST_PER_S}
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        tell = publisher()
        tell()  # so that a viewer that joins has a state to see
        ours = stack.enter_context(server("controlplane.config.asgi:application", {}, *OWN_WS, *WS))
        core = stack.enter_context(
            server("benchmarks.live_peer:application", {"BENCHMARK_LAYER": "core"}, *PEER_WS, *WS)
        )
        pubsub = stack.enter_context(
            server("benchmarks.live_peer:application", {"BENCHMARK_LAYER": "pubsub"}, *PEER_WS, *WS)
        )
        raw = stack.enter_context(raw_server())
        kinds = [
            Kind(name, of, stack.enter_context(crowd([of.port], keys[:VIEWERS], ["127.0.0.1"])), Paced(teller))
            for name, of, teller in (
                ("ours", ours, tell),
                ("group_send", core, group_sender("core", runner)),
                ("group_send, pub/sub", pubsub, group_sender("pubsub", runner)),
                ("bare protocol", raw, tell),
            )
        ]
        stack.enter_context(_apart(kinds))
        for _ in range(rounds):
            for kind in kinds:
                found[kind.name].append(sustained(kind, seconds))
    return {name: _median(rows) for name, rows in found.items()}


@contextlib.contextmanager
def _apart(kinds: list[Kind]) -> Iterator[None]:
    """Servers on the first core, everybody else on the second; on a machine with one core nothing changes."""
    import redis

    own = psutil.Process()
    before = own.cpu_affinity()
    if len(before) >= 2:
        others = [own, *(kind.crowd.processor for kind in kinds)]
        with contextlib.suppress(psutil.Error, redis.RedisError):
            others.append(psutil.Process(redis.Redis.from_url(os.environ["REDIS_URL"]).info("server")["process_id"]))
        for process in others:
            with contextlib.suppress(psutil.Error):
                process.cpu_affinity([before[1]])
        for kind in kinds:
            kind.server.process.cpu_affinity([before[0]])
    try:
        yield
    finally:
        own.cpu_affinity(before)
        with contextlib.suppress(psutil.Error, redis.RedisError):
            pid = redis.Redis.from_url(os.environ["REDIS_URL"]).info("server")["process_id"]
            psutil.Process(pid).cpu_affinity(before)


def _median(rows: list[Sustained]) -> dict[str, Any]:
    middle = sorted(rows, key=lambda row: row.per_s)[len(rows) // 2]
    return {
        "per_s": middle.per_s,
        "p50_ms": middle.p50_ms,
        "p99_ms": middle.p99_ms,
        "cpu_us": statistics.median(row.cpu_us for row in rows),
        "publisher_bound": middle.publisher_bound,
        "runs_per_s": [round(row.per_s) for row in rows],
    }


# ---- many viewers ----


def many_viewers(keys: list[str], seconds: float) -> dict[str, Any]:
    """Two web processes, one client process, four frames a second for each viewer."""
    tell = publisher()
    tell()
    began = time.perf_counter()
    sources = [f"127.0.0.{number}" for number in range(2, 10)]
    with (
        server("controlplane.config.asgi:application", {}, *OWN_WS, *WS) as one,
        server("controlplane.config.asgi:application", {}, *OWN_WS, *WS) as two,
        crowd([one.port, two.port], keys, sources) as viewers,
    ):
        connected_s = time.perf_counter() - began
        Paced(tell)(MANY_HZ, 2.0)
        time.sleep(0.5)  # what was told before has come before it is counted
        viewers.measure()
        cpu_s = one.cpu_s() + two.cpu_s()
        frames, took_s = Paced(tell)(MANY_HZ, seconds)
        time.sleep(0.5)
        seen = viewers.report()
        cpu_s = one.cpu_s() + two.cpu_s() - cpu_s
        rss = sum(of.process.memory_info().rss for of in (one, two))
    wanted = frames * len(keys) / len(TOPICS)
    return {
        "viewers": len(keys),
        "hz": MANY_HZ,
        "seconds": took_s,
        "connected_s": connected_s,
        "per_s": seen["frames"] / took_s,
        "delivered": seen["frames"] / wanted,
        "lost": seen["lost"],
        "p50_ms": seen["p50_ms"],
        "p99_ms": seen["p99_ms"],
        "server_cores": cpu_s / took_s,
        "client_cores": seen["cpu_s"] / took_s,
        "server_kib_per_viewer": rss / 1024 / len(keys),
    }


def run(quick: bool, rounds: int, many: int) -> dict[str, Any]:
    keys = sessions(many)
    load = os.getloadavg()[0]
    kinds = compare(keys, rounds, 2.0 if quick else 3.0)
    print_kinds(kinds)
    crowded = many_viewers(keys, 6.0 if quick else 20.0)
    # On a machine that is too busy for the peer there is no ratio, and none is made up.
    peer = kinds["group_send"]["per_s"]
    ratio = kinds["ours"]["per_s"] / peer if peer else float("nan")
    cpu = kinds["ours"]["cpu_us"] / kinds["bare protocol"]["cpu_us"]
    late = crowded["p99_ms"] or P99_MS_UNDER
    return {
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("uvicorn", "websockets", "channels", "channels_redis", "redis")},
        "kinds": kinds,
        "many": crowded,
        "ratio": ratio,
        "cpu_to_raw": cpu,
        "goals": {
            "ratio": ratio >= RATIO_LEAST,
            "cpu_to_raw": cpu <= CPU_TO_RAW_MOST,
            "many": crowded["delivered"] >= DELIVERED_LEAST and late < P99_MS_UNDER and not crowded["lost"],
        },
    }


def print_table(table: dict[str, Any]) -> None:
    print(f"Live frames: {VIEWERS} viewers, {len(TOPICS)} topics, p99 under {P99_MS_UNDER} ms; "
          f"load {table['load_before']:.1f} before, {table['load_after']:.1f} after; "
          + ", ".join(f"{name} {text}" for name, text in table["versions"].items()))  # fmt: skip
    many = table["many"]
    print(f"{'ours to group_send':<52}{table['ratio']:>8.1f}  at least {RATIO_LEAST:.0f}  {_word(table, 'ratio')}")
    print(f"{'CPU of a delivery to the bare protocol':<52}{table['cpu_to_raw']:>8.1f}  at most {CPU_TO_RAW_MOST}  "
          f"{_word(table, 'cpu_to_raw')}")  # fmt: skip
    told = f"{many['viewers']:,} viewers at {many['hz']:.0f} Hz: arrived, %"
    print(f"{told:<52}{many['delivered'] * 100:>8.1f}  at least {DELIVERED_LEAST * 100:.0f}, p99 {many['p99_ms']} ms "
          f"under {P99_MS_UNDER}  {_word(table, 'many')}")  # fmt: skip
    print(f"  {many['per_s']:,.0f} deliveries/s, p50 {many['p50_ms']} ms, servers {many['server_cores']:.2f} and "
          f"viewers {many['client_cores']:.2f} cores, {many['server_kib_per_viewer']:.0f} KiB a viewer, connected in "
          f"{many['connected_s']:.0f} s, {many['lost']} lost")  # fmt: skip


def print_kinds(kinds: dict[str, Any]) -> None:
    """The comparison, as soon as it is known: ten thousand viewers take minutes to come."""
    print(f"{'server':<24}{'deliveries/s':>14}{'p50 ms':>8}{'p99 ms':>8}{'CPU us':>9}  runs")
    for name, row in kinds.items():
        bound = " (bound by the publisher)" if row["publisher_bound"] else ""
        print(f"{name:<24}{row['per_s']:>14,.0f}{row['p50_ms'] or 0:>8}{row['p99_ms'] or 0:>8}{row['cpu_us']:>9.1f}  "
              f"{', '.join(f'{run:,}' for run in row['runs_per_s'])}{bound}", flush=True)  # fmt: skip


def _word(table: dict[str, Any], goal: str) -> str:
    return "met" if table["goals"][goal] else "MISSED"


if __name__ == "__main__":
    raise SystemExit(main())
