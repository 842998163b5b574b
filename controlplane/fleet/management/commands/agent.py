"""`manage.py agent run ...` becomes an agent; `retire ID` ends one; `rotate-key ID` asks one for a new key."""

import json
import os
import sys
import uuid
from argparse import REMAINDER
from contextlib import suppress
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Q
from django.utils import timezone

from controlplane.audit.actors import command_actor
from controlplane.fleet.actions import retire_agent
from controlplane.fleet.keys import ask_for_new_key
from controlplane.fleet.models import Agent

AGENT_MODULE = "controlplane.agent"


def agent_command(arguments: list[str]) -> list[str]:
    """The command line of an agent with these options; it needs no Django and no database."""
    return [sys.executable, "-m", AGENT_MODULE, *arguments]


class Command(BaseCommand):
    help = "Runs an agent (the options of python -m controlplane.agent), retires one or asks it for a new key."

    def run_from_argv(self, argv: list[str]) -> None:
        """`run` is replaced by the agent's own process, options and exit status untouched."""
        if argv[2:3] == ["run"]:
            command = agent_command(argv[3:])
            os.execv(command[0], command)  # noqa: S606 - this process becomes the agent
        super().run_from_argv(argv)

    def add_arguments(self, parser: CommandParser) -> None:
        parts = parser.add_subparsers(dest="part", required=True)
        run = parts.add_parser("run", help="run an agent here; see python -m controlplane.agent --help")
        run.add_argument("options", nargs=REMAINDER)
        retire = parts.add_parser("retire", help="refuse an agent from now on, end the tenures of its slots")
        rotate = parts.add_parser(
            "rotate-key", help="ask for a new signing key; the old one ends with its first report"
        )
        for part in (retire, rotate):
            part.add_argument("id", help="number, UUID or name of the agent")
            part.add_argument("--reason", required=True, help="kept in the audit log")
            part.add_argument("--json", action="store_true", help="machine-readable output")

    def handle(self, *, part: str, **options: Any) -> None:
        if part == "run":
            command = agent_command(options["options"])
            os.execv(command[0], command)  # noqa: S606 - this process becomes the agent
        act = retire_agent if part == "retire" else ask_for_new_key
        agent = find_agent(options["id"])
        actor = command_actor()
        try:
            agent = act(agent_id=agent.pk, actor=actor, now=timezone.now(), reason=options["reason"])
        except ValidationError as error:
            raise CommandError(" ".join(error.messages), returncode=2) from error
        if options["json"]:
            at = agent.retired_at if part == "retire" else agent.key_rotation_asked_at
            name = "retired_at" if part == "retire" else "key_rotation_asked_at"
            said = {"id": agent.pk, "name": agent.name, name: at.isoformat() if at else None}
            self.stdout.write(json.dumps(said))
        elif part == "retire":
            self.stdout.write(f"{agent.name} of pool {agent.pool.slug} is retired; its slots are free for another.")
        else:
            self.stdout.write(f"{agent.name} of pool {agent.pool.slug} makes a new key with its next report.")


def find_agent(text: str) -> Agent:
    """The agent with this number, UUID or, among those in use, name. Raises CommandError (exit 2)."""
    wanted = Q(name=text) & ~Q(state=Agent.State.RETIRED)
    if text.isdigit() and len(text) < 10:
        wanted |= Q(pk=int(text))
    with suppress(ValueError):
        wanted |= Q(uuid=uuid.UUID(text))
    found = list(Agent.objects.filter(wanted).order_by("pk")[:2])
    if not found:
        raise CommandError(f"There is no agent {text}. The Agents page lists them.", returncode=2)
    if len(found) > 1:
        raise CommandError(f"{text} is the number of one agent and the name of another: give a UUID.", returncode=2)
    return found[0]
