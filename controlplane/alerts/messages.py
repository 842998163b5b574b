"""What receivers are sent: one message for all alerts of a group that changed together, and its signature.

Webhooks follow the Standard Webhooks scheme: `webhook-id` stays the same over retries, `webhook-timestamp` is the time
of the try, `webhook-signature` is `v1,` and the base64 of HMAC-SHA256 over `id.timestamp.body`.
"""

import base64
import hashlib
import hmac
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.urls import reverse

from controlplane.alerts.models import Alert, AlertChange, Receiver

SECRET_PREFIX = "whsec_"  # noqa: S105 - says what follows
#: How long the secret before signs beside the new one.
OVERLAP = timedelta(hours=24)
VERBS = {
    AlertChange.Kind.RAISED: "",
    AlertChange.Kind.ESCALATED: "Now a page: ",
    AlertChange.Kind.ACKNOWLEDGED: "Acknowledged: ",
    AlertChange.Kind.RESOLVED: "Resolved: ",
}


def secret_bytes(secret_id: UUID) -> bytes:
    """A receiver's secret, derived from the installation's: nothing in the database signs."""
    return hmac.digest(settings.SECRET_KEY.encode(), b"flexband webhook " + secret_id.bytes, hashlib.sha256)


def secret_text(secret_id: UUID) -> str:
    """The secret as people copy it."""
    return SECRET_PREFIX + base64.b64encode(secret_bytes(secret_id)).decode()


def signature_headers(receiver: Receiver, message_id: UUID, body: bytes, now: datetime) -> dict[str, str]:
    """Headers of one try."""
    stamp = str(int(now.timestamp()))
    signed = b".".join((str(message_id).encode(), stamp.encode(), body))
    ids = [receiver.secret_id]
    if receiver.previous_secret_id is not None and receiver.previous_until and receiver.previous_until > now:
        ids.append(receiver.previous_secret_id)
    marks = (base64.b64encode(hmac.digest(secret_bytes(one), signed, hashlib.sha256)).decode() for one in ids)
    return {
        "content-type": "application/json",
        "user-agent": "flexband-alerts",
        "webhook-id": str(message_id),
        "webhook-timestamp": stamp,
        "webhook-signature": " ".join(f"v1,{mark}" for mark in marks),
    }


def alert_json(alert: Alert) -> dict[str, Any]:
    """An alert as receivers and the REST interface see it."""
    return {
        "id": alert.pk,
        "key": alert.key,
        "kind": alert.kind,
        "severity": alert.severity,
        "state": state_of(alert),
        "title": alert.title,
        "text": alert.text,
        "url": settings.PUBLIC_URL + reverse("alert", args=[alert.pk]),
        "pool": alert.pool,
        "contract": alert.contract,
        "causes": alert.causes,
        "since": _stamp(alert.since),
        "raised_at": _stamp(alert.raised_at),
        "acknowledged_at": _stamp(alert.acknowledged_at),
        "acknowledged_by": alert.acknowledged_by,
        "resolved_at": _stamp(alert.resolved_at),
    }


def state_of(alert: Alert) -> str:
    """open, acknowledged or resolved."""
    if alert.resolved_at is not None:
        return "resolved"
    return "open" if alert.acknowledged_at is None else "acknowledged"


def message(event: str, group: str, alerts: Sequence[Alert], now: datetime) -> tuple[str, dict[str, Any]]:
    """(subject, body) that tell of `alerts`, all of one group, what happened to them at `now`."""
    first = alerts[0]
    more = f" and {len(alerts) - 1} more" if len(alerts) > 1 else ""
    subject = f"{VERBS.get(AlertChange.Kind(event), '')}{first.title}{more}"
    body = {
        "type": f"alert.{event}",
        "timestamp": _stamp(now),
        "data": {"group": group, "subject": subject, "alerts": [alert_json(alert) for alert in alerts]},
    }
    return subject[:300], body


def email_text(body: dict[str, Any]) -> str:
    """The same as plain text."""
    parts = [f"{body['data']['subject']}.", ""]
    if text := body["data"].get("text"):
        parts += [text, ""]
    for alert in body["data"]["alerts"]:
        parts += [f"{alert['title']} ({alert['severity']}, {alert['state']})", alert["text"]]
        parts += [f"- {cause['label']}: {cause['value']}" for cause in alert["causes"]]
        parts += [f"Since {alert['since']}" if alert["since"] else "", alert["url"], ""]
    return "\n".join(line for line in parts if line is not None)


def _stamp(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()
