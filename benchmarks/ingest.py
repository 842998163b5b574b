"""Usage ingest, HTTP to commit, beside a DRF peer and PostgreSQL's own COPY BINARY, interleaved in one run.

    python -m benchmarks.ingest [--quick] [--rounds N] [--json FILE]

Uses a database of its own on the server of `DATABASE_URL`, or on a throwaway server. Exit 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psutil
import psycopg

from benchmarks.ingest_cpu import Cpu, ReportCost

RECORDS = 200
HTTP = ("--http", "benchmarks.ingest_server:HttpProtocol")
"""As the web process is started, see docs/operate.md."""
SMALL_AGENTS, SMALL_RECORDS = 1_000, 10
SMALL_GOAL = 25.0
"""Multiple of the peer."""
SIGNATURES = 2_000
PEER_CLIENTS = 8
PEER_THREADS = PEER_CLIENTS
"""Of the second peer. The first has one, as a worker of a WSGI server has unless it is told otherwise; the goals are
multiples of that one."""


@dataclass(frozen=True)
class Goal:
    """What a ratio must reach."""

    name: str
    text: str
    least: float


GOALS = (
    Goal("packed_to_copy", "P1 packed / COPY BINARY", 0.50),
    Goal("json_to_copy", "P1 JSON / COPY BINARY", 0.30),
    Goal("packed_to_peer", "P2 packed / DRF peer", 70.0),
    Goal("json_to_peer", "P2 JSON / DRF peer", 40.0),
    Goal("small_to_peer", "P3 1,000 x 10 packed / DRF peer", SMALL_GOAL),
    Goal("small_to_eager", "P3 1,000 x 10 packed / through ASGI, each validated", 1.8),
    Goal("rollups", "P4 packed with rollups / without", 0.65),
)
BESIDE = {
    "packed_to_threads": f"packed / DRF peer with {PEER_THREADS} threads",
    "json_to_threads": f"JSON / DRF peer with {PEER_THREADS} threads",
    "small_to_threads": f"1,000 x 10 packed / DRF peer with {PEER_THREADS} threads",
    "small_to_asgi": "1,000 x 10 packed / through ASGI, validated together",
    "copy_to_peer": "limit: COPY BINARY / DRF peer, above which no path comes",
}
"""Ratios without a goal."""
PEER_IS = f"""The DRF peer: a ModelSerializer(many=True) of our 37 columns and bulk_create(ignore_conflicts) by a unique
request id; no middleware, authentication, signature or rollups. granian, one worker of one thread (a second one of
{PEER_THREADS} for comparison); {PEER_CLIENTS} clients, each sends {RECORDS} records of JSON once it was answered."""
ROOT = Path(__file__).resolve().parent.parent
# A start is not what is measured; a machine with much else to do may take minutes for it.
START_WITHIN_S = 240.0
DROP_WITHIN_S = 120.0


@contextlib.contextmanager
def benchmark_servers() -> Iterator[None]:
    """PostgreSQL and Redis of the environment, or throwaway ones, in DATABASE_URL and REDIS_URL."""
    with contextlib.ExitStack() as stack:
        if "DATABASE_URL" not in os.environ or "REDIS_URL" not in os.environ:
            from controlplane.embedded.throwaway import throwaway_servers

            own = stack.enter_context(throwaway_servers())
            os.environ.setdefault("DATABASE_URL", own.postgres.owner_dsn)
            os.environ.setdefault("REDIS_URL", own.valkey.url)
        yield


@contextlib.contextmanager
def benchmark_database(*, durable: bool = False) -> Iterator[str]:
    """The URL of an empty database, dropped afterwards; on a throwaway server commits reach the disk if `durable`."""
    with contextlib.ExitStack() as stack:
        url = own = os.environ.get("DATABASE_URL")
        if url is None:
            from controlplane.embedded.throwaway import throwaway_servers

            url = stack.enter_context(throwaway_servers(durable=durable)).postgres.owner_dsn
        name = f"flexband_benchmark_{os.getpid()}"
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(f"CREATE DATABASE {name}")
        try:
            yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
        finally:
            if own is not None:  # a throwaway server goes with all it holds
                with psycopg.connect(url, autocommit=True) as server:
                    _drop(server, name)


@contextlib.contextmanager
def benchmark_django(*, durable: bool = False, **settings: str) -> Iterator[str]:
    """Django on an empty database, whose URL this gives; `settings` are more of the environment's."""
    with benchmark_database(durable=durable) as url:
        os.environ |= {
            "DATABASE_URL": url,
            "FLEXBAND_AS_OWNER": "true",
            "FLEXBAND_LOG_LEVEL": "WARNING",
            "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
            **settings,
        }
        import django

        django.setup()
        yield url


