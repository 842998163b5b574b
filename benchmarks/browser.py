"""The pages of on-call staff in a real browser for ten minutes while every pool tells something each second.

    python -m benchmarks.browser [--quick] [--minutes N] [--pools N] [--json FILE]

A real controller tells of pools whose agents' reports change every second; a real web process serves the fleet's page
and a pool's page to Chromium, both open at once, each in front in turns. Counted are frames that arrived, long tasks
(a page that does not answer for as long), and after a forced collection the heap, nodes and listeners of each page.
Tasks of the first minute, with its first drawing, are told apart. Uses a database of its own on the server of
`DATABASE_URL`, or on a throwaway server. Exit 1 when a goal is missed: no task over 200 ms, a heap that grows by at
most a tenth, 0.9 frames a second or more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.ingest import ROOT, Server, benchmark_django, benchmark_servers, server
from bootstrap import chromium_on_path
from controlplane.core.period import to_us
from controlplane.wire.report import ClassLive, EngineLive, LiveFigures, SlotLive, TenantLive

os.environ.setdefault("FLEXBAND_SECRET_KEY", "benchmark")

LONG_TASK_MS_MOST = 200.0
GROWTH_MOST = 1.10
FRAMES_PER_S_LEAST = 0.9
POOLS, MINUTES = 20, 10.0
WARM_S = 60.0
"""Until then a page draws its first charts; from then on its heap counts."""
LOOK_EVERY_S = 15.0
WATCH = """
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) longTasks.push(task.duration);
}).observe({ type: "longtask", buffered: true });
"""


@dataclass
class Watched:
    """One open page: what its socket brought, and what it held after each forced collection."""

    name: str
    page: Any
    control: Any
    frames: int = 0
    bytes: int = 0
    said: list[str] = field(default_factory=list)
    opening: list[float] = field(default_factory=list)
    tasks: list[float] = field(default_factory=list)
    held: list[dict[str, float]] = field(default_factory=list)

    def drain(self) -> list[float]:
        """Long tasks since the last call, ms."""
        return [float(one) for one in self.page.evaluate("window.longTasks.splice(0)")]

    def look(self, second: float) -> None:
        """Tasks so far, then what is left after a collection, whose own time does not count."""
        self.tasks += self.drain()
        self.control.send("HeapProfiler.collectGarbage")
        told = {one["name"]: one["value"] for one in self.control.send("Performance.getMetrics")["metrics"]}
        self.held.append(
            {
                "second": round(second, 1),
                "heap_mb": told["JSHeapUsedSize"] / 1e6,
                "nodes": told["Nodes"],
                "listeners": told["JSEventListeners"],
            }
        )
        self.page.wait_for_timeout(100)
        self.drain()

    def figures(self, seconds: float) -> dict[str, Any]:
        first, last = self.held[0], self.held[-1]
        return {
            "frames": self.frames,
            "frames_per_s": self.frames / seconds,
            "bytes_per_frame": self.bytes / max(1, self.frames),
            "opening_longest_task_ms": max(self.opening, default=0.0),
            "long_tasks_over_50_ms": len(self.tasks),
            "longest_task_ms": max(self.tasks, default=0.0),
            "heap_mb": [round(one["heap_mb"], 2) for one in self.held],
            "heap_growth": statistics.median(one["heap_mb"] for one in self.held[-3:])
            / statistics.median(one["heap_mb"] for one in self.held[:3]),
            "nodes": [first["nodes"], last["nodes"]],
            "listeners": [first["listeners"], last["listeners"]],
            "said": self.said,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes, for a look")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--pools", type=int, default=POOLS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    minutes = options.minutes or (2.0 if options.quick else MINUTES)
    with benchmark_servers(), benchmark_django(FLEXBAND_INSECURE_LOOPBACK="true"):
        table = soak(options.pools, minutes * 60.0)
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return 0 if all(met(one) for one in table["pages"].values()) else 1


def met(page: dict[str, Any]) -> bool:
    return (
        page["longest_task_ms"] <= LONG_TASK_MS_MOST
        and page["heap_growth"] <= GROWTH_MOST
        and page["frames_per_s"] >= FRAMES_PER_S_LEAST
        and not page["said"]
    )


def print_table(table: dict[str, Any]) -> None:
    print(
        f"Chromium {table['browser']}, {table['pools']} pools, {table['seconds']:.0f} s, reports each second "
        f"({table['reports']} rounds); web process {table['web_cpu_s']:.1f} s of CPU"
    )
    for name, page in table["pages"].items():
        print(f"{name}: {'met' if met(page) else 'missed'}")
        print(f"  frames {page['frames']:,}, {page['frames_per_s']:.2f} a second (at least {FRAMES_PER_S_LEAST}), "
              f"{page['bytes_per_frame']:,.0f} bytes each")  # fmt: skip
        print(
            f"  longest task {page['longest_task_ms']:.0f} ms (at most {LONG_TASK_MS_MOST:.0f}); "
            f"{page['long_tasks_over_50_ms']} over 50 ms, {page['opening_longest_task_ms']:.0f} ms while opening"
        )
        print(f"  heap {page['heap_mb'][0]:.1f} MB at first, {page['heap_mb'][-1]:.1f} MB at the end, "
              f"growth {page['heap_growth']:.3f} (at most {GROWTH_MOST})")  # fmt: skip
        print(f"  nodes {page['nodes'][0]:,.0f} and {page['nodes'][1]:,.0f}, "
              f"listeners {page['listeners'][0]:,.0f} and {page['listeners'][1]:,.0f}")  # fmt: skip
        for line in page["said"][:5]:
            print(f"  the page complained: {line}")


# ---- the system ----


class Reports:
    """What agents say, told anew each second: queues, waits, arrivals and running requests that wander."""

    def __init__(self, pools: int) -> None:
        from benchmarks.controller import build
        from controlplane.contracts.models import WorkloadClass
        from controlplane.fleet.models import AgentLive, Slot
        from controlplane.tenants.models import Tenant

        build(pools)
        self._lives = list(AgentLive.objects.all())
        self._slots: dict[int, list[int]] = {}
        for agent, slot in Slot.objects.values_list("agent_id", "pk"):
            self._slots.setdefault(agent, []).append(slot)
        self._classes = dict(WorkloadClass.objects.values_list("slug", "pk"))
        self._tenant = Tenant.objects.get().pk
        self._random = random.Random(20)
        self.rounds = 0

    def tell(self) -> None:
        from controlplane.fleet.models import AgentLive
        from controlplane.flex.telemetry import database_now

        now = database_now()
        for live in self._lives:
            live.reported_at, live.seq = now, live.seq + 1
            live.figures = msgspec.to_builtins(self._figures(self._slots[live.agent_id], now))
        AgentLive.objects.bulk_update(self._lives, ["reported_at", "seq", "figures"])
        self.rounds += 1

    def _figures(self, slots: list[int], now: datetime) -> LiveFigures:
        draw, at_us = self._random, to_us(now)
        at = draw.randint(120, 200)
        waits = [(index, draw.randint(1, 20)) for index in range(at, at + 40)]
        classes, tenants = [], []
        for class_id in self._classes.values():
            depth = draw.choice((0, 0, draw.randint(1, 40)))
            common: dict[str, Any] = {
                "class_id": class_id,
                "depth": depth,
                "oldest_age_us": draw.randint(1_000, 4_000_000) if depth else None,
                "running": draw.randint(0, 16),
                "arrivals_per_s": round(draw.uniform(2.0, 14.0), 2),
                "departures_per_s": round(draw.uniform(2.0, 14.0), 2),
                "residence_mean_us": draw.randint(500_000, 900_000),
                "present_mean": round(draw.uniform(1.0, 12.0), 2),
            }
            classes.append(
                ClassLive(
                    **common, head_request_id=str(uuid.uuid4()) if depth else "",
                    head_reason="places_taken" if depth else "",
                    admitted_per_s_60s=round(draw.uniform(2.0, 14.0), 2), departures=draw.randint(200, 900),
                    refused_60s={"queue_full": draw.randint(1, 9)} if draw.random() < 0.2 else {}, wait_60s=waits,
                    ttft_60s=waits,
                )
            )  # fmt: skip
            tenants.append(TenantLive(tenant_id=self._tenant, counter=draw.uniform(0, 1e6), **common))
        said = [SlotLive(slot, "ready", "home", 0, draw.randint(0, 4), 0, 0, 20_000, 60_000) for slot in slots]
        return LiveFigures(at_us, said, classes, tenants, EngineLive("vllm", draw.randint(0, 9), 0, draw.random()))


@contextlib.contextmanager
def controller() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "manage.py", "controller"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def session() -> str:
    """The session key of somebody on call."""
    from django.conf import settings
    from django.contrib.auth.models import User
    from django.test import Client

    from controlplane.tenants.models import Member

    user = User.objects.create(username="night", password="!")
    Member.objects.create(user=user, role="oncall")
    client = Client()
    client.force_login(user)
    return client.cookies[settings.SESSION_COOKIE_NAME].value


# ---- the browser ----


def soak(pools: int, seconds: float) -> dict[str, Any]:
    from django.core.management import call_command
    from playwright.sync_api import sync_playwright

    call_command("migrate", verbosity=0, skip_checks=True)
    reports, key = Reports(pools), session()
    # Playwright's loop runs in this thread, and Django would not let it ask the database.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with server("controlplane.config.asgi:application", {}) as web, controller(), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_init_script(WATCH)
        context.add_cookies([{"name": "sessionid", "value": key, "url": f"http://127.0.0.1:{web.port}"}])
        reports.tell()
        watched = [_open(context, web, "/", "fleet"), _open(context, web, "/pools/p0/", "pool")]
        cpu, began = web.cpu_s(), time.monotonic()
        frames = [one.frames for one in watched]
        next_look = WARM_S if seconds > 2 * WARM_S else seconds / 4
        while (second := time.monotonic() - began) < seconds:
            reports.tell()
            if second >= next_look:
                for one in watched:
                    if not one.held:
                        one.opening = one.drain()
                    one.page.bring_to_front()
                    one.look(second)
                next_look += LOOK_EVERY_S
            left = began + reports.rounds - time.monotonic()
            watched[0].page.wait_for_timeout(max(10.0, left * 1_000))
        for one, before in zip(watched, frames, strict=True):
            one.look(seconds)
            one.frames -= before
        table = {
            "browser": browser.version,
            "pools": pools,
            "seconds": seconds,
            "reports": reports.rounds,
            "web_cpu_s": web.cpu_s() - cpu,
            "pages": {one.name: one.figures(seconds) for one in watched},
        }
        browser.close()
    return table


def _open(context: Any, web: Server, path: str, name: str) -> Watched:
    page = context.new_page()
    watched = Watched(name, page, context.new_cdp_session(page))
    watched.control.send("Performance.enable")

    def received(payload: str | bytes) -> None:
        watched.frames += 1
        watched.bytes += len(payload)

    page.on("websocket", lambda socket: socket.on("framereceived", received))
    page.on("console", lambda said: watched.said.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: watched.said.append(str(error)))
    answer = page.goto(f"http://127.0.0.1:{web.port}{path}")
    if answer is None or answer.status != 200:
        raise SystemExit(f"{path} answered {answer and answer.status}")
    return watched


def _chromium() -> str:
    found = os.environ.get("FLEXBAND_CHROMIUM") or chromium_on_path()
    if found is None:
        raise SystemExit("a Chromium is needed: install one, or set FLEXBAND_CHROMIUM to its program")
    return str(found)


if __name__ == "__main__":
    sys.exit(main())
