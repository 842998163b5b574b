"""`manage.py demo`: the whole system on this machine with a simulated fleet under traffic."""

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from controlplane.demo.launch import Demo
from controlplane.demo.settings import Options
from controlplane.embedded.errors import EmbeddedError
from controlplane.lab.traces import TraceError, read_trace
from controlplane.supervisor.runlock import AlreadyRunningError
from controlplane.supervisor.supervisor import SupervisorError, exit_status

AGENTS_MOST = 32


class Command(BaseCommand):
    help = "Starts servers, migrations, demo organisation, every process and a simulated fleet under mixed traffic."
    requires_system_checks: list[str] = []
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="of the web process (default: 8000)")
        parser.add_argument("--agents", type=int, default=3, help="agents of the fleet, 3 or more (default: 3)")
        parser.add_argument("--trace", type=Path, help="replay an Azure LLM or Mooncake trace")
        parser.add_argument("--speed", type=float, help="by default the work fills about 70 %% of the fleet")
        parser.add_argument("--seed", type=int, default=20_261_129)
        parser.add_argument("--headless", action="store_true", help="run, settle everything, write a summary, exit")
        parser.add_argument("--seconds", type=float, help="end after this time (headless: 90 unless given)")
        parser.add_argument("--json", type=Path, help="where the headless summary goes")

    def handle(self, **given: Any) -> None:
        options = chosen(given)
        try:
            Demo(options, say).run()
        except (SupervisorError, AlreadyRunningError) as error:
            raise SystemExit(exit_status(error)) from error
        except EmbeddedError as error:
            raise CommandError(str(error)) from error


def chosen(given: dict[str, Any]) -> Options:
    """Checked options. Raises CommandError (exit 2) with what to do."""
    if not 3 <= given["agents"] <= AGENTS_MOST:
        raise CommandError(f"--agents takes 3 to {AGENTS_MOST}", returncode=2)
    if given["speed"] is not None and not 0 < given["speed"] <= 10_000:
        raise CommandError("--speed takes a number over 0", returncode=2)
    if given["seconds"] is not None and given["seconds"] <= 0:
        raise CommandError("--seconds takes a number over 0", returncode=2)
    if given["json"] is not None and not given["json"].resolve().parent.is_dir():
        raise CommandError(f"--json: there is no folder {given['json'].resolve().parent}", returncode=2)
    if not 1 <= given["port"] <= 65_535:
        raise CommandError("--port takes 1 to 65535", returncode=2)
    parsed = None
    if given["trace"] is not None:
        try:
            parsed = read_trace(given["trace"])
        except (OSError, TraceError, UnicodeDecodeError) as error:
            raise CommandError(f"--trace: {error}", returncode=2) from error
        if parsed.refused:
            first = parsed.refused[0]
            say(
                f"{len(parsed.refused)} lines of the trace are left out; the first is line {first.line}: {first.reason}"
            )
    return Options(
        port=given["port"],
        agents=given["agents"],
        var_dir=settings.VAR_DIR,
        seed=given["seed"],
        trace=given["trace"].resolve() if given["trace"] else None,
        speed=given["speed"],
        headless=given["headless"],
        seconds=given["seconds"] or (90.0 if given["headless"] else None),
        json=given["json"],
        parsed=parsed,
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
