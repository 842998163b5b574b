"""Messages on their way: written with the change they tell, sent at least once, tried again with growing pauses."""

from __future__ import annotations

import logging
import random
import smtplib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson
from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.db import connection, transaction
from django.db.models import F

from controlplane.alerts.messages import email_text, message, signature_headers
from controlplane.alerts.models import Alert, Delivery, DeliveryAttempt, Receiver, Severity
from controlplane.wakeups.bells import ring
from controlplane.web import outbound

log = logging.getLogger(__name__)

#: Pauses after the first, second, ... failed try; after the last one the message is given up (about 17 h in all).
PAUSES = tuple(timedelta(seconds=s) for s in (5, 30, 120, 600, 3_600, 14_400, 43_200))
#: A claim is another's again after this: the process that held it has died.
CLAIM = timedelta(seconds=60)
TIMEOUT_S = 10.0
SENDERS = 8
#: Messages of one round; a receiver that is slow takes at most a few of its places.
PER_ROUND, PER_RECEIVER = 32, 4


@dataclass(frozen=True, slots=True)
class Tried:
    """How one try went; `error` is empty when it was taken."""

    took_us: int
    status: int | None
    error: str


def tell(event: str, alerts: Sequence[Alert], now: datetime) -> None:
    """Writes the messages that tell `alerts` of `event`, one per group and receiver. Call it in a transaction."""
    groups: dict[str, list[Alert]] = defaultdict(list)
    for alert in alerts:
        groups[alert.group].append(alert)
    if not groups:
        return
    for receiver in Receiver.objects.filter(enabled=True, archived_at=None):
        for group, rows in groups.items():
            wanted = [row for row in rows if receiver.severity == Severity.TICKET or row.severity == Severity.PAGE]
            if wanted:
                subject, body = message(event, group, wanted, now)
                _write(receiver, event, subject, body, now).alerts.set(wanted)
    ring("alerts.send")


def tell_notice(kind: str, severity: Severity, subject: str, data: Mapping[str, object], now: datetime) -> None:
    """Tells, once, of something that happened and does not end, such as a budget's threshold. Call it in a transaction.

    `kind` becomes the message's type, such as `budget.threshold`.
    """
    body = {"type": kind, "timestamp": now.isoformat(), "data": {**data, "subject": subject, "alerts": []}}
    for receiver in Receiver.objects.filter(enabled=True, archived_at=None):
        if receiver.severity == Severity.TICKET or severity == Severity.PAGE:
            _write(receiver, "notice", subject, body, now)
    ring("alerts.send")


def tell_test(receiver: Receiver, by: str, now: datetime) -> Delivery:
    """A message that says it is a test."""
    subject = f"Test message, asked for by {by}"
    body = {
        "type": "alert.test",
        "timestamp": now.isoformat(),
        "data": {"group": "test", "subject": subject, "alerts": []},
    }
    delivery = _write(receiver, "test", subject, body, now)
    ring("alerts.send")
    return delivery


def _write(receiver: Receiver, event: str, subject: str, body: Mapping[str, object], now: datetime) -> Delivery:
    return Delivery.objects.create(
        receiver=receiver, event=event, subject=subject, body=dict(body), created_at=now, next_at=now
    )


def send_due(now: datetime) -> int:
    """One round: sends what is due and writes down how it went; returns how many messages it tried."""
    claimed = _claim(now)
    if not claimed:
        return 0
    with ThreadPoolExecutor(SENDERS, thread_name_prefix="alert-sender") as pool:
        tries = [(row, pool.submit(_try, row, now)) for row in claimed]
    for row, tried in tries:
        _note(row, tried.result(), now)
    return len(claimed)


