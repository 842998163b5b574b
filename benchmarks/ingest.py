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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psutil
import psycopg

RECORDS = 200
GOAL_PEER, AIM_PEER = 20.0, 40.0
ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def benchmark_database() -> Iterator[str]:
    """The URL of an empty database, dropped afterwards."""
    with contextlib.ExitStack() as stack:
        url = os.environ.get("DATABASE_URL")
        if url is None:
            from controlplane.embedded.throwaway import throwaway_servers

            url = stack.enter_context(throwaway_servers()).postgres.owner_dsn
        name = f"flexband_benchmark_{os.getpid()}"
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(f"CREATE DATABASE {name}")
        try:
            yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
        finally:
            with psycopg.connect(url, autocommit=True) as server:
                server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@dataclass(frozen=True)
class Server:
    """A running application; its CPU time shows what a busy machine hides."""

    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(application: str, environment: dict[str, str], *extra: str) -> Iterator[Server]:
    """A uvicorn process of one application."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", application, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning", *extra]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{application} did not start")
            time.sleep(0.1)
        yield Server(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(10)


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
    with benchmark_database() as url:
        os.environ |= {
            "DATABASE_URL": url,
            "BENCH_DATABASE_URL": url,
            "FLEXBAND_AS_OWNER": "true",
            "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
        }
        import django

        django.setup()
        table = measure(url, rounds, options.agents, 4 if options.quick else 10)
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    return 0 if table["ratio_to_peer"] >= GOAL_PEER else 1


def prepare(url: str, agents: int):
    from django.core.management import call_command

    from benchmarks.ingest_fleet import build_fleet

    call_command("migrate", verbosity=0, skip_checks=True)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE benchmark_peer_record (LIKE usage_record, PRIMARY KEY (request_id))")
        connection.execute("CREATE TABLE benchmark_raw_record (LIKE usage_record)")
    return build_fleet(agents)


def measure(url: str, rounds: int, agents: int, reports: int) -> dict:
    from benchmarks.http_load import run_load
    from benchmarks.ingest_fleet import peer_request, report_request, usage_rows
    from controlplane.usage.records import Origin, to_columns, to_copy
    from controlplane.usage.verification import verify

    fleet = prepare(url, agents)
    ours, peer, raw, latencies, cpu, sent = [], [], [], [], [], 0
    with (
        server("benchmarks.ingest_server:application", {}) as our_server,
        server("benchmarks.ingest_peer:application", {}, "--interface", "wsgi") as peer_server,
    ):
        for number in range(rounds + 1):
            requests, payloads = [], []
            for agent in fleet.agents:
                batches = [usage_rows(fleet, agent, RECORDS) for _ in range(reports)]
                requests.append([report_request(agent, rows) for rows in batches])
                payloads += [
                    (Origin(agent.id, agent.pool_id), [tuple(getattr(r, f) for f in r.__struct_fields__) for r in rows])
                    for rows in batches
                ]
            copies = [
                to_copy(to_columns(payloads[at : at + 25]), time.time_ns() // 1000)
                for at in range(0, len(payloads), 25)
            ]
            peer_requests = [
                [peer_request(agent, usage_rows(fleet, agent, RECORDS)) for _ in range(max(1, reports // 2))]
                for agent in fleet.agents[:8]
            ]
            count = agents * reports * RECORDS
            sent += count
            peer_count = sum(map(len, peer_requests)) * RECORDS
            before = our_server.cpu_s(), peer_server.cpu_s()
            load = run_load(our_server.port, requests)
            peer_load = run_load(peer_server.port, peer_requests)
            after = our_server.cpu_s(), peer_server.cpu_s()
            seconds = raw_copy(url, copies)
            for failures in (load.failures, peer_load.failures):
                if failures:
                    raise SystemExit(f"{len(failures)} requests failed, the first: {failures[0]}")
            if number == 0:
                continue  # the first round warms caches and connections on both sides
            ours.append(count / load.seconds)
            peer.append(peer_count / peer_load.seconds)
            cpu.append(((after[0] - before[0]) / count * 1e6, (after[1] - before[1]) / peer_count * 1e6))
            raw.append(count / seconds)
            latencies.append((load.percentile_ms(0.5), load.percentile_ms(0.99)))
    checked = verify()
    if checked.records != sent or checked.differences:
        raise SystemExit(f"{checked.records} of {sent} records stored, {len(checked.differences)} rollup differences")
    with psycopg.connect(url) as connection:
        server_version = connection.info.server_version
    return {
        "records_per_s": statistics.median(ours),
        "peer_records_per_s": statistics.median(peer),
        "copy_binary_rows_per_s": statistics.median(raw),
        "ratio_to_peer": statistics.median(a / b for a, b in zip(ours, peer)),
        "ratio_to_copy": statistics.median(a / b for a, b in zip(ours, raw)),
        "ack_ms_p50": statistics.median(p50 for p50, _ in latencies),
        "ack_ms_p99": statistics.median(p99 for _, p99 in latencies),
        "server_cpu_us_per_record": statistics.median(mine for mine, _ in cpu),
        "peer_cpu_us_per_record": statistics.median(theirs for _, theirs in cpu),
        "rounds": rounds,
        "agents": agents,
        "records_per_report": RECORDS,
        "records_verified": sent,
        "versions": {
            "python": platform.python_version(),
            "postgresql": f"{server_version // 10000}.{server_version % 10000}",
            **{
                name: version(name)
                for name in ("django", "djangorestframework", "psycopg", "msgspec", "numpy", "uvicorn")
            },
        },
    }


def print_table(table: dict) -> None:
    versions = " ".join(f"{name} {number}" for name, number in table["versions"].items())
    print(f"Usage ingest, HTTP to commit: {table['agents']} agents x {table['records_per_report']} records, "
          f"{table['rounds']} interleaved rounds, medians")  # fmt: skip
    print(versions)
    print(f"{'path':<52}{'records/s':>14}{'ratio':>10}  goal")
    print(f"{'reports -> one transaction with rollups':<52}{table['records_per_s']:>14,.0f}{'1.00':>10}")
    verdict = "met" if table["ratio_to_peer"] >= GOAL_PEER else "MISSED"
    print(f"{'peer: DRF ModelSerializer(many) + bulk_create':<52}{table['peer_records_per_s']:>14,.0f}"
          f"{table['ratio_to_peer']:>9.1f}x  >= {GOAL_PEER:.0f}x (aim {AIM_PEER:.0f}x): {verdict}")  # fmt: skip
    print(f"{'limit: COPY BINARY, prepared bytes, no index':<52}{table['copy_binary_rows_per_s']:>14,.0f}"
          f"{table['ratio_to_copy']:>10.2f}")  # fmt: skip
    print(f"acknowledged after commit: p50 {table['ack_ms_p50']:.0f} ms, p99 {table['ack_ms_p99']:.0f} ms; "
          f"{table['records_verified']:,} records verified against their rollups")  # fmt: skip
    print(f"CPU of the web process: {table['server_cpu_us_per_record']:.1f} us/record, the peer's "
          f"{table['peer_cpu_us_per_record']:.0f} us/record; load of this machine {os.getloadavg()[0]:.1f} on "
          f"{os.cpu_count()} cores")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
