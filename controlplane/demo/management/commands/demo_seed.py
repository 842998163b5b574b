"""`manage.py demo_seed`: a step of `manage.py demo` in a process of its own; prints what the fleet needs as JSON."""

from argparse import ArgumentParser
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.demo.organisation import ACTOR, REASON, seed
from controlplane.demo.plan import write_json
from controlplane.demo.shape import Bounds
from controlplane.demo.summary import Marks
from controlplane.fleet.models import Slot
from controlplane.policy.actions import push
from controlplane.policy.compile import compile_configuration
from controlplane.policy.models import Revision


class Command(BaseCommand):
    help = "Makes the demo organisation where it is missing and pushes its first policy."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--folder", type=Path, required=True)
        parser.add_argument("--agents", required=True, help="name:pool,name:pool")
        parser.add_argument(
            "--here", help="name:id,name:id of agents whose folders are here; others of the fleet enrol anew"
        )
        parser.add_argument("--prompt-tokens", type=int, required=True)
        parser.add_argument("--output-tokens", type=int, required=True)
        parser.add_argument("--out", type=Path, required=True)

    def handle(self, **options: Any) -> None:
        agents = list(_pairs(options["agents"]).items())
        here = None if options["here"] is None else _pairs(options["here"])
        bounds = Bounds(options["prompt_tokens"], options["output_tokens"])
        now = timezone.now()
        try:
            seeded = seed(agents=agents, here=here, folder=options["folder"], bounds=bounds, now=now)
            if not Revision.objects.exists():
                push(actor=ACTOR, reason=REASON, now=now)
            elif needs_push(now) and not slots_wait_for_agents():
                push(actor=ACTOR, reason="demo organisation changed", now=now)
        except ValidationError as error:
            raise CommandError("; ".join(error.messages)) from error
        write_json(options["out"], msgspec.to_builtins(seeded))
        write_json(options["folder"] / "marks.json", Marks.now())


def _pairs(text: str) -> dict[str, str]:
    """`name:value,name:value` as a dictionary."""
    return {name: value for name, _, value in (pair.partition(":") for pair in text.split(",") if pair)}


def slots_wait_for_agents() -> bool:
    """Whether slots have lost their agents to ones that enrol in a moment: a revision made now would leave them out.

    The last one has them, and follows by itself when they are bound again.
    """
    free = Slot.objects.filter(agent__isnull=True, removed_at__isnull=True)
    return free.filter(tenures__ended_at__isnull=False).exists()


def needs_push(now: datetime) -> bool:
    """Whether what is saved differs from what was pushed last."""
    last = Revision.objects.order_by("-number").first()
    return last is None or compile_configuration(now).digest != last.digest
