"""`manage.py explain KIND FILE.json`: what the production core answers, case by case."""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.core import (
    explain_admission,
    explain_attribution,
    explain_fairness,
    explain_flex,
    explain_period,
    explain_reconcile,
    explain_slo,
)

KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "flex": explain_flex.explain,
    "admission": explain_admission.explain,
    "fairness": explain_fairness.explain,
    "slo": explain_slo.explain,
    "attribution": explain_attribution.explain,
    "reconcile": explain_reconcile.explain,
    "period": explain_period.explain,
}
FILE_LIMIT_BYTES = 64 * 1024 * 1024


class Command(BaseCommand):
    help = "Runs each case of a JSON file through the decision core and prints the answers with their checks."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("kind", choices=sorted(KINDS))
        parser.add_argument("file", help="a list of {name, input}, or one {input}; - reads standard input")
        parser.add_argument("--json", action="store_true", help="machine-readable output (always so here)")

    def handle(self, *, kind: str, file: str, **_: Any) -> None:
        answers = [answer(kind, case, index) for index, case in enumerate(cases(file))]
        json.dump(answers, self.stdout, indent=1, allow_nan=False)
        self.stdout.write("")


def cases(file: str) -> list[dict[str, Any]]:
    """The file's cases. Raises CommandError (exit 2) that says what is wrong with it."""
    try:
        text = sys.stdin.read(FILE_LIMIT_BYTES) if file == "-" else Path(file).read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CommandError(f"{file} cannot be read as JSON: {error}", returncode=2) from error
    except RecursionError:
        raise CommandError(f"{file} cannot be read as JSON: it is nested too deeply", returncode=2) from None
    found = document if isinstance(document, list) else [document]
    for index, case in enumerate(found):
        if not isinstance(case, dict) or not isinstance(case.get("input"), dict):
            raise CommandError(f'case {index} of {file} has no "input" object', returncode=2)
    return found


def answer(kind: str, case: dict[str, Any], index: int) -> dict[str, Any]:
    name = str(case.get("name", f"case {index}"))
    try:
        result = KINDS[kind](case["input"])
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        detail = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise CommandError(f"{name}: {detail}", returncode=2) from error
    return {"name": name, **result}