def _drop(server: psycopg.Connection, name: str) -> None:
    deadline = time.monotonic() + DROP_WITHIN_S
    while True:
        try:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")
            return
        except psycopg.errors.InsufficientPrivilege:
            # a worker of autovacuum is in it: only a superuser may end that one
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@dataclass(frozen=True)
class Server:
    """A running application; its CPU time shows what a busy machine hides."""

    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Of the process and its children: granian's worker is one."""
        all_of_it = [self.process, *self.process.children(recursive=True)]
        return sum(times.user + times.system for times in (process.cpu_times() for process in all_of_it))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(application: str, environment: dict[str, str], *extra: str) -> Iterator[Server]:
    """A uvicorn process of one application."""
    command = [sys.executable, "-m", "uvicorn", application, "--loop", "uvloop", "--http", "httptools"]
    command += ["--no-access-log", "--log-level", "warning", *extra]
    with _running(application, command, environment) as running:
        yield running


@contextlib.contextmanager
def _running(application: str, command: list[str], environment: dict[str, str]) -> Iterator[Server]:
    """A server's process, told its address and port, from when it listens."""
    port = free_port()
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], cwd=ROOT, env={**os.environ, **environment}
    )
    try:
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{application} did not start within {START_WITHIN_S:.0f} s")
            time.sleep(0.1)
        yield Server(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()  # one that still serves would go on beside what is measured next
            process.wait(10)


@contextlib.contextmanager
def peer_server(threads: int) -> Iterator[Server | None]:
    """The DRF peer behind granian, one worker with so many threads; None where granian cannot be installed."""
    from benchmarks.agent_peers import environment

    found = environment("granian", ("granian",))
    if found is None:
        yield None
        return
    packages = next(found.glob("lib/python*/site-packages"))
    command = [sys.executable, "-m", "granian", "--interface", "wsgi", "--workers", "1", "--no-access-log"]
    command += ["--log-level", "error", "--blocking-threads", str(threads), "benchmarks.ingest_peer:application"]
    with _running("the DRF peer", command, {"PYTHONPATH": str(packages)}) as running:
        yield running


def raw_copy(url: str, payloads: list[bytes]) -> float:
    """Seconds to COPY BINARY prepared bytes into a table without any index, one transaction each."""
    with psycopg.connect(url) as connection:
        connection.execute("TRUNCATE benchmark_raw_record")
        connection.commit()
        began = time.perf_counter()
        for payload in payloads:
            with (
                connection.cursor() as cursor,
                cursor.copy("COPY benchmark_raw_record FROM STDIN (FORMAT BINARY)") as copy,
            ):
                copy.write(payload)
            connection.commit()
        return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer records, for a look")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--agents", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 5)
    with benchmark_django(durable=True) as url:
        table = measure(url, rounds, options.agents, 4 if options.quick else 10)
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    return 0 if all((table["ratios"][goal.name] or 0) >= goal.least for goal in GOALS) else 1


def prepare(url: str, agents: int):
    from django.core.management import call_command

    from benchmarks.ingest_fleet import build_fleet

    call_command("migrate", verbosity=0, skip_checks=True)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE benchmark_peer_record (LIKE usage_record, PRIMARY KEY (request_id))")
        connection.execute("CREATE TABLE benchmark_raw_record (LIKE usage_record)")
    return build_fleet(agents)


