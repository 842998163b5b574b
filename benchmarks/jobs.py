"""A night of batch work: a file through the OpenAI form, leased and settled by agents that answer at once.

    python -m benchmarks.jobs [--quick] [--items N] [--agents N] [--json FILE]

The real path: upload to a real uvicorn, import and assembly by a real Celery worker, signed reports with usage records
through the agents' door. Beside it the same broker and database with one Celery task per item. Uses a database of its
own on the server of `DATABASE_URL`, or a throwaway server. Exit 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.ingest import ROOT, benchmark_database, benchmark_servers, server

GOAL_SUBMIT_S_PER_MILLION = 60.0
GOAL_ITEMS_PER_S = 5_000.0
GOAL_RATIO = 10.0
GOAL_PAGE_RATIO = 5.0
GOAL_GROWTH_MB = 150.0
DRAIN_MOST_S = 900.0
ROOM = 1_000
WARM_UP_ITEMS = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the items, for a look")
    parser.add_argument("--items", type=int, default=0)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    items = options.items or (100_000 if options.quick else 1_000_000)
    with contextlib.ExitStack() as stack:
        stack.enter_context(benchmark_servers())
        redis_url = os.environ["REDIS_URL"]
        url = stack.enter_context(benchmark_database())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ |= {
            "DATABASE_URL": url,
            "CELERY_BROKER_URL": redis_url,
            "FLEXBAND_JOB_STORAGE": str(folder / "store"),
            "FLEXBAND_SIGNING_KEYS": str(folder / "keys"),
            "FLEXBAND_AS_OWNER": "true",
            "FLEXBAND_INSECURE_LOOPBACK": "true",
            "FLEXBAND_LOG_LEVEL": "WARNING",
            "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
        }
        import django

        django.setup()
        table = measure(folder, items, options.agents, 300 if options.quick else 2_000)
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    return 0 if all(met for _, _, met in verdicts(table)) else 1


class Memory:
    """Resident memory of processes, sampled twice a second: the middle of the first and last fifth, and the most."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self.samples: dict[str, list[int]] = {name: [] for name in processes}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            for name, process in self._processes.items():
                with contextlib.suppress(psutil.Error):
                    family = [process, *process.children(recursive=True)]
                    self.samples[name].append(sum(each.memory_info().rss for each in family))

    def stop(self) -> dict[str, dict[str, float]]:
        self._stop.set()
        self._thread.join()
        return {name: _course(values) for name, values in self.samples.items() if values}