def _claim(now: datetime) -> list[Delivery]:
    """Due messages, oldest first, at most PER_RECEIVER of one receiver; nobody else takes them for CLAIM."""
    Delivery.objects.filter(state=Delivery.State.WAITING).exclude(
        receiver__enabled=True, receiver__archived_at=None
    ).update(state=Delivery.State.GIVEN_UP)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT delivery.id FROM alerts_delivery AS delivery JOIN (
                SELECT id, row_number() OVER (PARTITION BY receiver_id ORDER BY next_at, id) AS place
                  FROM alerts_delivery WHERE state = 'waiting' AND next_at <= %s
            ) AS due ON due.id = delivery.id AND due.place <= %s
             WHERE delivery.state = 'waiting' AND delivery.next_at <= %s
             ORDER BY due.place, delivery.id LIMIT %s FOR UPDATE OF delivery SKIP LOCKED
            """,
            (now, PER_RECEIVER, now, PER_ROUND),
        )
        ids = [delivery_id for (delivery_id,) in cursor.fetchall()]
        Delivery.objects.filter(pk__in=ids).update(next_at=now + CLAIM, attempts=F("attempts") + 1)
    return list(Delivery.objects.filter(pk__in=ids).select_related("receiver").order_by("id"))


def _try(delivery: Delivery, now: datetime) -> Tried:
    """One try; never raises. Touches no database: it runs on a thread of its own."""
    began_s = time.monotonic()
    try:
        status = None
        if delivery.receiver.kind == Receiver.Kind.WEBHOOK:
            status = _post(delivery, now)
        else:
            _mail(delivery)
    except (outbound.Refused, outbound.Unreachable) as error:
        return Tried(_us_since(began_s), None, str(error)[:300])
    except (OSError, smtplib.SMTPException) as error:
        return Tried(_us_since(began_s), None, f"the mail server says: {error}"[:300])
    except Exception as error:
        # Whatever is odd about one message must not hold up the others.
        log.exception("message %s cannot be sent", delivery.message_id)
        return Tried(_us_since(began_s), None, f"it cannot be sent: {type(error).__name__}")
    error_text = "" if status is None or 200 <= status < 300 else f"answered with status {status}"
    return Tried(_us_since(began_s), status, error_text)


def _us_since(began_s: float) -> int:
    return int((time.monotonic() - began_s) * 1_000_000)


def _post(delivery: Delivery, now: datetime) -> int:
    body = orjson.dumps(delivery.body)
    headers = signature_headers(delivery.receiver, delivery.message_id, body, now)
    allowed = settings.OUTBOUND_ALLOW
    return outbound.post(delivery.receiver.target, body, headers, allowed=allowed, timeout_s=TIMEOUT_S).status


def _mail(delivery: Delivery) -> None:
    if not settings.EMAIL_IS_SET:
        raise OSError("none is set; an operator names it in FLEXBAND_SMTP_URL")
    mail = EmailMessage(
        subject=" ".join(f"[Flexband] {delivery.subject}".split()),
        body=email_text(delivery.body),
        to=[delivery.receiver.target],
        headers={"Message-ID": f"<{delivery.message_id}@flexband>", "Auto-Submitted": "auto-generated"},
        connection=get_connection(timeout=TIMEOUT_S),
    )
    mail.send()


def _note(delivery: Delivery, tried: Tried, now: datetime) -> None:
    """Writes down how a try went, and when the next one is."""
    with transaction.atomic():
        DeliveryAttempt.objects.create(
            delivery=delivery, at=now, took_us=tried.took_us, status=tried.status, error=tried.error
        )
        values: dict[str, object] = {"state": Delivery.State.DELIVERED, "delivered_at": now}
        if tried.error:
            number = delivery.attempts - 1
            values = {"state": Delivery.State.GIVEN_UP}
            if number < len(PAUSES):
                spread = random.uniform(1.0, 1.2)  # noqa: S311 - keeps tries apart, guards nothing
                values = {"next_at": now + PAUSES[number] * spread}
        Delivery.objects.filter(pk=delivery.pk, state=Delivery.State.WAITING).update(**values)


def send_again(delivery: Delivery, now: datetime) -> None:
    """A message that was given up, once more from its first try, under the same id."""
    Delivery.objects.filter(pk=delivery.pk, state=Delivery.State.GIVEN_UP).update(
        state=Delivery.State.WAITING, next_at=now, attempts=0
    )
    ring("alerts.send")
