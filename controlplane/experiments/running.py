"""Runs an experiment in a process of its own: it can be killed, has its own memory, and takes nobody's turn."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane.experiments import inputs
from controlplane.experiments.models import Experiment, ExperimentResult
from controlplane.experiments.preparing import complete
from controlplane.lab.asking import ANSWER
from controlplane.wire.signing import digest_hex

log = logging.getLogger(__name__)

RUNNING_MAX: Final = 2
TIME_LIMIT_S: Final = 600.0
ANSWER_BYTES_MAX: Final = 32 << 20
LOOK_EVERY_S: Final = 0.5
LOST_AFTER: Final = timedelta(seconds=60)
RUN_LOCK: Final = 0x6C61625F
"""Any fixed number: those that take an experiment up take turns, so that no more than RUNNING_MAX run."""
CODE: Final = ("controlplane.core", "controlplane.wire", "controlplane.agent", "controlplane.lab")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended: an answer, or a problem; both empty: it was cancelled."""

    content: bytes = b""
    problem: str = ""
    seconds: float = 0.0


@lru_cache(maxsize=1)
def code_version() -> str:
    """A digest of the code that answers depend on: with another one, equal inputs may give another answer."""
    digest = hashlib.sha256()
    for name in CODE:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations is not None
        folder = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def run(experiment_id: int) -> bool:
    """Runs one that waits, or was lost by a worker; False when there is nothing to do or no room."""
    row = _claim(experiment_id, timezone.now())
    if row is None:
        return False
    try:
        outcome = _run(row) if row.prepared or _prepared(row) else Outcome()
    except ValidationError as error:
        outcome = Outcome(problem=" ".join(error.messages)[:400])
    except Exception:
        log.exception("experiment %s failed", row.pk)
        outcome = Outcome(problem="It could not be run. The log of the worker says why.")
    _end(row, outcome, timezone.now())
    return True


def _claim(experiment_id: int, now: datetime) -> Experiment | None:
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [RUN_LOCK])
        at_work = Experiment.objects.filter(state=Experiment.State.RUNNING, seen_at__gte=now - LOST_AFTER).count()
        if at_work >= RUNNING_MAX:
            return None
        row = Experiment.objects.select_for_update(skip_locked=True).filter(_free(now), pk=experiment_id).first()
        if row is None:
            return None
        row.state, row.started_at, row.seen_at, row.progress, row.runs = Experiment.State.RUNNING, now, now, 0.0, 0
        row.save(update_fields=["state", "started_at", "seen_at", "progress", "runs"])
    return row


def _free(now: datetime) -> Q:
    """Those that nobody works on: they wait, or their worker was lost."""
    return Q(state=Experiment.State.WAITING) | Q(state=Experiment.State.RUNNING, seen_at__lt=now - LOST_AFTER)


def _mine(row: Experiment) -> QuerySet[Experiment]:
    """The experiment while this run of it is on; nothing once somebody cancelled it or took it up anew."""
    return Experiment.objects.filter(pk=row.pk, state=Experiment.State.RUNNING, started_at=row.started_at)


def _prepared(row: Experiment) -> bool:
    """Reads what its outline names and keeps it; False where somebody cancelled meanwhile. Raises ValidationError."""
    made = complete(row.kind, row.parameters, inputs.read(row))
    now = timezone.now()
    with transaction.atomic():
        row.arguments, row.inputs, row.source = made.arguments, inputs.store(made.files, now), made.source
        return bool(
            _mine(row).update(arguments=row.arguments, inputs=row.inputs, source=row.source, prepared=True, seen_at=now)
        )


def _run(row: Experiment) -> Outcome:
    with _process_of(row) as (process, folder, errors):
        outcome = _follow(row, process)
        if outcome is None:
            errors.seek(0)
            log.error("experiment %s ended early: %s", row.pk, errors.read()[-2_000:].decode(errors="replace"))
            return Outcome(problem="Its process ended early. The log of the worker says why.")
        if outcome.problem or not outcome.seconds:
            return outcome
        path = folder / ANSWER
        if path.stat().st_size > ANSWER_BYTES_MAX:
            return Outcome(problem="Its answer is too large to keep. Choose a shorter window or fewer tenants.")
        return Outcome(path.read_bytes(), "", outcome.seconds)


@contextmanager
def _process_of(row: Experiment) -> Iterator[tuple[subprocess.Popen[bytes], Path, IO[bytes]]]:
    """The process that answers, its folder with the inputs, and its errors; killed when the block ends.

    Raises ValueError for inputs that were changed or are gone.
    """
    environment = {"PYTHONPATH": str(settings.BASE_DIR), "PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"}
    with tempfile.TemporaryDirectory(prefix="flexband-lab-") as name:
        folder = Path(name)
        for file, content in inputs.read(row).items():
            (folder / file).write_bytes(content)
        with open(folder / "errors", "w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "controlplane.lab", row.kind, *row.arguments], cwd=folder,
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
            try:
                yield process, folder, errors
            finally:
                process.kill()
                process.wait()


def _follow(row: Experiment, process: subprocess.Popen[bytes]) -> Outcome | None:
    """Reads what the process tells until it ends, is cancelled or out of time; None: it ended without a word."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + TIME_LIMIT_S
    said: dict[str, Any] = {}
    buffer = b""
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            selector.select(LOOK_EVERY_S)
            part = process.stdout.read()
            *lines, buffer = (buffer + (part or b"")).split(b"\n")
            for line in lines:
                said |= json.loads(line)
            if "error" in said:
                return Outcome(problem=str(said["error"])[:400])
            if "done" in said:
                process.wait(30)
                return Outcome(seconds=max(0.001, said["done"]))
            if part == b"":
                return None
            if not _told(row, said):
                return Outcome()
            if time.monotonic() > deadline_s:
                return Outcome(problem=f"It took longer than {TIME_LIMIT_S / 60:g} minutes. Choose a shorter window.")


def _told(row: Experiment, said: dict[str, Any]) -> bool:
    """Writes the progress down; False where somebody cancelled meanwhile."""
    now = timezone.now()
    return bool(_mine(row).update(progress=said.get("share", 0.0), runs=said.get("runs", 0), seen_at=now))


def _end(row: Experiment, outcome: Outcome, now: datetime) -> None:
    """Keeps the answer with the end, in one transaction; a cancelled experiment stays cancelled."""
    with transaction.atomic():
        held = _mine(row).select_for_update().first()
        if held is None:
            return
        held.ended_at, held.problem = now, outcome.problem
        held.state = Experiment.State.DONE if outcome.content else Experiment.State.FAILED
        if outcome.content:
            held.progress = 1.0
            ExperimentResult.objects.create(
                experiment=held, content=outcome.content, sha256=digest_hex(outcome.content),
                code_version=code_version(), seconds=outcome.seconds, created_at=now,
            )  # fmt: skip
        held.save(update_fields=["ended_at", "problem", "state", "progress"])


def again(row: Experiment) -> bytes:
    """The answer computed anew from what is stored, as bytes. Raises ValueError where the lab refuses."""
    with _process_of(row) as (process, folder, _):
        out, _ = process.communicate(timeout=TIME_LIMIT_S)
        said = json.loads(out.splitlines()[-1]) if out else {"error": "its process ended early"}
        if "error" in said:
            raise ValueError(said["error"])
        return (folder / ANSWER).read_bytes()


def waiting(now: datetime) -> list[int]:
    """Experiments that nobody works on, oldest first."""
    return list(Experiment.objects.filter(_free(now)).order_by("id").values_list("id", flat=True)[:RUNNING_MAX])
