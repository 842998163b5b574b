"""`manage.py policy`: plan, push, status, diff, rollback, rotate-key from the terminal."""

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.audit.actors import command_actor
from controlplane.policy.actions import push, rollback
from controlplane.policy.diff import diff, summary
from controlplane.policy.models import Revision, SigningKey
from controlplane.policy.pages import Review, review
from controlplane.policy.queries import configuration_of, desired, drift, latest_revision
from controlplane.policy.signing import rotate
from controlplane.tenants.models import Installation

UNUSABLE = 2


class Command(BaseCommand):
    help = "Shows, pushes and rolls back policy."

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        for name, text in (
            ("plan", "what a push would change, and which rules do not hold"),
            ("status", "the revision in force and every agent that does not apply it"),
        ):
            _with_json(verbs.add_parser(name, help=text))
        add = _with_json(verbs.add_parser("push", help="push what is saved"))
        add.add_argument("--reason", required=True)
        add.add_argument("--waves", default="100", help="percentages, for example 10,50,100; default all at once")
        compare = _with_json(verbs.add_parser("diff", help="what changes from revision A to B"))
        compare.add_argument("a", type=int)
        compare.add_argument("b", type=int)
        back = _with_json(verbs.add_parser("rollback", help="push the content of an earlier revision"))
        back.add_argument("number", type=int)
        back.add_argument("--reason", required=True)
        key = _with_json(verbs.add_parser("rotate-key", help="revoke a signing key and make its successor"))
        key.add_argument("use", choices=SigningKey.Use.values)

    def handle(self, *args: Any, **options: Any) -> None:
        if not Installation.objects.filter(pk=1).exists():
            raise CommandError("the installation is not set up: run `manage.py demo` first", returncode=UNUSABLE)
        verb = options["verb"].replace("-", "_")
        try:
            answer, lines = getattr(self, f"_{verb}")(options)
        except ValidationError as error:
            raise CommandError("; ".join(error.messages), returncode=UNUSABLE) from error
        self.stdout.write(json.dumps(answer, default=str, indent=2) if options["json"] else "\n".join(lines))

    def _plan(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        found = review(timezone.now())
        return _review_json(found), _review_lines(found)

    def _push(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        revision = push(
            actor=command_actor(), reason=options["reason"], waves=_waves(options["waves"]), now=timezone.now()
        )
        return _pushed(revision)

    def _rollback(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        revision = rollback(
            to_number=options["number"], actor=command_actor(), reason=options["reason"], now=timezone.now()
        )
        return _pushed(revision)

    def _status(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        agents = drift(timezone.now())
        latest = latest_revision()
        behind = [row for row in agents if row.needs_attention]
        answer = {
            "revision": latest.number if latest else None,
            "digest": latest.digest if latest else None,
            "rollout": latest.rollout.state if latest else None,
            "agents": len(agents),
            "in_force": len(agents) - len(behind),
            "drift": [asdict(row) for row in behind],
        }
        if latest is None:
            return answer, ["Nothing was pushed yet. Start with `manage.py policy plan`."]
        head = (
            f"revision {latest.number} ({answer['rollout']}) in force on {answer['in_force']} of {len(agents)} agents"
        )
        return answer, [head, *(f"  {row.state:12} {row.pool}/{row.name}: {row.reason}" for row in behind)]

    def _diff(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        before, after = configuration_of(options["a"]), configuration_of(options["b"])
        if before is None or after is None:
            missing = options["a"] if before is None else options["b"]
            raise CommandError(f"there is no revision {missing}", returncode=UNUSABLE)
        changes = diff(before, after, now=timezone.now())
        answer = {"before": options["a"], "after": options["b"], "changes": [asdict(change) for change in changes]}
        return answer, summary(changes, most=len(changes)) or ["no change"]

    def _rotate_key(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        kid = rotate(options["use"], timezone.now())
        return {"use": options["use"], "kid": kid}, [f"{options['use']} key is now {kid}; the sweep signs again"]


def _with_json(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _waves(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise CommandError(f"--waves {text}: give percentages like 10,50,100", returncode=UNUSABLE) from error


def _pushed(revision: Revision) -> tuple[dict[str, Any], list[str]]:
    agents = revision.rollout.deliveries.count()
    answer = {
        "revision": revision.number,
        "digest": revision.digest,
        "agents": agents,
        "content_of": revision.rolls_back_to,
        "desired": {str(pool): list(value) for pool, value in desired(_pools(revision)).items()},
    }
    return answer, [f"accepted as revision {revision.number}; requested on {agents} agents"]


def _pools(revision: Revision) -> list[int]:
    return list(revision.bundles.values_list("pool_id", flat=True))


def _review_json(found: Review) -> dict[str, Any]:
    return {
        "against": found.against.number if found.against else None,
        "digest": found.digest,
        "unchanged": found.unchanged,
        "changes": [asdict(change) for change in found.changes],
        "errors": [asdict(item) for item in found.errors],
        "warnings": [asdict(item) for item in found.warnings],
    }


def _review_lines(found: Review) -> list[str]:
    against = f"against revision {found.against.number}" if found.against else "first push"
    lines = [f"{found.tally} ({against})", *(f"  {line}" for line in summary(found.changes))]
    for item in found.findings:
        lines.append(f"{item.severity} {item.rule} {item.subject}: {item.message} {item.action}")
    return lines
