"""What people do in the lab: ask, cancel, ask again, share, and use a safe rate that was found."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.experiments import inputs
from controlplane.experiments.models import Experiment, ExperimentResult
from controlplane.experiments.preparing import Prepared, checked, is_light, outline, prepare
from controlplane.experiments.queries import answer_of, safe_rates_of
from controlplane.fleet.actions import edit_pool
from controlplane.fleet.models import Pool
from controlplane.policy.configuration import Configuration

WAITING_MAX: Final = 20
VALID_DAYS_MAX: Final = 365


class Over(ValueError):
    """The experiment has ended: there is nothing to cancel."""


def ask(
    *, kind: str, title: str, values: Mapping[str, Any], actor: Actor, now: datetime, upload: bytes | None = None,
    draft: Configuration | None = None,
) -> Experiment:  # fmt: skip
    """Keeps the inputs and writes down that the question is asked; the caller rings after the commit.

    It takes a small part of a second: `preparing` says what is left to a worker.
    `values` are the cleaned ones of the kind's form. Raises ValidationError by field.
    """
    if values.get("source") == "file" and upload is None:
        raise ValidationError({"file": "Choose a trace file."})
    light = is_light(kind, values, upload)
    if light:
        prepared = prepare(kind, values, upload)
        checked(kind, prepared)
    else:
        prepared = outline(kind, values, now, upload, draft)
    return _keep(kind, title, dict(values), prepared, light, actor, now)


def _keep(
    kind: str, title: str, parameters: dict[str, Any], prepared: Prepared, whole: bool, actor: Actor, now: datetime,
) -> Experiment:  # fmt: skip
    with transaction.atomic():
        _room()
        row = Experiment.objects.create(
            kind=kind, title=title, parameters=parameters, arguments=prepared.arguments,
            inputs=inputs.store(prepared.files, now), seed=int(parameters["seed"]), source=prepared.source,
            pool=prepared.pool, draft_digest=prepared.draft_digest, prepared=whole, created_at=now,
            created_by=actor.name,
        )  # fmt: skip
        _audit(row, "experiment.ask", actor, now)
    return row


def _room() -> None:
    if Experiment.objects.filter(state__in=Experiment.AT_WORK).count() >= WAITING_MAX:
        raise ValidationError(f"{WAITING_MAX} experiments are waiting or running: cancel one, or wait for the first.")


def _audit(row: Experiment, action: str, actor: Actor, now: datetime, reason: str = "", **after: Any) -> None:
    said = {"kind": row.kind, "title": row.title, "source": row.source, "seed": row.seed, **after}
    record(actor=actor, action=action, noun="experiment", object_id=row.pk, now=now, after=said, reason=reason)


def rerun(*, experiment_id: int, actor: Actor, now: datetime) -> Experiment:
    """The same question again: same inputs, same seed, so the answer has to be the same bytes.

    Raises ValidationError where its inputs have ended.
    """
    with transaction.atomic():
        _room()
        inputs.hold()
        old = Experiment.objects.get(pk=experiment_id)
        if inputs.gone(old):
            raise ValidationError("Its inputs were kept for as long as the settings say and have ended: ask anew.")
        row = Experiment.objects.create(
            kind=old.kind, title=old.title, parameters=old.parameters, arguments=old.arguments, inputs=old.inputs,
            seed=old.seed, source=old.source, pool=old.pool, draft_digest=old.draft_digest, prepared=old.prepared,
            rerun_of=old, created_at=now, created_by=actor.name,
        )  # fmt: skip
        _audit(row, "experiment.rerun", actor, now, rerun_of=old.pk)
    return row


def cancel(*, experiment_id: int, actor: Actor, now: datetime) -> Experiment:
    """Ends it; its process is killed within a second. Raises Over for one that has ended."""
    with transaction.atomic():
        row = Experiment.objects.select_for_update().get(pk=experiment_id)
        if not row.at_work:
            raise Over(f"It has ended already: {row.get_state_display().lower()}.")
        row.state, row.ended_at = Experiment.State.CANCELLED, now
        row.save(update_fields=["state", "ended_at"])
        _audit(row, "experiment.cancel", actor, now)
    return row


def share(*, experiment_id: int, shared: bool, actor: Actor, now: datetime) -> Experiment:
    """Makes a link that shows the answer and nothing to press, or withdraws it. Twice keeps the first link."""
    with transaction.atomic():
        row = Experiment.objects.select_for_update().get(pk=experiment_id)
        if shared == (row.share_token is not None):
            return row
        row.share_token = secrets.token_urlsafe(32) if shared else None
        row.save(update_fields=["share_token"])
        _audit(row, "experiment.share" if shared else "experiment.unshare", actor, now)
    return row


def use_safe_rate(*, experiment_id: int, pool_slug: str, days: int, reason: str, actor: Actor, now: datetime) -> Pool:
    """Makes the rates of an interference test the pool's safe rate: the next push brings them to the flex guard.

    Raises ValidationError for rates that are not there or do not fit the pool.
    """
    row = Experiment.objects.select_related("result").get(pk=experiment_id)
    if not 1 <= days <= VALID_DAYS_MAX:
        raise ValidationError({"days": f"Enter 1 to {VALID_DAYS_MAX} days."})
    if not Pool.objects.filter(slug=pool_slug, archived_at__isnull=True).exists():
        raise ValidationError({"pool": "There is no such pool."})
    result: ExperimentResult | None = getattr(row, "result", None)
    entries = {} if result is None else safe_rates_of(answer_of(row))
    if result is None or not entries:
        raise ValidationError("The experiment found no rate that meets its objective: there is nothing to use.")
    table = {
        "entries": entries,
        "measured_at": result.created_at.isoformat(),
        "trace": f"experiment {row.pk}: {row.source}"[:200],
        "valid_until": (now + timedelta(days=days)).isoformat(),
    }
    with transaction.atomic():
        inputs.hold()
        Experiment.objects.filter(pk=row.pk).update(evidence=True)
        return edit_pool(slug=pool_slug, values={"safe_rate": table}, actor=actor, now=now, reason=reason)
