"""What people do about alerts: acknowledge, silence, say who is told. Each is audited with its reason."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction

from controlplane.alerts.delivering import send_again, tell, tell_test
from controlplane.alerts.messages import OVERLAP
from controlplane.alerts.models import Alert, AlertChange, Delivery, Event, Receiver, Severity, Silence
from controlplane.alerts.queries import shown_target, silence_of, silences_in_force
from controlplane.audit.actions import changes, record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.tenants.actions import Stale
from controlplane.web import outbound

SILENCE_LONGEST = timedelta(days=30)
PLANNED_AHEAD_MOST = timedelta(days=365)
KINDS = ("burn", "absence", "overdue", "lost", "deadline", "parked", "drift", "uncounted")
KIND_WORDS = {
    "burn": "Error budget burns",
    "absence": "No telemetry",
    "overdue": "Slot past its drain bound",
    "lost": "Agent vanished",
    "deadline": "Batch deadline at risk",
    "parked": "Batch items parked",
    "drift": "Agents run another revision",
    "uncounted": "Usage in no total",
}
EVENT_KINDS = ("deploy", "network", "hardware", "config", "other")
EVENT_AHEAD_MOST, EVENT_BACK_MOST = timedelta(minutes=5), timedelta(days=14)
RECEIVER_FIELDS = ("name", "kind", "target", "severity", "enabled")


class AlreadyEnded(ValueError):
    """The alert or silence is over: nothing was changed."""


# ---- alerts ----


def acknowledge(*, alert_id: int, note: str, actor: Actor, now: datetime) -> Alert:
    """Somebody looks after it: it is told to nobody again unless it gets worse. Twice keeps the first.

    Raises AlreadyEnded for a resolved alert, ValidationError without a note.
    """
    note = checked_reason(note)
    with transaction.atomic():
        alert = _locked_open(alert_id)
        if alert.acknowledged_at is not None:
            return alert
        alert.acknowledged_at, alert.acknowledged_by, alert.note = now, actor.name, note
        alert.save(update_fields=["acknowledged_at", "acknowledged_by", "note"])
        _changed(alert, AlertChange.Kind.ACKNOWLEDGED, "alert.acknowledge", note, actor, now)
        if alert.notified_at is not None and silence_of(alert, silences_in_force(now)) is None:
            tell(AlertChange.Kind.ACKNOWLEDGED, [alert], now)
    return alert


def rearm(*, alert_id: int, note: str, actor: Actor, now: datetime) -> Alert:
    """Takes an acknowledgement back: nobody looks after it, and receivers are told as of a new alert."""
    note = checked_reason(note)
    with transaction.atomic():
        alert = _locked_open(alert_id)
        if alert.acknowledged_at is None:
            return alert
        alert.acknowledged_at, alert.acknowledged_by, alert.note, alert.notified_at = None, "", "", None
        alert.save(update_fields=["acknowledged_at", "acknowledged_by", "note", "notified_at"])
        _changed(alert, AlertChange.Kind.REARMED, "alert.rearm", note, actor, now)
    return alert


def _locked_open(alert_id: int) -> Alert:
    alert = Alert.objects.select_for_update().get(pk=alert_id)
    if alert.resolved_at is not None:
        raise AlreadyEnded(f"The alert ended at {alert.resolved_at:%H:%M:%S} UTC: there is nothing left to do.")
    return alert


def _changed(alert: Alert, kind: AlertChange.Kind, action: str, note: str, actor: Actor, now: datetime) -> None:
    AlertChange.objects.create(alert=alert, at=now, kind=kind, by=actor.name, note=note)
    record(
        actor=actor, action=action, noun="alert", object_id=str(alert.pk), before=None,
        after={"key": alert.key, "acknowledged": alert.acknowledged_at is not None}, reason=note, now=now,
    )  # fmt: skip


# ---- silences ----


def create_silence(
    *, kinds: Sequence[str], pool: str, contract: str, starts_at: datetime, ends_at: datetime, reason: str,
    actor: Actor, now: datetime,
) -> Silence:  # fmt: skip
    """Keeps receivers from being told of what fits. Raises ValidationError by field."""
    reason = checked_reason(reason)
    wrong: dict[str, str] = {}
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        wrong["kinds"] = f"There is no kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}."
    if not (kinds or pool or contract):
        wrong["kinds"] = "Choose a kind, a pool or a contract: a silence over everything would hide every incident."
    if ends_at <= max(now, starts_at):
        wrong["ends_at"] = "It must end after now and after its beginning."
    elif ends_at - max(now, starts_at) > SILENCE_LONGEST:
        wrong["ends_at"] = f"It may last {SILENCE_LONGEST.days} days at most."
    if starts_at - now > PLANNED_AHEAD_MOST:
        wrong["starts_at"] = "It may begin within a year."
    if wrong:
        raise ValidationError(wrong)
    with transaction.atomic():
        row = Silence.objects.create(
            kinds=list(kinds), pool=pool, contract=contract, starts_at=max(starts_at, now), ends_at=ends_at,
            created_by=actor.name, created_at=now, reason=reason,
        )  # fmt: skip
        record(
            actor=actor, action="silence.create", noun="silence", object_id=str(row.pk), before=None,
            after=_silence_values(row), reason=reason, now=now,
        )  # fmt: skip
    return row


def end_silence(*, silence_id: int, reason: str, actor: Actor, now: datetime) -> Silence:
    """Ends a silence now: what is still open and was never told is told with the next look. Twice changes nothing."""
    reason = checked_reason(reason)
    with transaction.atomic():
        row = Silence.objects.select_for_update().get(pk=silence_id)
        if row.ended_at is not None or row.ends_at <= now:
            raise AlreadyEnded("The silence is over.")
        row.ended_at = now
        row.save(update_fields=["ended_at"])
        record(
            actor=actor, action="silence.end", noun="silence", object_id=str(row.pk), before=_silence_values(row),
            after={"ended_at": now.isoformat()}, reason=reason, now=now,
        )  # fmt: skip
    return row


def _silence_values(row: Silence) -> dict[str, Any]:
    return {
        "kinds": row.kinds, "pool": row.pool, "contract": row.contract, "starts_at": row.starts_at.isoformat(),
        "ends_at": row.ends_at.isoformat(),
    }  # fmt: skip


# ---- events ----


def create_event(*, at: datetime, kind: str, title: str, url: str, pool: str, actor: Actor, now: datetime) -> Event:
    """Notes what happened outside, for the lane "what changed". Raises ValidationError by field."""
    wrong: dict[str, str] = {}
    if kind not in EVENT_KINDS:
        wrong["kind"] = f"Choose one of {', '.join(EVENT_KINDS)}."
    if not title.strip():
        wrong["title"] = "Say what happened, in a few words."
    if at > now + EVENT_AHEAD_MOST:
        wrong["at"] = "It lies in the future: post it when it happens."
    elif at < now - EVENT_BACK_MOST:
        wrong["at"] = f"It lies more than {EVENT_BACK_MOST.days} days back."
    if url:
        try:
            outbound.checked_url(url)
        except outbound.Refused as error:
            wrong["url"] = str(error)
    if wrong:
        raise ValidationError(wrong)
    with transaction.atomic():
        row = Event.objects.create(
            at=at, kind=kind, title=title.strip(), url=url, pool=pool, created_by=actor.name, created_at=now
        )
        record(
            actor=actor, action="event.create", noun="event", object_id=str(row.pk), before=None,
            after={"kind": kind, "title": row.title, "at": at.isoformat(), "pool": pool}, now=now,
        )  # fmt: skip
    return row


# ---- receivers ----


def create_receiver(*, values: Mapping[str, Any], reason: str, actor: Actor, now: datetime) -> Receiver:
    """Somebody more is told. `values`: RECEIVER_FIELDS. Raises ValidationError by field."""
    reason = checked_reason(reason)
    _check_receiver(values)
    with transaction.atomic():
        row = Receiver.objects.create(**values, created_at=now, updated_at=now)
        _record_receiver(row, "receiver.create", None, _receiver_values(row), reason, actor, now)
    return row


def edit_receiver(
    *, receiver_id: int, values: Mapping[str, Any], reason: str, actor: Actor, now: datetime, version: int | None = None
) -> Receiver:
    """Changes any of RECEIVER_FIELDS but the kind. Raises ValidationError by field, Stale for an old `version`."""
    reason = checked_reason(reason)
    with transaction.atomic():
        row = _locked_receiver(receiver_id, version)
        before = _receiver_values(row)
        wanted = {**before, **values, "kind": row.kind}
        _check_receiver(wanted)
        old, new = changes(before, wanted)
        if not new:
            return row
        for name in new:
            setattr(row, name, wanted[name])
        _save_receiver(row, now, *new)
        _record_receiver(row, "receiver.edit", old, new, reason, actor, now)
    return row


def rotate_secret(
    *, receiver_id: int, reason: str, actor: Actor, now: datetime, version: int | None = None
) -> Receiver:
    """A new secret; for a day the one before signs too, so that the receiver can be changed in peace."""
    reason = checked_reason(reason)
    with transaction.atomic():
        row = _locked_receiver(receiver_id, version)
        row.previous_secret_id, row.previous_until, row.secret_id = row.secret_id, now + OVERLAP, uuid.uuid4()
        _save_receiver(row, now, "previous_secret_id", "previous_until", "secret_id")
        _record_receiver(row, "receiver.rotate_secret", None, {"rotated": True}, reason, actor, now)
    return row


def archive_receiver(
    *, receiver_id: int, reason: str, actor: Actor, now: datetime, version: int | None = None
) -> Receiver:
    """Tells this receiver nothing more; its delivery log stays."""
    reason = checked_reason(reason)
    with transaction.atomic():
        row = _locked_receiver(receiver_id, version)
        row.archived_at = now
        _save_receiver(row, now, "archived_at")
        _record_receiver(row, "receiver.archive", None, {"archived": True}, reason, actor, now)
    return row


def send_test(*, receiver_id: int, actor: Actor, now: datetime) -> Delivery:
    """A test message, on its way with the next round."""
    with transaction.atomic():
        row = _locked_receiver(receiver_id, None)
        return tell_test(row, actor.name, now)


def resend(*, delivery_id: int, actor: Actor, now: datetime) -> Delivery:
    """A message that was given up, once more."""
    with transaction.atomic():
        row = Delivery.objects.select_for_update().select_related("receiver").get(pk=delivery_id)
        send_again(row, now)
        _record_receiver(
            row.receiver, "receiver.resend", None, {"message": str(row.message_id)}, "sent again", actor, now
        )
    return row


def _check_receiver(values: Mapping[str, Any]) -> None:
    wrong: dict[str, str] = {}
    if not str(values.get("name", "")).strip():
        wrong["name"] = "Enter a name."
    if values.get("severity") not in Severity.values:
        wrong["severity"] = "Choose page or ticket."
    kind, target = values.get("kind"), str(values.get("target", ""))
    if kind == Receiver.Kind.WEBHOOK:
        wrong |= _check_address(target)
    elif kind == Receiver.Kind.EMAIL:
        try:
            validate_email(target)
        except ValidationError:
            wrong["target"] = "Enter an e-mail address such as oncall@example.com."
    else:
        wrong["kind"] = "Choose webhook or email."
    if wrong:
        raise ValidationError(wrong)


def _check_address(target: str) -> dict[str, str]:
    """What can be said of an address at once; names are resolved when a message goes out."""
    try:
        parts = outbound.checked_url(target)
        if parts.scheme == "http" and not settings.OUTBOUND_ALLOW:
            return {"target": "Use https: a message over plain http can be read and changed on its way."}
        outbound.refuse_address(parts.hostname or "", settings.OUTBOUND_ALLOW)
    except outbound.Refused as error:
        return {"target": str(error)}
    return {}


def _locked_receiver(receiver_id: int, version: int | None) -> Receiver:
    row = Receiver.objects.select_for_update().get(pk=receiver_id, archived_at=None)
    if version is not None and row.version != version:
        raise Stale(row)
    return row


def _save_receiver(row: Receiver, now: datetime, *names: str) -> None:
    row.updated_at, row.version = now, row.version + 1
    row.save(update_fields=[*names, "updated_at", "version"])


def _receiver_values(row: Receiver) -> dict[str, Any]:
    return {name: getattr(row, name) for name in RECEIVER_FIELDS}


def _record_receiver(
    row: Receiver,
    action: str,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    reason: str,
    actor: Actor,
    now: datetime,
) -> None:
    record(
        actor=actor, action=action, noun="receiver", object_id=str(row.pk), before=_shown(before), after=_shown(after),
        reason=reason, now=now,
    )  # fmt: skip


def _shown(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """Without what lets whoever reads it write to a receiver."""
    if values is None or "target" not in values:
        return values
    return {**values, "target": shown_target(str(values["target"]))}