@dataclass
class Lane:
    """One way of sending in, round by round."""

    label: str
    records_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    client_us: list[float] = field(default_factory=list)
    database_us: list[float] = field(default_factory=list)
    ack_ms_p50: list[float] = field(default_factory=list)
    ack_ms_p99: list[float] = field(default_factory=list)

    def run(self, server: Server, requests: list[list[bytes]], records: int, *, keep: bool) -> None:
        """Sends requests, `records` in each; the first round of all (`keep` false) warms caches on both sides."""
        from benchmarks.http_load import run_load
        from benchmarks.ingest_fleet import ReportingConnection

        before = Cpu.now(server)
        load = run_load(server.port, requests, kind=ReportingConnection)
        if load.failures:
            raise SystemExit(f"{self.label}: {len(load.failures)} requests failed, the first: {load.failures[0]}")
        if keep:
            count = sum(map(len, requests)) * records
            spent = Cpu.now(server).since(before)
            self.records_per_s.append(count / load.seconds)
            self.cpu_us.append(spent.web_s / count * 1e6)
            self.client_us.append(spent.client_s / count * 1e6)
            if spent.database_s is not None:
                self.database_us.append(spent.database_s / count * 1e6)
            self.ack_ms_p50.append(load.percentile_ms(0.5))
            self.ack_ms_p99.append(load.percentile_ms(0.99))

    def summary(self) -> dict:
        return {
            "label": self.label,
            "records_per_s": statistics.median(self.records_per_s),
            "cpu_us_per_record": statistics.median(self.cpu_us),
            "client_us_per_record": statistics.median(self.client_us),
            "database_us_per_record": statistics.median(self.database_us) if self.database_us else None,
            "ack_ms_p50": statistics.median(self.ack_ms_p50),
            "ack_ms_p99": statistics.median(self.ack_ms_p99),
        }


