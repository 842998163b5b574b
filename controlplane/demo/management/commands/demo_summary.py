"""`manage.py demo_summary`: the last step of a headless demo, in a process of its own."""

import json
import sys
from argparse import ArgumentParser
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.demo.plan import TrafficResult
from controlplane.demo.summary import Marks, summarise, wait_until_settled
from controlplane.demo.viewer import ViewerResult
from controlplane.ledger.settling import attribute_now, cost_summary


class Command(BaseCommand):
    help = "Waits until everything is reported, attributes it, and writes the summary; exit 1 when a sum fails."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--marks", type=Path, required=True)
        parser.add_argument("--traffic", type=Path, required=True)
        parser.add_argument("--viewer", type=Path, required=True)
        parser.add_argument("--admin", required=True, help="agent=address,agent=address")
        parser.add_argument("--out", type=Path, required=True)

    def handle(self, **options: Any) -> None:
        marks = read_marks(options["marks"])
        traffic = msgspec.json.decode(options["traffic"].read_bytes(), type=TrafficResult)
        viewer = ViewerResult()
        if options["viewer"].exists():
            viewer = msgspec.json.decode(options["viewer"].read_bytes(), type=ViewerResult)
        admin = dict(pair.split("=", 1) for pair in options["admin"].split(","))
        if not wait_until_settled(marks.since, admin):
            raise CommandError("the agents did not report everything in time; see their logs")
        summary = summarise(marks=marks, traffic=traffic, viewer=viewer, admin=admin, cost=settled_cost())
        options["out"].write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        failed = [check for check in summary["checks"] if not check["held"]]
        for check in failed:
            sys.stderr.write(f"does not add up: {check['name']}: {check['left']} and {check['right']}\n")
        if failed:
            raise SystemExit(1)


def settled_cost() -> dict[str, Any]:
    """Everything attributed up to now, in nanos."""
    attribute_now(timezone.now())
    summary = asdict(cost_summary())
    summary.pop("unpriced_us")
    return summary


def read_marks(path: Path) -> Marks:
    raw = json.loads(path.read_text(encoding="utf-8"))
    return Marks(**raw | {"since": datetime.fromisoformat(raw["since"])})
