"""Reading alerts, silences, receivers and deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from django.db.models import Q, QuerySet
from django.http import Http404

from controlplane.alerts.models import Alert, Delivery, Receiver, Silence


@dataclass(frozen=True, slots=True)
class Mark:
    """What people did about an open alert."""

    alert_id: int
    acknowledged_by: str
    acknowledged_at: datetime | None
    silenced_until: datetime | None


def open_alerts() -> QuerySet[Alert]:
    """Not resolved, pages first, then the oldest."""
    return Alert.objects.filter(resolved_at=None).order_by("severity", "raised_at", "id")


def silences_in_force(now: datetime) -> list[Silence]:
    return list(Silence.objects.filter(starts_at__lte=now, ends_at__gt=now, ended_at=None).order_by("-ends_at"))


def silences_to_come(now: datetime) -> QuerySet[Silence]:
    """In force or planned, the next to begin first."""
    return Silence.objects.filter(ends_at__gt=now, ended_at=None).order_by("starts_at", "id")


def silences_over(now: datetime) -> QuerySet[Silence]:
    return Silence.objects.filter(Q(ends_at__lte=now) | ~Q(ended_at=None))


def fits(silence: Silence, alert: Alert) -> bool:
    """Does the silence cover the alert?"""
    return (
        (not silence.kinds or alert.kind in silence.kinds)
        and (not silence.pool or silence.pool == alert.pool)
        and (not silence.contract or silence.contract == alert.contract)
    )


def silence_of(alert: Alert, silences: Sequence[Silence]) -> Silence | None:
    """The silence that covers the alert longest; None when it is told."""
    return max((one for one in silences if fits(one, alert)), key=lambda one: one.ends_at, default=None)


def marks(now: datetime) -> dict[str, Mark]:
    """What was done about each open alert, by key."""
    silences = silences_in_force(now)
    found = {}
    for alert in open_alerts():
        silence = silence_of(alert, silences)
        found[alert.key] = Mark(
            alert.pk, alert.acknowledged_by, alert.acknowledged_at, None if silence is None else silence.ends_at
        )
    return found


def alert_or_404(alert_id: int) -> Alert:
    alert = Alert.objects.filter(pk=alert_id).first()
    if alert is None:
        raise Http404("There is no such alert.")
    return alert


def receiver_or_404(receiver_id: int) -> Receiver:
    receiver = Receiver.objects.filter(pk=receiver_id, archived_at=None).first()
    if receiver is None:
        raise Http404("There is no such receiver.")
    return receiver


def shown_target(target: str) -> str:
    """A target as everybody may see it: paths of chat webhooks are secrets."""
    parts = urlsplit(target)
    return f"{parts.scheme}://{parts.netloc}/…" if parts.netloc else target


def receivers() -> QuerySet[Receiver]:
    return Receiver.objects.filter(archived_at=None).order_by("name", "id")


def last_deliveries(receivers: Sequence[Receiver]) -> dict[int, Delivery]:
    """The latest message of each receiver that was ever told something, by the receiver's id."""
    rows = Delivery.objects.filter(receiver__in=receivers).order_by("receiver_id", "-created_at", "-id")
    return {row.receiver_id: row for row in rows.distinct("receiver_id")}


def deliveries_of(receiver: Receiver) -> QuerySet[Delivery]:
    return receiver.deliveries.prefetch_related("log")
