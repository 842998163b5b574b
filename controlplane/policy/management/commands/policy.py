"""`manage.py policy`: plan, push, status, diff, rollback, export, apply, verify and keys from the terminal."""

import json
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.audit.actors import command_actor
from controlplane.policy.actions import push, rollback
from controlplane.policy.applying import apply, export_text, prepare
from controlplane.policy.diff import diff, summary
from controlplane.policy.models import PolicyBundle, Revision, SigningKey
from controlplane.policy.pages import Review, review
from controlplane.policy.queries import (
    bundle,
    configuration_of,
    desired,
    drift,
    latest_revision,
    public_keys,
    successions,
)
from controlplane.policy.signing import rotate
from controlplane.policy.wave_plan import Gates, read_waves
from controlplane.policy.yaml_lines import Unreadable, read_lines
from controlplane.tenants.models import Installation
from controlplane.wire.verification import UnverifiedBundle, verify_bundle

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
        _with_waves(add)
        compare = _with_json(verbs.add_parser("diff", help="what changes from revision A to B"))
        compare.add_argument("a", type=int)
        compare.add_argument("b", type=int)
        back = _with_json(verbs.add_parser("rollback", help="push the content of an earlier revision"))
        back.add_argument("number", type=int)
        back.add_argument("--reason", required=True)
        _with_waves(back)
        out = verbs.add_parser("export", help="the whole configuration as YAML")
        out.add_argument("--output", type=Path, help="a file instead of the terminal")
        out.add_argument("--json", action="store_true", help="the same as JSON")
        take = _with_json(verbs.add_parser("apply", help="show what a file would change; with --reason change it"))
        take.add_argument("file", type=Path)
        take.add_argument("--reason", help="why; without it only the plan is shown")
        check = _with_json(verbs.add_parser("verify", help="check a bundle with a public key, without the database"))
        check.add_argument("file", type=Path)
        check.add_argument("--key", required=True, help="public key: base64url, or a file that holds it")
        check.add_argument("--successions", type=Path, help="file of successions that lead from that key to another")
        save = verbs.add_parser("bundle", help="write a revision's signed bundle of one pool to a file")
        save.add_argument("number", type=int)
        save.add_argument("pool")
        save.add_argument("--output", type=Path, help="a file instead of the terminal")
        save.add_argument("--json", action="store_true", help="it is JSON anyway")
        keys = _with_json(verbs.add_parser("keys", help="public keys, and how each follows from its predecessor"))
        keys.add_argument("--successions", action="store_true", help="only the successions, as `verify` reads them")
        key = _with_json(verbs.add_parser("rotate-key", help="revoke a signing key and make its successor"))
        key.add_argument("use", choices=SigningKey.Use.values)

    def handle(self, *args: Any, **options: Any) -> None:
        if options["verb"] == "verify":
            # Neither database nor installation: whoever holds a bundle and a public key can run it.
            self._print(verify_files(options["file"], options["key"], options["successions"]), options)
            return
        if not Installation.objects.filter(pk=1).exists():
            raise CommandError("the installation is not set up: run `manage.py demo` first", returncode=UNUSABLE)
        verb = options["verb"].replace("-", "_")
        try:
            answer, lines = getattr(self, f"_{verb}")(options)
        except ValidationError as error:
            raise CommandError("; ".join(error.messages), returncode=UNUSABLE) from error
        except Unreadable as error:
            lines = [f"{options['file']}: {problem}" for problem in error.problems]
            raise CommandError("\n".join(lines), returncode=UNUSABLE) from error
        self._print((answer, lines), options)

    def _print(self, said: tuple[Any, list[str]], options: dict[str, Any]) -> None:
        answer, lines = said
        self.stdout.write(json.dumps(answer, default=str, indent=2) if options["json"] else "\n".join(lines))

    def _plan(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        found = review(timezone.now())
        return _review_json(found), _review_lines(found)

    def _push(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        revision = push(actor=command_actor(), reason=options["reason"], now=timezone.now(), **_way(options))
        return _pushed(revision)

    def _rollback(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        revision = rollback(
            to_number=options["number"],
            actor=command_actor(),
            reason=options["reason"],
            now=timezone.now(),
            **_way(options),
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
        answer = {"before": options["a"], "after": options["b"], "changes": [change._asdict() for change in changes]}
        return answer, summary(changes, most=len(changes)) or ["no change"]

    def _export(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        text = export_text(timezone.now())
        if options["output"] is not None:
            _write(options["output"], text.encode())
            return {"file": str(options["output"]), "bytes": len(text.encode())}, [f"written to {options['output']}"]
        return read_lines(text).value, [text.rstrip("\n")]

    def _apply(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        text, now = _read(options["file"]), timezone.now()
        found = prepare(text, now)
        lines = [f"  {step.sentence}" for step in found.plan.steps]
        answer = {"steps": [step.sentence for step in found.plan.steps], **found.plan.counts, "applied": False}
        if found.plan.empty:
            return answer, ["nothing to change: the installation is as the file says"]
        if not options["reason"]:
            return answer, [
                f"{len(lines)} steps:",
                *lines,
                "Nothing was changed yet: give --reason to apply this plan.",
            ]
        if not options["json"]:
            self.stdout.write("\n".join([f"{len(lines)} steps:", *lines]))
        apply(text, actor=command_actor(), now=now, reason=options["reason"], against=found.against)
        return answer | {"applied": True}, [f"applied {len(lines)} steps; `manage.py policy plan` shows what to push"]

    def _bundle(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        row = PolicyBundle.objects.filter(revision_id=options["number"], pool__slug=options["pool"]).first()
        found = bundle(row.pool_id, row.digest) if row is not None else None
        if found is None:
            said = f"revision {options['number']} has no signed bundle for pool {options['pool']}"
            raise CommandError(said, returncode=UNUSABLE)
        if options["output"] is not None:
            _write(options["output"], found)
            return {"file": str(options["output"])}, [f"written to {options['output']}"]
        return json.loads(found), [found.decode()]

    def _keys(self, options: dict[str, Any]) -> tuple[Any, list[str]]:
        if options["successions"]:
            chain = msgspec.to_builtins(successions())
            return chain, [json.dumps(chain, indent=2)]
        rows = public_keys()
        lines = [
            f"{row.use:6} {row.kid} {'revoked' if row.revoked_at else 'in use'} {row.public_key}"
            + (f" after {row.predecessor}" if row.predecessor else "")
            for row in rows
        ]
        return [asdict(row) | {"predecessor": row.predecessor or None} for row in rows], lines

    def _rotate_key(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        kid = rotate(options["use"], timezone.now())
        return {"use": options["use"], "kid": kid}, [f"{options['use']} key is now {kid}; the sweep signs again"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}", returncode=UNUSABLE) from error


def _write(path: Path, raw: bytes) -> None:
    try:
        path.write_bytes(raw)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}", returncode=UNUSABLE) from error


def verify_files(file: Path, key: str, chain: Path | None) -> tuple[dict[str, Any], list[str]]:
    """What a bundle says of itself, when its signature holds; CommandError with exit 1 when it does not."""
    raw = _read(file)
    text = _read(Path(key)).decode("ascii", "replace").strip() if Path(key).is_file() else key
    links = _read(chain) if chain is not None else b"[]"
    try:
        found = verify_bundle(raw, public_key=text, successions=links)
    except UnverifiedBundle as error:
        raise CommandError(f"{file}: {error}", returncode=1) from error
    line = (
        f"{file} holds: revision {found['revision']} for pool {found['pool']} of installation {found['installation']}, "
        f"signed by {found['kid']}"
    )
    return found, [line]


def _with_json(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _with_waves(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--waves", default="100", help="for example agent:gpu-01,25,100 (also pool:NAME); default all at once"
    )
    parser.add_argument("--hold", type=int, default=Gates.hold_s, help="seconds a wave is held after its last answer")
    parser.add_argument("--refusals", type=int, default=Gates.refusals_most, help="agents of a wave that may refuse")
    parser.add_argument("--refusals-percent", type=int, default=Gates.refusals_most_percent, help="the same as a share")
    parser.add_argument("--silent", type=int, default=Gates.silent_most, help="agents of a wave that may fall silent")
    parser.add_argument("--burn", type=float, default=Gates.burn_most, help="burn rate that stops; 0: not asked")
    parser.add_argument(
        "--gate-timeout", type=int, default=Gates.gate_timeout_s, help="seconds before a person is asked"
    )


def _way(options: dict[str, Any]) -> dict[str, Any]:
    """Waves and their gates; all at once has none."""
    waves = read_waves(options["waves"])
    gates = Gates(
        hold_s=options["hold"],
        gate_timeout_s=options["gate_timeout"],
        refusals_most=options["refusals"],
        refusals_most_percent=options["refusals_percent"],
        silent_most=options["silent"],
        burn_most=options["burn"] or None,
    )
    return {"waves": waves, "gates": gates if len(waves) > 1 else None}


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
        "changes": [change._asdict() for change in found.changes],
        "errors": [asdict(item) for item in found.errors],
        "warnings": [asdict(item) for item in found.warnings],
    }


def _review_lines(found: Review) -> list[str]:
    against = f"against revision {found.against.number}" if found.against else "first push"
    lines = [f"{found.tally} ({against})", *(f"  {line}" for line in summary(found.changes))]
    for item in found.findings:
        lines.append(f"{item.severity} {item.rule} {item.subject}: {item.message} {item.action}")
    return lines
