"""Signed nudges onto the broker. They hasten what the next report brings anyway: losing one costs latency only."""

import logging
import secrets
from datetime import datetime, timedelta

import msgspec
from celery import current_app
from django.conf import settings
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from controlplane.policy.signing import Signer, SigningKeyMissing, signer
from controlplane.tenants.queries import installation
from controlplane.wire.nudging import (
    CONTENT_TYPE,
    NUDGE_TTL_S,
    QUEUE_EXPIRES_S,
    ROUTING_KEY,
    agent_queue,
    pool_exchange,
)
from controlplane.wire.policy import Nudge, SignedNudge, nudge_message
from controlplane.wire.report import LiveItem
from controlplane.wire.signing import canonical, digest_hex, to_text

log = logging.getLogger(__name__)

_RETRY = {"max_retries": 1, "interval_start": 0.0, "interval_step": 0.1, "interval_max": 0.1}


def compose(
    kind: str,
    *,
    pool: str,
    now: datetime,
    agent: str | None = None,
    slot_id: int | None = None,
    fence: int | None = None,
    revision: int | None = None,
    digest: str | None = None,
    wave: int | None = None,
    live: list[LiveItem] | None = None,
) -> Nudge:
    """A nudge with its nonce and life time. `agent` is a UUID; None is every agent of the pool."""
    return Nudge(
        kind=kind,
        pool=pool,
        agent=agent,
        slot_id=slot_id,
        fence=fence,
        revision=revision,
        digest=digest,
        wave=wave,
        nonce=secrets.token_urlsafe(12),
        issued_us=_us(now),
        expires_us=_us(now + timedelta(seconds=NUDGE_TTL_S)),
        live=live,
    )


def signed(nudge: Nudge, *, signer: Signer, installation_id: str) -> bytes:
    """The message body: msgspec JSON of SignedNudge."""
    body = canonical(nudge)
    signature = signer.sign(nudge_message(installation=installation_id, digest=digest_hex(body)))
    return msgspec.json.encode(SignedNudge(kid=signer.kid, signature=to_text(signature), body=to_text(body)))


def send(nudge: Nudge, *, now: datetime | None = None) -> bool:
    """Signs and publishes one nudge. False when the broker is out of reach: that is logged, and reports converge."""
    return send_all([nudge], now=now)


def send_all(nudges: list[Nudge], *, now: datetime | None = None) -> bool:
    """Publishes several nudges over one connection; False when not all of them reached the broker."""
    if not nudges:
        return True
    try:
        key = signer("nudge", now or datetime.fromtimestamp(nudges[0].issued_us / 1e6).astimezone())
    except SigningKeyMissing as error:
        log.error("no nudge sent: %s", error)
        return False
    installation_id = str(installation().uuid)
    try:
        with current_app.amqp.producer_pool.acquire(block=True, timeout=2) as producer:
            for nudge in nudges:
                _publish(producer, nudge, signed(nudge, signer=key, installation_id=installation_id))
    except (OperationalError, OSError, TimeoutError) as error:
        log.warning("broker unreachable, %d nudges wait for the next report: %s", len(nudges), error)
        return False
    return True


def _publish(producer, nudge: Nudge, body: bytes) -> None:  # type: ignore[no-untyped-def]
    options = {
        "serializer": None,
        "content_type": CONTENT_TYPE,
        "content_encoding": "utf-8",
        "delivery_mode": "transient",
        "expiration": NUDGE_TTL_S,
        "retry": True,
        "retry_policy": _RETRY,
    }
    if nudge.agent is None:
        exchange = fanout(nudge.pool)
        producer.publish(body, exchange=exchange, routing_key=ROUTING_KEY, declare=[exchange], **options)
    else:
        # RabbitMQ drops what is sent to a queue that does not exist; a Redis list would grow for an agent that is gone.
        queue = own_queue(nudge.agent)
        declare = [queue] if settings.CELERY_BROKER_IS_REDIS else []
        producer.publish(body, exchange="", routing_key=queue.name, declare=declare, **options)


def fanout(pool_slug: str) -> Exchange:
    """The pool's exchange as both sides declare it."""
    return Exchange(pool_exchange(pool_slug), type="fanout", durable=False)


def own_queue(agent_uuid: str) -> Queue:
    """The agent's queue as both sides declare it; the broker deletes it when it has been without a consumer."""
    return Queue(agent_queue(agent_uuid), expires=QUEUE_EXPIRES_S)


def _us(at: datetime) -> int:
    return round(at.timestamp() * 1_000_000)
