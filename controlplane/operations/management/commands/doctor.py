"""`manage.py doctor`: what is configured, reachable, migrated and what is wrong; exit 1 when something is."""

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from controlplane.operations.health import examine


class Command(BaseCommand):
    help = "Says what is configured, reachable and migrated, a line each; exit status 1 when something is wrong."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")

    def handle(self, *, json: bool, **_: Any) -> None:
        findings = examine(timezone.now())
        if json:
            self.stdout.write(_as_json(findings))
        else:
            width = max(len(finding.part) for finding in findings)
            for finding in findings:
                word = "ok   " if finding.right else "WRONG"
                self.stdout.write(f"{word} {finding.part:<{width}}  {finding.detail}")
        if not all(finding.right for finding in findings):
            raise SystemExit(1)


def _as_json(findings: list[Any]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=1)