def _course(values: list[int]) -> dict[str, float]:
    fifth = max(1, len(values) // 5)
    first, last = statistics.median(values[:fifth]), statistics.median(values[-fifth:])
    return {"first_mb": first / 1e6, "last_mb": last / 1e6, "most_mb": max(values) / 1e6}


@contextlib.contextmanager
def worker(application: str, *extra: str) -> Iterator[psutil.Process]:
    """A Celery worker of one process."""
    command = [sys.executable, "-m", "celery", "-A", application, "worker", "-c", "1", "--without-gossip"]
    command += ["--without-mingle", "-l", "WARNING", *extra]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def measure(folder: Path, items: int, agents: int, peer_items: int) -> dict:
    from django.core.management import call_command

    from benchmarks.jobs_fleet import NullAgent, build, lines

    call_command("migrate", verbosity=0, skip_checks=True)
    fleet = build(agents)
    path = folder / "night.jsonl"
    with path.open("wb") as file:
        file.writelines(lines(items))
    table: dict = {"items": items, "agents": agents, "file_mb": path.stat().st_size / 1e6, "load": os.getloadavg()[0]}
    with (
        server(
            "controlplane.config.asgi:application",
            {},
            "--http",
            "controlplane.config.asgi:HttpProtocol",
            "--lifespan",
            "off",
        ) as web,
        worker("controlplane.config.celery") as importer,
    ):
        null_agents = [NullAgent(fleet, agent, ROOM) for agent in fleet.agents]
        warm_up(folder, fleet.secret, web.port, null_agents)
        memory = Memory({"web": web.process, "worker": importer})
        batch = submit(web.port, fleet.secret, path, table)
        say(f"submitted in {table['submit_s']:.1f} s (upload {table['upload_s']:.1f} s)")
        table["page_ms"] = page_times(batch)
        began = time.perf_counter()
        until = time.monotonic() + DRAIN_MOST_S
        asyncio.run(_drain(null_agents, web.port, until))
        table["drain_s"] = time.perf_counter() - began
        table["done"] = sum(agent.done for agent in null_agents)
        table["report_ms_p50"] = statistics.median(ms for agent in null_agents for ms in agent.latencies_ms)
        say(f"{table['done']:,} items leased and settled in {table['drain_s']:.1f} s")
        assembled(batch, table)
        say(f"assembled in {table['assemble_s']:.1f} s")
        table["memory"] = memory.stop()
    table["peer_items"] = peer_items
    table["peer_items_per_s"] = peer(peer_items)
    table["items_per_s"] = table["done"] / table["drain_s"]
    table["ratio"] = table["items_per_s"] / table["peer_items_per_s"]
    return table


def warm_up(folder: Path, secret: str, port: int, agents: list) -> None:
    """A small night first: what processes load with their first request and task is no growth of theirs."""
    from benchmarks.jobs_fleet import lines

    path, table = folder / "warm-up.jsonl", {}
    path.write_bytes(b"".join(lines(WARM_UP_ITEMS)))
    batch = submit(port, secret, path, table)
    asyncio.run(_drain(agents, port, time.monotonic() + DRAIN_MOST_S))
    assembled(batch, table)
    for agent in agents:
        agent.done = 0
        agent.latencies_ms.clear()


def say(text: str) -> None:
    """What is known so far: a full run takes minutes."""
    print(text, file=sys.stderr, flush=True)


async def _drain(agents: list, port: int, until: float) -> None:
    await asyncio.gather(*(agent.run(port, until) for agent in agents))


def submit(port: int, secret: str, path: Path, table: dict):
    """From the first byte of the upload until its items can be leased; the client is the official one."""
    import openai

    from controlplane.jobs.models import Batch

    client = openai.OpenAI(api_key=secret, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=600)
    began = time.perf_counter()
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    table["upload_s"] = time.perf_counter() - began
    made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    while (status := client.batches.retrieve(made.id).status) == "validating":
        if time.perf_counter() - began > 600:
            raise SystemExit("the file was not imported in ten minutes")
        time.sleep(0.2)
    table["submit_s"] = time.perf_counter() - began
    if status != "in_progress":
        raise SystemExit(f"the batch is {status}: {client.batches.retrieve(made.id).errors}")
    return Batch.objects.get(uuid=made.id.removeprefix("batch_"))


def page_times(batch) -> dict[str, float]:
    """Milliseconds of a page of items at the beginning and at nine tenths of the job, medians of 20."""
    from controlplane.jobs.item_queries import items_page

    found = {}
    for name, after in (("first", 0), ("deep", batch.job.items * 9 // 10)):
        times = []
        for _ in range(20):
            began = time.perf_counter()
            assert len(items_page(batch.job, after=after, limit=50)) == 50
            times.append((time.perf_counter() - began) * 1000)
        found[name] = statistics.median(times)
    return found


def assembled(batch, table: dict) -> None:
    """Waits for the files, whose bell is rung as the sweep would, and counts their lines."""
    from controlplane.wakeups.bells import ring_now

    began = time.perf_counter()
    ring_now("jobs.sweep")
    while True:
        batch.refresh_from_db()
        if batch.state == "completed":
            break
        if time.perf_counter() - began > 300:
            raise SystemExit(f"the files were not assembled: {batch.state}, {batch.job.state}")
        time.sleep(0.2)
    table["assemble_s"] = time.perf_counter() - began
    table["output_lines"] = batch.output_file.lines


def peer(items: int) -> float:
    """Items per second of one Celery task per item, from the first message to the last row."""
    from django.db import connection
    from django.utils import timezone

    from controlplane.config.celery import app
    from controlplane.jobs.models import Item, ItemResult

    day = timezone.now().date()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE jobs_item, jobs_itembody, jobs_itemresult")
        rows = (day, items)
        cursor.execute(
            "INSERT INTO jobs_item (day, job_id, line, prompt_tokens) SELECT %s, 1, n, 9 FROM generate_series(1, %s) n",
            rows,
        )
        cursor.execute(
            "INSERT INTO jobs_itembody (day, job_id, line, custom_id, body)"
            " SELECT %s, 1, n, n::text, convert_to(repeat('x', 400), 'UTF8') FROM generate_series(1, %s) n",
            rows,
        )
    queue = f"benchmark-{os.getpid()}"
    app.send_task("benchmark.item", args=[str(day), 1, 1], queue=queue)
    with worker("benchmarks.jobs_peer", "-Q", queue):
        deadline = time.monotonic() + 60
        while not ItemResult.objects.exists():  # the first task: the worker is up
            if time.monotonic() > deadline:
                raise SystemExit("the peer's worker did not start")
            time.sleep(0.1)
        began = time.perf_counter()
        for line in range(2, items + 1):
            app.send_task("benchmark.item", args=[str(day), 1, line], queue=queue, ignore_result=True)
        while Item.objects.filter(state=2).count() < items and time.perf_counter() - began < 300:
            time.sleep(0.1)
        return (items - 1) / (time.perf_counter() - began)


def verdicts(table: dict) -> list[tuple[str, str, bool]]:
    """(what was measured, its goal, whether it was met)"""
    millions = table["items"] / 1e6
    growth = max(course["last_mb"] - course["first_mb"] for course in table["memory"].values())
    deep = table["page_ms"]["deep"] / table["page_ms"]["first"]
    return [
        (
            f"submitted in {table['submit_s']:.1f} s (upload {table['upload_s']:.1f} s)",
            f"<= {GOAL_SUBMIT_S_PER_MILLION * millions:.0f} s",
            table["submit_s"] <= GOAL_SUBMIT_S_PER_MILLION * max(millions, 0.1),
        ),
        (
            f"leased and settled {table['items_per_s']:,.0f} items/s with their usage records",
            f">= {GOAL_ITEMS_PER_S:,.0f}",
            table["items_per_s"] >= GOAL_ITEMS_PER_S and table["done"] == table["items"],
        ),
        (
            f"{table['ratio']:.1f}x one Celery task per item ({table['peer_items_per_s']:,.0f} items/s)",
            f">= {GOAL_RATIO:.0f}x",
            table["ratio"] >= GOAL_RATIO,
        ),
        (
            f"a page at nine tenths takes {deep:.2f}x the first ({table['page_ms']['deep']:.1f} ms)",
            f"<= {GOAL_PAGE_RATIO:.0f}x",
            deep <= GOAL_PAGE_RATIO,
        ),
        (f"memory grew by {growth:.0f} MB at most", f"<= {GOAL_GROWTH_MB:.0f} MB", growth <= GOAL_GROWTH_MB),
        (
            f"{table['output_lines']:,} lines assembled in {table['assemble_s']:.1f} s",
            "every item",
            table["output_lines"] == table["items"],
        ),
    ]


def print_table(table: dict) -> None:
    load = f"load {table['load']:.1f} at the start, {os.getloadavg()[0]:.1f} at the end on {os.cpu_count()} cores"
    print(f"Batch jobs: {table['items']:,} items ({table['file_mb']:.0f} MB), {table['agents']} agents; {load}")
    for text, goal, met in verdicts(table):
        print(f"{text:<78}  {goal}: {'met' if met else 'MISSED'}")
    for name, course in table["memory"].items():
        print(
            f"resident memory of {name}: {course['first_mb']:.0f} MB at first, {course['last_mb']:.0f} MB at last, "
            f"{course['most_mb']:.0f} MB at most"
        )
    print(f"a report and its answer: p50 {table['report_ms_p50']:.0f} ms; peer over {table['peer_items']:,} items")


if __name__ == "__main__":
    sys.exit(main())
