"""One tick of many pools, durable and all, beside a loop that does the same through the ORM pool by pool.

    python -m benchmarks.controller [--quick] [--pools N] [--ticks N] [--no-large] [--no-peer] [--json FILE]

Uses a database of its own on the server of `DATABASE_URL`, or on a throwaway server whose commits reach the disk. Each
pool has eight slots on one agent whose report has 40 wait buckets, a running job, and both flex slots lent. Agents
report every second or two, so before each tick every agent has reported anew, with other figures; four kinds of ticks
are measured:

- reports: nothing but these; each pool writes its sample, each loan is renewed, one pool in sixty writes its row;
- jobs too: items of every job have completed since;
- a tenth decides: besides, a check flips in one pool of ten, which writes a decision with its evidence;
- everything decides: every pool writes a decision with its evidence, as in the first minute of a new leader.

The goals are for ticks of which a tenth decides: 20 ms for a thousand pools, 250 ms for twenty thousand, in all but one
of a hundred ticks, and a hundredth of the ORM's time. Exit 1 when one of them is missed. Beside them stands the least
that such a tick can take on this machine: what agents and jobs say copied out of their tables as bytes, and the tick's
own samples and decisions copied as bytes into tables with the same indexes, on disk; nothing is decoded or decided.
Twenty thousand pools are a run of their own of few ticks, unless --no-large, --quick or --pools is given; it takes some
minutes and 2 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timedelta
from multiprocessing import get_context
from pathlib import Path

import msgspec

from benchmarks.ingest import benchmark_database

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
os.environ.setdefault("FLEXBAND_SECRET_KEY", "benchmark")

GOAL_MS_PER_1000_POOLS = 20.0
GOAL_MS_PER_20000_POOLS = 250.0
GOAL_RATIO = 100.0
LARGE, LARGE_TICKS = 20_000, 5
KINDS = {
    "reports": "every agent reported",
    "jobs": "the same, and every job went on",
    "tenth": "the same, and a tenth decides",
    "all": "every pool decides",
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer pools and ticks, for a look")
    options.add_argument("--pools", type=int, default=0)
    options.add_argument("--ticks", type=int, default=0, help="of each kind")
    options.add_argument("--no-large", action="store_true", help="without the twenty thousand pools")
    options.add_argument("--no-peer", action="store_true", help="without the ORM's loop, which takes seconds a tick")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    pools, ticks = given.pools or (100 if given.quick else 1_000), given.ticks or (3 if given.quick else 20)
    tables = [measure(pools, ticks, 0 if given.no_peer else 1 if given.quick else 2)]
    print_table(tables[0])
    if not (given.no_large or given.quick or given.pools):
        # A connection is to one database: the other run has a process of its own.
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            tables.append(other.submit(measure, LARGE, LARGE_TICKS, 0).result())
        print_table(tables[1])
    if given.json:
        given.json.write_text(json.dumps(tables, indent=1))
    return 0 if all(map(meets_goals, tables)) else 1


def measure(pools: int, ticks: int, peer_ticks: int) -> dict:
    """Everything of one size, on a database of its own."""
    with benchmark_database(durable=True) as url:
        os.environ |= {"DATABASE_URL": url, "FLEXBAND_AS_OWNER": "true", "FLEXBAND_LOG_LEVEL": "WARNING"}
        import django

        django.setup()
        from django.core.management import call_command
        from django.db import connection

        call_command("migrate", verbosity=0)
        now = build(pools)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
            cursor.execute("SHOW fsync")
            fsync = cursor.fetchone()[0]
        found, tenth_at = ours(now, ticks)
        table = {"pools": pools, "fsync": fsync, "ticks": found, "limit": limit(tenth_at)}
        if peer_ticks:
            table["orm_loop_ms"] = peer(now, peer_ticks)
            table["ratio"] = table["orm_loop_ms"] / table["ticks"]["tenth"]["ms"]
        return table


def goal_ms(pools: int) -> float:
    """Between the two goals in proportion."""
    small, large = GOAL_MS_PER_1000_POOLS, GOAL_MS_PER_20000_POOLS
    return small * pools / 1_000 if pools <= 1_000 else small + (large - small) * (pools - 1_000) / 19_000


def meets_goals(table: dict) -> bool:
    fits = table["ticks"]["tenth"]["p99_ms"] <= goal_ms(table["pools"])
    return fits and table.get("ratio", GOAL_RATIO) >= GOAL_RATIO


def print_table(table: dict) -> None:
    print(f"Controller: {table['pools']:,} pools of 8 slots, 2 of them lent, fsync {table['fsync']}; one tick, in ms")
    print(f"{'':<32}{'':>9}{'':>9}{'CPU':>9}   of which{'':>18}{'database':>9}{'short':>8}")
    print(
        f"{'':<32}{'median':>9}{'p99':>9}{'in all':>9}{'reading':>9}{'deciding':>9}{'writing':>9}{'CPU':>9}{'ticks':>8}"
    )
    for kind, words in KINDS.items():
        row = table["ticks"][kind]
        names = ("ms", "p99_ms", "cpu_ms", "read_cpu_ms", "decide_cpu_ms", "write_cpu_ms", "database_cpu_ms")
        print(f"{words:<32}" + "".join(f"{row[name]:>9.1f}" for name in names) + f"{row['short']:>8,.0f}")
    print(f"goal for a tenth: p99 at most {goal_ms(table['pools']):,.0f} ms")
    least, tenth = table["limit"], table["ticks"]["tenth"]
    print(
        f"limit: its {least['read_bytes'] / 1e6:.2f} MB read and {least['written_bytes'] / 1e6:.2f} MB written by COPY"
        f" BINARY: {least['read_ms']:.1f} + {least['write_ms']:.1f} ms, the database's CPU"
        f" {least['database_cpu_ms']:.1f} ms; a tick takes {tenth['ms'] / (least['read_ms'] + least['write_ms']):.1f}"
        " times that"
    )
    if "ratio" in table:
        peer_ms, tenth, everything = table["orm_loop_ms"], table["ticks"]["tenth"]["ms"], table["ticks"]["all"]["ms"]
        print(
            f"peer: ORM, pool by pool, every pool decides: {peer_ms:,.0f} ms, {peer_ms / tenth:.1f} times a tick of"
            f" which a tenth decides (goal {GOAL_RATIO:.0f}), {peer_ms / everything:.1f} times one that decides all"
        )


def build(pools: int):
    """Rows of the fleet; returns the instant of its reports."""
    from controlplane.contracts.models import WorkloadClass
    from controlplane.fleet.models import Agent, AgentLive, Pool, ServedModel, Slot, SlotTenure
    from controlplane.flex.telemetry import database_now
    from controlplane.jobs.models import Job
    from controlplane.tenants.models import Installation, Tenant

    now = database_now()
    Installation.objects.create(pk=1, name="benchmark")
    times = {"created_at": now, "updated_at": now}
    chat = WorkloadClass.objects.create(slug="chat", name="chat", kind="interactive", **times)
    bulk = WorkloadClass.objects.create(slug="bulk", name="bulk", kind="batch", retry_safe=True, **times)
    tenant = Tenant.objects.create(slug="acme", name="acme", **times)
    model = ServedModel.objects.create(name="m")
    rows = Pool.objects.bulk_create(
        Pool(
            slug=f"p{n}", name=f"p{n}", model=model, gpu_type="H100", interactive_class="chat", batch_class="bulk",
            safe_rate={"entries": {"4": 16.0, "5": 20.0, "6": 24.0}}, decision_interval_s=1,
            # Their holds are over before anything is measured. Loans begin in five seconds, as pools have traffic of
            # their own: begun in one, all would be renewed in one ever after.
            lend_hold_s=2 + n % 5, min_hold_s=2, return_hold_s=2, **times,
        )
        for n in range(pools)
    )  # fmt: skip
    agents = Agent.objects.bulk_create(
        Agent(name=f"a{pool.pk}", pool=pool, state="active", public_key=b"\0" * 32, enrolled_at=now) for pool in rows
    )
    bands = ["interactive"] * 4 + ["batch"] * 2 + ["flex"] * 2
    slots = Slot.objects.bulk_create(
        Slot(pool=pool, agent=agent, name=f"s{at}", band=band)
        for pool, agent in zip(rows, agents, strict=True)
        for at, band in enumerate(bands)
    )
    SlotTenure.objects.bulk_create(SlotTenure(slot=slot, started_at=now - timedelta(minutes=1)) for slot in slots)
    by_agent: dict[int, list[Slot]] = {}
    for slot in slots:
        by_agent.setdefault(slot.agent_id, []).append(slot)
    AgentLive.objects.bulk_create(
        AgentLive(agent=agent, epoch=1, seq=1, reported_at=now, figures=figures(by_agent[agent.pk], chat.pk))
        for agent in agents
    )
    Job.objects.bulk_create(
        Job(
            tenant=tenant, workload_class=bulk, pool=pool, items=64_000, prompt_tokens=1_000,
            expected_output_tokens=200, created_by="benchmark", created_at=now, deadline=now + timedelta(hours=4),
            # Enough is learnt of each: else all would know better in one tick, and all decide.
            items_completed=1_000, gpu_us_done=1_050_000_000,
        )
        for pool in rows
    )  # fmt: skip
    return now


def figures(slots, chat_id: int, variant: int = 0) -> dict:
    """What an agent says. Between variants under 10 no check flips; from 10 on one slot less would be too few."""
    said = [
        {"slot_id": slot.pk, "state": "ready", "flex": "home", "fence": 0, "running": 2 + variant % 3,
         "running_batch": variant % 3, "running_batch_gpu_us": variant % 3 * 700_000 if slot.band == "flex" else 0,
         "free_kv_tokens": 1_000 + variant, "total_kv_tokens": 2_000}
        for slot in slots
    ]  # fmt: skip
    waits = [[index, 10 + variant % 5] for index in range(160 + variant % 2, 200 + variant % 2)]
    rate = 7.0 + variant % 10 / 8 + (2.0 if variant >= 10 else 0.0)
    chat = {
        "class_id": chat_id, "depth": 3, "oldest_age_us": 20_000, "running": 8, "head_request_id": "",
        "head_reason": "", "arrivals_per_s": rate, "departures_per_s": rate, "admitted_per_s_60s": rate,
        "residence_mean_us": 900_000,
        "present_mean": 9.5, "departures": 400, "refused_60s": {}, "wait_60s": waits, "ttft_60s": waits,
    }  # fmt: skip
    return {"at_us": 0, "slots": said, "tenants": [], "classes": [chat]}


def variants_of(pools: int) -> int:
    """How many kinds of reports there are of each agent: two are different enough, where many would fill the disk."""
    return 6 if pools <= 5_000 else 2


def prepare_reports(variants: int) -> None:
    """Reports of all agents in a few variants, so that telling one costs no time of this process."""
    from django.db import connection

    from controlplane.contracts.models import WorkloadClass
    from controlplane.fleet import band_report
    from controlplane.fleet.models import Slot
    from controlplane.wire.report import LiveFigures

    chat_id = WorkloadClass.objects.get(slug="chat").pk
    by_agent: dict[int, list] = {}
    for slot in Slot.objects.order_by("pk"):
        by_agent.setdefault(slot.agent_id, []).append(slot)
    rows = [
        (agent_id, variant, json.dumps(said), band_report.pack(msgspec.convert(said, LiveFigures)))
        for agent_id, slots in by_agent.items()
        for variant in (*range(variants), *range(10, 10 + variants))
        for said in (figures(slots, chat_id, variant),)
    ]
    with connection.cursor() as cursor:
        cursor.execute("CREATE UNLOGGED TABLE bench_report (agent_id int, variant int, figures jsonb, band bytea)")
        with cursor.copy("COPY bench_report FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        cursor.execute("CREATE INDEX ON bench_report (variant, agent_id)")
        cursor.execute("ANALYZE bench_report")


def report(now, variant: int, busy=()) -> None:
    """Every agent reports; those whose remainder by ten is in `busy` have too much load for one slot less."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE fleet_agentlive l SET
                reported_at = %s, seq = l.seq + 1, figures = r.figures, band = r.band, band_epoch = l.epoch,
                band_seq = l.seq + 1
            FROM bench_report r
            WHERE r.agent_id = l.agent_id
              AND r.variant = %s + CASE WHEN l.agent_id %% 10 = ANY(%s::int[]) THEN 10 ELSE 0 END
            """,
            (now, variant, list(busy)),
        )


def progress() -> None:
    """Items of every job completed."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("UPDATE jobs_job SET items_completed = items_completed + 2, gpu_us_done = gpu_us_done + 2100000")