def measure(url: str, rounds: int, agents: int, reports: int) -> dict:
    from benchmarks.ingest_fleet import peer_request, report_request, usage_rows
    from controlplane.usage.verification import verify

    fleet = prepare(url, max(agents, SMALL_AGENTS))
    large, small = fleet.agents[:agents], fleet.agents[:SMALL_AGENTS]
    # Rows are sent again with every lane and round, under new numbers of reports: making them takes far longer.
    rows = {agent.id: [usage_rows(fleet, agent, RECORDS) for _ in range(min(reports, 4))] for agent in large}
    few = {agent.id: usage_rows(fleet, agent, SMALL_RECORDS) for agent in small}
    batches = [rows[agent.id][number % len(rows[agent.id])] for agent in large for number in range(reports)]
    copies, copied = _copies(large, rows), sum(len(batch) for agent in large for batch in rows[agent.id])
    lanes = {
        "packed": Lane(f"packed, {agents} x {RECORDS}"),
        "json": Lane(f"JSON, {agents} x {RECORDS}"),
        "msgpack": Lane(f"MessagePack, {agents} x {RECORDS}"),
        "small": Lane(f"packed, {SMALL_AGENTS:,} x {SMALL_RECORDS}"),
        "asgi": Lane(f"packed through ASGI, {SMALL_AGENTS:,} x {SMALL_RECORDS}"),
        "eager": Lane(f"packed through ASGI, each validated, {SMALL_AGENTS:,} x {SMALL_RECORDS}"),
        "bare": Lane(f"packed without rollups, {agents} x {RECORDS}"),
        "peer": Lane("peer: DRF + bulk_create, granian, 1 thread, 8 x 200"),
        "threads": Lane(f"peer: DRF + bulk_create, granian, {PEER_THREADS} threads, 8 x 200"),
    }
    raw, bare_sent, sent, loads = [], 0, 0, []
    with (
        server("benchmarks.ingest_server:application", {}, *HTTP) as ours,
        server("benchmarks.ingest_server:application", {}) as asgi,
        server("benchmarks.ingest_server:application", {"BENCHMARK_EAGER": "1"}) as eager,
        server("benchmarks.ingest_server:application", {"BENCHMARK_WITHOUT_ROLLUPS": "1"}, *HTTP) as bare,
        peer_server(1) as peer,
        peer_server(PEER_THREADS) as threads,
    ):
        for number in range(rounds + 1):
            keep = number > 0
            for lane in ("packed", "json", "msgpack"):
                requests = [
                    [report_request(agent, rows[agent.id][at % len(rows[agent.id])], lane) for at in range(reports)]
                    for agent in large
                ]
                lanes[lane].run(ours, requests, RECORDS, keep=keep)
                sent += len(batches) * RECORDS
                if lane == "packed":
                    requests = [
                        [report_request(agent, rows[agent.id][at % len(rows[agent.id])], lane) for at in range(reports)]
                        for agent in large
                    ]
                    lanes["bare"].run(bare, requests, RECORDS, keep=keep)
                    bare_sent += len(batches) * RECORDS
                    seconds = raw_copy(url, copies)
            for lane, way in (("small", ours), ("asgi", asgi), ("eager", eager)):
                requests = [[report_request(agent, few[agent.id], "packed") for _ in range(reports)] for agent in small]
                lanes[lane].run(way, requests, SMALL_RECORDS, keep=keep)
                sent += sum(map(len, requests)) * SMALL_RECORDS
            for lane, way in (("peer", peer), ("threads", threads)):
                if way is not None:
                    requests = [
                        [peer_request(agent, usage_rows(fleet, agent, RECORDS)) for _ in range(max(1, reports // 2))]
                        for agent in large[:PEER_CLIENTS]
                    ]
                    lanes[lane].run(way, requests, RECORDS, keep=keep)
            if keep:
                raw.append(copied / seconds)
                loads.append(os.getloadavg()[0])
    _check_stored(verify(), sent, bare_sent)
    with psycopg.connect(url) as connection:
        server_version = connection.info.server_version
    return {
        "lanes": {name: lane.summary() for name, lane in lanes.items() if lane.records_per_s},
        "copy_binary_rows_per_s": statistics.median(raw),
        "ratios": {
            "packed_to_copy": _ratio(lanes["packed"].records_per_s, raw),
            "json_to_copy": _ratio(lanes["json"].records_per_s, raw),
            "packed_to_peer": _ratio(lanes["packed"].records_per_s, lanes["peer"].records_per_s),
            "json_to_peer": _ratio(lanes["json"].records_per_s, lanes["peer"].records_per_s),
            "small_to_peer": _ratio(lanes["small"].records_per_s, lanes["peer"].records_per_s),
            "packed_to_threads": _ratio(lanes["packed"].records_per_s, lanes["threads"].records_per_s),
            "json_to_threads": _ratio(lanes["json"].records_per_s, lanes["threads"].records_per_s),
            "small_to_threads": _ratio(lanes["small"].records_per_s, lanes["threads"].records_per_s),
            "small_to_asgi": _ratio(lanes["small"].records_per_s, lanes["asgi"].records_per_s),
            "small_to_eager": _ratio(lanes["small"].records_per_s, lanes["eager"].records_per_s),
            "rollups": _ratio(lanes["packed"].records_per_s, lanes["bare"].records_per_s),
            "copy_to_peer": _ratio(raw, lanes["peer"].records_per_s),
        },
        "signature_us": _signature_us(small[0], few[small[0].id]),
        "rounds": rounds,
        "records_verified": sent,
        "load": (min(loads), max(loads)),
        "versions": {
            "python": platform.python_version(),
            "postgresql": f"{server_version // 10000}.{server_version % 10000}",
            **{
                name: version(name)
                for name in ("django", "djangorestframework", "psycopg", "msgspec", "numpy", "uvicorn")
            },
        },
    }


def _copies(agents, rows) -> list[bytes]:
    """The bytes of COPY BINARY of all rows, 5,000 in each."""
    from msgspec.structs import astuple

    from controlplane.usage.records import Origin, to_columns, to_copy

    payloads = [
        (Origin(agent.id, agent.pool_id), [astuple(row) for row in batch])
        for agent in agents
        for batch in rows[agent.id]
    ]
    now_us = time.time_ns() // 1000
    return [bytes(to_copy(to_columns(payloads[at : at + 25]), now_us)) for at in range(0, len(payloads), 25)]


def _signature_us(agent, rows) -> float:
    """CPU of verifying the signature of one small report, in microseconds: what no design of the rest takes away."""
    from benchmarks.ingest_fleet import report_body
    from controlplane.wire import signing

    message = signing.request_message(
        method="POST", path="/", body=report_body(agent, rows, "packed")[0], epoch=1, stamp=1
    )
    signature, public = signing.sign(agent.key, message), agent.key.public_key().public_bytes_raw()
    began = time.process_time()
    for _ in range(SIGNATURES):
        signing.verify(public, signature, message)
    return (time.process_time() - began) / SIGNATURES * 1e6


def _ratio(ours: list[float], theirs: list[float]) -> float | None:
    """Of each round; None without a peer."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if theirs else None


def _check_stored(checked, sent: int, bare_sent: int) -> None:
    """What was stored without rollups is the only difference between records and rollups."""
    missing = sum(row.rebuilt - row.stored for row in checked.differences if row.column == "requests")
    if checked.records != sent + bare_sent or missing != bare_sent:
        raise SystemExit(
            f"{checked.records} records are stored of {sent + bare_sent} sent, {missing} of them without rollups"
            f" instead of {bare_sent}"
        )


def _bound(table: dict) -> list[str]:
    """What bounds small reports, where the CPU of PostgreSQL and of the peer is known."""
    small, peer = table["lanes"]["small"], table["lanes"].get("peer")
    if peer is None or peer["database_us_per_record"] is None:
        return []
    names = ("client_us_per_record", "cpu_us_per_record", "database_us_per_record")
    cost = ReportCost(SMALL_RECORDS, *(small[name] * SMALL_RECORDS for name in names), table["signature_us"])
    return cost.lines(peer["cpu_us_per_record"] + peer["database_us_per_record"], SMALL_GOAL)


def print_table(table: dict) -> None:
    versions = " ".join(f"{name} {number}" for name, number in table["versions"].items())
    print(f"Usage ingest, HTTP to commit, {table['rounds']} interleaved rounds, medians")
    print(versions)
    print(f"{'path':<58}{'records/s':>12}{'web us/rec':>12}{'database':>10}{'client':>8}{'ack p50 ms':>12}{'p99':>8}")
    for lane in table["lanes"].values():
        database_us = lane["database_us_per_record"]
        print(f"{lane['label']:<58}{lane['records_per_s']:>12,.0f}{lane['cpu_us_per_record']:>12.1f}"
              f"{'-' if database_us is None else f'{database_us:.1f}':>10}{lane['client_us_per_record']:>8.1f}"
              f"{lane['ack_ms_p50']:>12.0f}{lane['ack_ms_p99']:>8.0f}")  # fmt: skip
    limit = "limit: COPY BINARY, prepared bytes, no index, 5,000 a commit"
    print(f"{limit:<58}{table['copy_binary_rows_per_s']:>12,.0f}")
    for goal in GOALS:
        ratio = table["ratios"][goal.name]
        if ratio is None:
            print(f"{goal.text:<58}peer missing")
            continue
        verdict = "met" if ratio >= goal.least else "MISSED"
        print(f"{goal.text:<58}{ratio:>12.2f}  goal >= {goal.least:g}: {verdict}")
    for name, text in BESIDE.items():
        if table["ratios"][name] is not None:
            print(f"{text:<58}{table['ratios'][name]:>12.2f}")
    for line in _bound(table):
        print(line)
    print(PEER_IS)
    print(f"{table['records_verified']:,} records verified against their rollups; us of CPU; load of "
          f"this machine {table['load'][0]:.1f} to {table['load'][1]:.1f} on {os.cpu_count()} cores")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
