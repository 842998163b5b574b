"""`manage.py lab KIND`: what if, without a GPU. `--pool` replays what a pool served, all else needs no database."""

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.experiments.models import Experiment
from controlplane.experiments.running import again, code_version
from controlplane.experiments.what_if import what_if
from controlplane.fleet.models import Pool
from controlplane.lab import live
from controlplane.lab.arguments import read_changes, read_model
from controlplane.lab.kinds import KINDS
from controlplane.lab.traces import TraceError

UNUSABLE = 2
LIVE = "interactive, batch and both as real HTTP load at an agent, beside the simulator; calibrates a service curve"


class Command(BaseCommand):
    help = "The lab: the agents' own decisions on a virtual clock."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        kinds = parser.add_subparsers(dest="kind", required=True, metavar=" | ".join(KINDS))
        for name, kind in KINDS.items():
            sub = kinds.add_parser(name, help=kind.help, description=kind.help)
            kind.add_arguments(sub)
            if name == "replay":
                add_window(sub)
            sub.add_argument("--json", action="store_true", help="print one JSON document")
        sub = kinds.add_parser("live", help=LIVE, description=LIVE)
        live.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        again = kinds.add_parser("rerun", help="a stored experiment computed anew: the same bytes, or status 1")
        again.add_argument("id", type=int)

    def handle(self, *args: Any, **options: Any) -> None:
        if options["kind"] == "rerun":
            return self.rerun(options["id"])
        ask, text = (
            (live.live, live.text)
            if options["kind"] == "live"
            else (KINDS[options["kind"]].ask, KINDS[options["kind"]].text)
        )
        try:
            answer = of_pool(options) if options.get("pool") else ask(options)
        except (TraceError, ValueError) as error:
            raise CommandError(str(error), returncode=UNUSABLE) from error
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}", returncode=UNUSABLE) from error
        self.stdout.write(json.dumps(answer) if options["json"] else text(answer))

    def rerun(self, experiment_id: int) -> None:
        """Prints the answer's bytes as they come out now. Raises CommandError where they are not the stored ones."""
        row = Experiment.objects.select_related("result").filter(pk=experiment_id).first()
        if row is None or getattr(row, "result", None) is None:
            raise CommandError(f"there is no experiment {experiment_id} with an answer", returncode=UNUSABLE)
        try:
            content = again(row)
        except ValueError as error:
            raise CommandError(str(error), returncode=UNUSABLE) from error
        self.stdout.write(content.decode(), ending="")
        if content != bytes(row.result.content):
            other = code_version() != row.result.code_version
            why = f": it was made by code {row.result.code_version}, this is {code_version()}" if other else ""
            raise CommandError(f"the answer is not the one that is stored{why}")


def add_window(parser: ArgumentParser) -> None:
    parser.add_argument("--pool", metavar="SLUG", help="what this pool served, under the policy in force")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of that window")
    parser.add_argument("--until", type=datetime.fromisoformat, help="its end, ISO 8601 with a zone; default: now")


def of_pool(options: Mapping[str, Any]) -> dict[str, Any]:
    """The what-if of a pool's own traffic."""
    pool = Pool.objects.filter(slug=options["pool"]).first()
    if pool is None:
        raise ValueError(f"there is no pool {options['pool']}")
    until = options["until"] or timezone.now()
    if until.tzinfo is None or options["minutes"] <= 0:
        raise ValueError("--until needs a zone, such as 2026-10-31T22:00:00Z, and --minutes is above 0")
    given = options["service"] or options["curve"]
    return what_if(
        pool,
        read_changes([*options["set"], *options["propose"]]),
        since=until - timedelta(minutes=options["minutes"]),
        until=until,
        objective_ms=options["objective_ms"],
        service=read_model(options["service"], options["curve"]) if given else None,
    )