def ours(now, ticks: int) -> tuple[dict, datetime]:
    """By kind of tick, milliseconds of one and of its parts: medians, and the 99th percentile of the whole. And the
    instant of the last one of which a tenth decided.
    """
    from controlplane.fleet.models import Pool
    from controlplane.flex.controller import Controller
    from controlplane.flex.models import Grant
    from controlplane.flex.resident import BEGIN_AT_ONCE

    gc.disable()  # as `manage.py controller` does, which looks for cycles when a tick is over
    variants = variants_of(Pool.objects.count())
    prepare_reports(variants)
    controller, number = Controller(), 0
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}

    def tick(*, busy=(), jobs: bool = False) -> dict[str, float]:
        nonlocal now, number
        now, number = now + timedelta(seconds=1), number + 1
        report(now, number % variants, busy)
        controller.leadership.hold()  # by its own clock a leader does each second
        if jobs:
            progress()
        return measured(controller, now)

    for _ in range(16 + Pool.objects.count() // BEGIN_AT_ONCE):
        tick()
    assert not Grant.objects.exclude(state="lent").exists(), "every flex slot is lent by now"
    tenth_at = now
    for kind in KINDS:
        for turn in range(ticks):
            if kind == "all":
                forget(controller)
            found[kind].append(tick(busy=turned(turn) if kind == "tenth" else (), jobs=kind != "reports"))
        tenth_at = now if kind == "tenth" else tenth_at
    assert not Grant.objects.exclude(state="lent").exists()
    return {kind: summed(rows) for kind, rows in found.items()}, tenth_at


#: What a tick reads of every pool, and the tables that it adds rows to.
READ = (
    "SELECT agent_id, reported_at, epoch, seq, band FROM fleet_agentlive",
    "SELECT id, pool_id, state, items, items_completed, items_parked, items_cancelled, gpu_us_done FROM jobs_job",
)
WRITTEN = ("flex_poolsample", "flex_decision")
LIMIT_TURNS = 9


def limit(at) -> dict[str, float]:
    """The same bytes out of the database and into it by COPY BINARY, one commit: medians of some turns."""
    from django.db import connection

    connection.ensure_connection()
    with connection.connection.cursor() as cursor:
        rows = {table: copied(cursor, f"SELECT * FROM {table} WHERE at = '{at.isoformat()}'") for table in WRITTEN}
        for table in WRITTEN:
            cursor.execute(f"CREATE TABLE limit_{table} (LIKE {table} INCLUDING ALL)")
        turns = []
        for _ in range(LIMIT_TURNS):
            cursor.execute(f"TRUNCATE {', '.join(f'limit_{table}' for table in WRITTEN)}")
            began, cpu = time.perf_counter(), database_cpu_s()
            read = [copied(cursor, sql) for sql in READ]
            between = time.perf_counter()
            with connection.connection.transaction():
                for table, said in rows.items():
                    with cursor.copy(f"COPY limit_{table} FROM STDIN (FORMAT BINARY)") as copy:
                        copy.write(said)
            ended = time.perf_counter()
            turns.append((between - began, ended - between, database_cpu_s() - cpu))
    read_s, write_s, cpu_s = zip(*turns, strict=True)
    return {
        "read_ms": statistics.median(read_s) * 1_000,
        "write_ms": statistics.median(write_s) * 1_000,
        "database_cpu_ms": statistics.fmean(cpu_s) * 1_000,
        "read_bytes": sum(map(len, read)),
        "written_bytes": sum(map(len, rows.values())),
    }


def copied(cursor, sql: str) -> bytes:
    with cursor.copy(f"COPY ({sql}) TO STDOUT (FORMAT BINARY)") as copy:
        return b"".join(map(bytes, copy))


def turned(turn: int) -> range:
    """Remainders that are busy after so many turns: one more each turn, and then one less."""
    done = turn % 10 + 1
    return range(done) if turn // 10 % 2 == 0 else range(done, 10)


def forget(controller) -> None:
    """As after a takeover: no decision of any pool is written down yet."""
    resident = controller._resident
    for pool_id, calm in resident.calm.items():
        calm.rest_until_us = 0
        object.__setattr__(controller._memories[pool_id], "recorded", None)


def measured(controller, now) -> dict[str, float]:
    """Milliseconds of a tick as a whole, and the CPU time of its parts: that of this process and of its database."""
    gc.collect(1)
    controller.leadership.hold()
    began, cpu, database = time.perf_counter(), [time.process_time()], [database_cpu_s()]
    resident = controller._read(now)
    cpu.append(time.process_time())
    plan = controller._decide_all(resident)
    cpu.append(time.process_time())
    controller.leadership.hold()
    controller.apply(plan)
    ended = time.perf_counter()
    cpu.append(time.process_time())
    database.append(database_cpu_s())
    parts = zip(("read_cpu_ms", "decide_cpu_ms", "write_cpu_ms"), cpu, cpu[1:], strict=False)
    return {
        "ms": (ended - began) * 1_000,
        "cpu_ms": (cpu[-1] - cpu[0]) * 1_000,
        "database_cpu_ms": (database[-1] - database[0]) * 1_000,
        "short": len(controller._resident.pools) - len(plan.memories),
        **{name: (after - before) * 1_000 for name, before, after in parts},
    }


def database_cpu_s() -> float:
    """CPU seconds of the database's process behind this connection; 0 when it runs elsewhere."""
    from django.db import connection

    try:
        return int(Path(f"/proc/{connection.connection.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def summed(rows: list[dict[str, float]]) -> dict[str, float]:
    figures = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    ordered = sorted(row["ms"] for row in rows)
    figures["p99_ms"] = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    figures["database_cpu_ms"] = statistics.fmean(row["database_cpu_ms"] for row in rows)
    return figures


def peer(now, ticks: int) -> float:
    """The same work the usual way: for each pool load its rows, decide, save them in a transaction."""
    from controlplane.core.flex import decide
    from controlplane.core.histogram import Histogram
    from controlplane.flex import evidence, telemetry
    from controlplane.flex.leadership import Shard

    elapsed = []
    for _ in range(ticks):
        now += timedelta(seconds=1)
        report(now, 0)
        limits = {
            pool_id: (reading.pool.policy, reading.pool.safe_rate)
            for pool_id, reading in telemetry.read(Shard(), now).pools.items()
        }
        began = time.perf_counter()
        for pool_id, (policy, table) in limits.items():
            _peer_pool(pool_id, policy, table, now, decide, Histogram, evidence)
        elapsed.append((time.perf_counter() - began) * 1_000)
    return statistics.median(elapsed)


def _peer_pool(pool_id, policy, table, now, decide, histogram, evidence) -> None:
    from django.db import transaction

    from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
    from controlplane.core.period import to_us
    from controlplane.core.slot_states import Band, SlotState
    from controlplane.fleet.models import AgentLive, Pool, Slot
    from controlplane.flex.models import Decision, Grant, Lend, PoolSample
    from controlplane.jobs.queries import backlog

    with transaction.atomic():
        pool = Pool.objects.get(pk=pool_id)
        slots = list(Slot.objects.filter(pool=pool).select_related("grant"))
        merged, rate = histogram(), 0.0
        for live in AgentLive.objects.filter(agent__pool=pool):
            for said in live.figures["classes"]:
                merged.merge(histogram.from_sparse(said["wait_60s"]))
                rate += said["admitted_per_s_60s"]
        grants = {slot.pk: slot.grant for slot in slots if slot.band == "flex"}
        snapshot = FlexSnapshot(
            now_us=to_us(now), policy=policy, safe_rate=table,
            slots=tuple(
                FlexSlot(
                    name=slot.name, band=Band(slot.band), fence=grants[slot.pk].fence if slot.pk in grants else 0,
                    state=SlotState(grants[slot.pk].state) if slot.pk in grants else SlotState.HOME,
                    lent_at_us=to_us(now), grant_expires_at_us=to_us(now) + 10_000_000,
                    recalled_at_us=to_us(now),
                )
                for slot in slots
            ),
            interactive=InteractiveFigures(
                admitted_per_s=rate, p95_queue_us=merged.quantile_us(0.95), p95_below_since_us=None,
                telemetry_at_us=to_us(now),
            ),
            jobs=tuple(BatchJob(name=str(n), remaining_gpu_us=r, deadline_us=to_us(d)) for n, (r, d) in
                       enumerate(backlog(pool_id, now)) if d),
            lends_this_week=Lend.objects.filter(pool=pool, lent_at__gte=now - timedelta(days=7)).count(),
        )  # fmt: skip
        decision = decide(snapshot)
        Decision.objects.create(
            pool=pool, at=now, term=1, snapshot=evidence.snapshot_as_json(snapshot),
            slack=evidence.finite(decision.slack), checks=evidence.checks_as_json(decision),
            actions=evidence.actions_as_json(decision),
        )  # fmt: skip
        for slot_id, grant in grants.items():
            if grant.state == "lent":
                Grant.objects.filter(pk=slot_id).update(renewed_at=now, expires_at=now + timedelta(seconds=15))
        PoolSample.objects.create(
            pool=pool, at=now, p95_queue_us=snapshot.interactive.p95_queue_us, admitted_per_s=rate,
            figures={"seen": evidence.snapshot_as_json(snapshot, with_limits=False)},
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
