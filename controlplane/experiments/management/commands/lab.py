"""`manage.py lab KIND`: what if, with a trace and without a GPU. Needs no database."""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.lab import batching, interference, replay
from controlplane.lab.traces import TraceError

UNUSABLE = 2


class Kind(NamedTuple):
    """One question: its arguments, its answer, and the answer in words."""

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    ask: Callable[[Mapping[str, Any]], dict[str, Any]]
    text: Callable[[Mapping[str, Any]], str]


KINDS = {
    "replay": Kind("traces and jobs through a policy, or through two side by side",
                   replay.add_arguments, replay.replay, replay.text),
    "batching": Kind("sizes and waits of batches of one-shot work, on a service-time curve",
                     batching.add_arguments, batching.sweep, batching.text),
    "interference": Kind("interactive alone, batch alone, both; and whether to buy",
                         interference.add_arguments, interference.interference, interference.text),
}  # fmt: skip


class Command(BaseCommand):
    help = "The lab: the agents' own decisions on a virtual clock."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        kinds = parser.add_subparsers(dest="kind", required=True, metavar=" | ".join(KINDS))
        for name, kind in KINDS.items():
            sub = kinds.add_parser(name, help=kind.help, description=kind.help)
            kind.add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        kind = KINDS[options["kind"]]
        try:
            answer = kind.ask(options)
        except (TraceError, ValueError) as error:
            raise CommandError(str(error), returncode=UNUSABLE) from error
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}", returncode=UNUSABLE) from error
        self.stdout.write(json.dumps(answer) if options["json"] else kind.text(answer))
