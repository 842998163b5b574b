"""What is seen becomes alerts: raised once, kept up, escalated, resolved; messages are written with each change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction

from controlplane.alerts.delivering import tell
from controlplane.alerts.models import Alert, AlertChange, Severity
from controlplane.alerts.queries import open_alerts, silence_of, silences_in_force

#: A condition that is not seen for this long has ended; a single look that misses it changes nothing.
HOLD = timedelta(seconds=15)
_LOCK = 0x0A1E_2701
_FOLLOWED = (
    "severity", "grade", "word", "group", "pool", "contract", "title", "text", "url", "causes", "since",
)  # fmt: skip

Kind = AlertChange.Kind


@dataclass(frozen=True, slots=True)
class Seen:
    """A condition that holds now. `group`: what changes together is told in one message."""

    key: str
    kind: str
    severity: Severity
    grade: str
    word: str
    group: str
    title: str
    text: str = ""
    url: str = ""
    pool: str = ""
    contract: str = ""
    since: datetime | None = None
    causes: list[dict[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Observed:
    """What one look changed."""

    raised: list[Alert] = field(default_factory=list)
    escalated: list[Alert] = field(default_factory=list)
    resolved: list[Alert] = field(default_factory=list)


def observe(seen: Iterable[Seen], now: datetime, *, unknown: Collection[str] = frozenset()) -> Observed:
    """Follows what is seen. Alerts of a group in `unknown` stay open: what cannot be judged has not ended.

    Safe to run at any time from several processes; a look that comes late and older than what was seen changes nothing
    but what it raises.
    """
    found = Observed()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        rows = {alert.key: alert for alert in open_alerts()}
        present = []
        for one in seen:
            alert = rows.get(one.key)
            if alert is None:
                alert = rows[one.key] = _raise(one, now)
                found.raised.append(alert)
            elif _follow(alert, one, now):
                found.escalated.append(alert)
            present.append(alert.pk)
        Alert.objects.filter(pk__in=present, seen_at__lt=now).update(seen_at=now)
        kept = set(present)
        for alert in rows.values():
            if alert.pk not in kept and alert.group not in unknown and now - alert.seen_at >= HOLD:
                _resolve(alert, now)
                found.resolved.append(alert)
        _tell(list(rows.values()), found, now)
    return found


def _raise(one: Seen, now: datetime) -> Alert:
    values: dict[str, Any] = {name: getattr(one, name) for name in _FOLLOWED}
    alert = Alert.objects.create(key=one.key, kind=one.kind, raised_at=now, seen_at=now, **values)
    AlertChange.objects.create(alert=alert, at=now, kind=Kind.RAISED)
    return alert


def _follow(alert: Alert, one: Seen, now: datetime) -> bool:
    """Takes over what is said now; True when a ticket became a page, which ends its acknowledgement."""
    changed = [name for name in _FOLLOWED if getattr(alert, name) != getattr(one, name)]
    escalated = "severity" in changed and one.severity == Severity.PAGE
    for name in changed:
        setattr(alert, name, getattr(one, name))
    if escalated:
        alert.acknowledged_at, alert.acknowledged_by, alert.note = None, "", ""
        changed += ["acknowledged_at", "acknowledged_by", "note"]
        AlertChange.objects.create(alert=alert, at=now, kind=Kind.ESCALATED)
    if changed:
        alert.save(update_fields=changed)
    return escalated


def _resolve(alert: Alert, now: datetime) -> None:
    alert.resolved_at = now
    alert.save(update_fields=["resolved_at"])
    AlertChange.objects.create(alert=alert, at=now, kind=Kind.RESOLVED)


def _tell(alerts: Sequence[Alert], found: Observed, now: datetime) -> None:
    """Messages for what nobody silences; an end is told to those only who were told of the beginning."""
    silences = silences_in_force(now)
    loud = [a for a in alerts if a.resolved_at is None and silence_of(a, silences) is None]
    hushed = [alert for alert in found.escalated if alert not in loud]
    for alert in hushed:
        alert.notified_at = None  # told as new when its silence ends
    Alert.objects.filter(pk__in=[alert.pk for alert in hushed]).update(notified_at=None)
    new = [alert for alert in loud if alert.notified_at is None and alert.acknowledged_at is None]
    again = [alert for alert in found.escalated if alert in loud and alert not in new]
    for event, rows in (
        (Kind.RAISED, new),
        (Kind.ESCALATED, again),
        (Kind.RESOLVED, [alert for alert in found.resolved if alert.notified_at is not None]),
    ):
        tell(event, rows, now)
    for alert in new:
        alert.notified_at = now
    Alert.objects.filter(pk__in=[alert.pk for alert in new]).update(notified_at=now)
