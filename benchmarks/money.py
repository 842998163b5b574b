"""A month's statement from day rollups and its audit over Parquet, beside the same from raw records in SQL; and bytes.

    python -m benchmarks.money [--quick] [--records N] [--rounds N] [--json FILE]

Records of 28 days go through the code that stores reports, deltas are folded, each day is written as a retired day is.
Uses a database of its own on the server of `DATABASE_URL`, or on a throwaway server. Exit 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.ingest import benchmark_django

GOAL_STATEMENT, GOAL_AUDIT, GOAL_BYTES = 50.0, 5.0, 60.0
DAYS, CHUNK = 28, 20_000
FIRST = datetime(2026, 9, 1, tzinfo=UTC)
CHARGES = ("charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "charge_gpu_nanos")
SUMS = ("prompt_tokens", "cached_tokens", "output_tokens", "gpu_us", *CHARGES)
BY = ("tenant_id", "class_id", "model_id", "pool_id", "rate_version")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer records, for a look")
    parser.add_argument("--records", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records = options.records or (DAYS * 2 * CHUNK if options.quick else DAYS * 8 * CHUNK)
    with tempfile.TemporaryDirectory() as archive, benchmark_django(FLEXBAND_USAGE_ARCHIVE=archive):
        table = measure(records, options.rounds or (3 if options.quick else 5))
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    met = table["statement"] >= GOAL_STATEMENT and table["audit"] >= GOAL_AUDIT
    return 0 if met and table["file_bytes_per_record"] <= GOAL_BYTES else 1


def measure(records: int, rounds: int) -> dict:
    import duckdb
    from django.db import connection

    from controlplane.ledger.queries import charges
    from controlplane.usage import retirement
    from controlplane.usage.rollups import fold
    from controlplane.usage.verification import verify

    stored = fill(max(1, records // (DAYS * CHUNK)))
    until = FIRST + timedelta(days=DAYS)
    fold(until + timedelta(days=1))
    days = [(FIRST + timedelta(days=number)).date() for number in range(DAYS)]
    written = [retirement._write(day, until) for day in days]
    files = [str(retirement.archive() / day.path) for day in written]
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
    # open before the clock starts, as the database's connection is
    reader = duckdb.connect(":memory:")
    ways: dict[str, Callable[[], Any]] = {
        "raw": lambda: raw_sums(until),
        "statement": lambda: charges(FIRST, until),
        "audit": lambda: file_sums(reader, files),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            answers[name] = way()
            if number:
                seconds[name].append(time.perf_counter() - began)
    billed = sum(row.nanos for row in answers["statement"])
    difference = {
        "statement": billed - sum(sum(row[-len(CHARGES) :]) for row in answers["raw"]),
        "audit": sum(a != b for a, b in zip(answers["audit"], answers["raw"], strict=True)),
    }
    for day in days:
        retirement.retire_day(day, until)
    began = time.perf_counter()
    checked = verify(FIRST, FIRST + timedelta(days=2))
    if any(difference.values()) or checked.differences or not checked.records:
        raise SystemExit(f"differences: {difference}, after retiring {len(checked.differences)}")
    return {
        "records": stored,
        "rounds": rounds,
        **{f"{name}_s": statistics.median(spent) for name, spent in seconds.items()},
        "statement": _ratio(seconds["raw"], seconds["statement"]),
        "audit": _ratio(seconds["raw"], seconds["audit"]),
        "billed_nanos": billed,
        "file_bytes_per_record": sum(day.file_bytes for day in written) / stored,
        "table_bytes_per_record": sum(day.table_bytes for day in written) / stored,
        "verified_after": checked.records,
        "verify_s": time.perf_counter() - began,
        "load": os.getloadavg()[0],
        "versions": {"postgresql": _server_version(), "duckdb": version("duckdb"), "numpy": version("numpy")},
    }


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def _server_version() -> str:
    from django.db import connection

    return f"{connection.pg_version // 10000}.{connection.pg_version % 10000}"


def fill(chunks_a_day: int) -> int:
    """Stores records of every day as reports do, `CHUNK` at a time; returns how many."""
    from django.core.management import call_command
    from django.db import connection, transaction

    from benchmarks.ingest_fleet import build_fleet
    from controlplane.usage.ingest import store_records
    from controlplane.usage.partitions import create_days

    call_command("migrate", verbosity=0, skip_checks=True)
    fleet = build_fleet(64)
    with connection.cursor() as cursor:
        create_days(cursor, [(FIRST + timedelta(days=number)).date() for number in range(DAYS)])
    for number in range(DAYS * chunks_a_day):
        day, part = divmod(number, chunks_a_day)
        at = FIRST + timedelta(days=day, hours=1 + part * 22 / chunks_a_day)
        with transaction.atomic(), connection.cursor() as cursor:
            store_records(cursor.cursor, month_records(fleet, at, number), at + timedelta(minutes=2))
    return DAYS * chunks_a_day * CHUNK


def month_records(fleet, at: datetime, seed: int):
    """Records that ended within two minutes: long-tailed tokens and waits, a tenth of the tenants at a time."""
    import numpy as np

    from controlplane.core.period import to_us
    from controlplane.usage.records import INTEGERS, Records
    from controlplane.wire.report import FLAG_STREAMED

    rng = np.random.default_rng(seed)
    n = CHUNK
    agents = rng.integers(0, len(fleet.agents), n)
    prompt = np.minimum(rng.lognormal(6.5, 1.2, n), 32_000).astype(np.int64) + 1
    output = np.minimum(rng.lognormal(5, 1, n), 8_192).astype(np.int64) + 1
    cached = (prompt * rng.random(n)).astype(np.int64)
    queue, prefill = rng.lognormal(9, 2, n).astype(np.int64), rng.lognormal(11.5, 0.8, n).astype(np.int64)
    decode = output * rng.integers(8_000, 30_000, n)
    ended = to_us(at) + np.sort(rng.integers(0, 120_000_000, n))
    prices = fleet.prices
    numbers = dict.fromkeys(INTEGERS, np.zeros(n, dtype=np.int64)) | {
        "arrived_us": ended - queue - prefill - decode,
        "ended_us": ended,
        "attempt": np.ones(n, dtype=np.int64),
        "slot_id": np.array([agent.slot_id for agent in fleet.agents])[agents],
        "tenant_id": np.array(fleet.tenants)[np.minimum(rng.zipf(1.3, n), len(fleet.tenants) // 10) - 1],
        "key_id": rng.integers(1, 40, n),
        "class_id": np.full(n, fleet.chat),
        "asked_class_id": np.full(n, fleet.chat),
        "model_id": np.full(n, fleet.model),
        "rate_version": np.full(n, prices.rate_version),
        "outcome": np.ones(n, dtype=np.int64),
        "status": np.full(n, 200),
        "flags": np.full(n, FLAG_STREAMED),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "admission_us": rng.integers(40, 400, n),
        "queue_us": queue,
        "preprocess_us": rng.integers(500, 2_000, n),
        "prefill_us": prefill,
        "decode_us": decode,
        "return_us": rng.integers(50, 90, n),
        "ttft_us": queue + prefill,
        "gpu_us": decode // 8,
        "estimated_gpu_us": decode // 9,
        "charge_prompt_nanos": (prompt - cached) * prices.prompt_nanos_per_mtok // 1_000_000,
        "charge_cached_nanos": cached * prices.cached_nanos_per_mtok // 1_000_000,
        "charge_output_nanos": output * prices.output_nanos_per_mtok // 1_000_000,
    }
    ids = rng.integers(0, 256, (n, 16), dtype=np.uint8)
    ids[:, :6] = (numbers["arrived_us"] // 1_000).astype(">u8").view(np.uint8).reshape(n, 8)[:, 2:]
    ids[:, 6], ids[:, 8] = ids[:, 6] & 0x0F | 0x70, ids[:, 8] & 0x3F | 0x80
    return Records(
        request_ids=ids,
        integers=np.stack([numbers[name] for name in INTEGERS]).astype(np.int64),
        jobs=[""] * n,
        client_ids=[""] * n,
        source=np.zeros(n, dtype=np.int64),
        agent_ids=np.array([agent.id for agent in fleet.agents])[agents],
        pool_ids=np.array([agent.pool_id for agent in fleet.agents])[agents],
        job_ids=np.zeros(n, dtype=np.int64),
    )


def raw_sums(until: datetime) -> list[tuple[int, ...]]:
    """The month by tenant, class, model, pool and rate card, from the records in the database."""
    from django.db import connection

    names, sums = ", ".join(BY), ", ".join(f"sum({name})::bigint" for name in SUMS)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {names}, count(*), {sums} FROM usage_record WHERE ended_at >= %s AND ended_at < %s"
            f" GROUP BY {names} ORDER BY {names}",
            [FIRST, until],
        )
        return cursor.fetchall()


def file_sums(reader: Any, files: list[str]) -> list[tuple[int, ...]]:
    """The same from the Parquet files, by a connection of DuckDB."""
    names, sums = ", ".join(BY), ", ".join(f"sum({name})" for name in SUMS)
    return reader.execute(
        f"SELECT {names}, count(*), {sums} FROM read_parquet(?) GROUP BY {names} ORDER BY {names}", [files]
    ).fetchall()


def print_table(table: dict) -> None:
    print(f"A month of {table['records']:,} records over {DAYS} days, {table['rounds']} interleaved rounds, medians; "
          f"load of this machine {table['load']:.1f} on {os.cpu_count()} cores")  # fmt: skip
    print(" ".join(f"{name} {number}" for name, number in table["versions"].items()))
    print(f"{'way':<58}{'ms':>10}{'times raw':>12}  goal")
    print(f"{'raw records in SQL, grouped':<58}{table['raw_s'] * 1000:>10,.1f}{1:>12.1f}")
    for name, label, least in (
        ("statement", "P13 statement: charges from day rollups", GOAL_STATEMENT),
        ("audit", "P13 audit: recomputed over Parquet (DuckDB)", GOAL_AUDIT),
    ):
        verdict = "met" if table[name] >= least else "MISSED"
        print(f"{label:<58}{table[f'{name}_s'] * 1000:>10,.1f}{table[name]:>12.1f}  >= {least:g}: {verdict}")
    kept = table["file_bytes_per_record"]
    verdict = "met" if kept <= GOAL_BYTES else "MISSED"
    print(f"{'P14 bytes of a retired record':<58}{kept:>10.1f}{'':>12}  <= {GOAL_BYTES:g}: {verdict}; "
          f"{table['table_bytes_per_record']:.0f} in the table")  # fmt: skip
    print(f"differences: 0 nanos of {table['billed_nanos']:,}; {table['verified_after']:,} retired records verified "
          f"against their rollups in {table['verify_s']:.1f} s")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
