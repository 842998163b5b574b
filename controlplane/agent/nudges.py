"""Nudges from the broker, in a thread of their own: verified, fresh, meant for us; they only hasten.

Losing every nudge costs latency, never correctness: whatever they say comes with the next report as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from typing import Final, Protocol

import msgspec
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.message import Message
from kombu.messaging import Consumer

from controlplane.agent.engine import Engine
from controlplane.agent.identity import signing_key
from controlplane.agent.policy_state import LiveList, Trust
from controlplane.wire import signing
from controlplane.wire.nudging import (
    QUEUE_EXPIRES_S,
    REDIS_TRANSPORT_OPTIONS,
    ROUTING_KEY,
    agent_queue,
    broadcast_queue,
    pool_exchange,
)
from controlplane.wire.policy import Nudge, SignedNudge, nudge_message

log = logging.getLogger(__name__)

NONCES_KEPT: Final = 10_000
PAUSE_MAX_S: Final = 30.0
CLOCK_TOLERANCE_US: Final = 5_000_000


def read_nudge(body: bytes, trust: Trust, agent: str, now_us: int) -> Nudge | str:
    """The nudge, or why it is not listened to."""
    try:
        envelope = msgspec.json.decode(body, type=SignedNudge)
        raw, signature = signing.from_text(envelope.body), signing.from_text(envelope.signature)
        nudge = msgspec.json.decode(raw, type=Nudge)
    except ValueError as error:
        return f"unreadable: {error}"
    public = signing_key(trust.signing_keys, "nudge", envelope.kid)
    message = nudge_message(installation=trust.installation, digest=signing.digest_hex(raw))
    if public is None or not signing.verify(public, signature, message):
        return "its signature does not hold"
    if nudge.pool != trust.pool or nudge.agent not in (None, agent):
        return "meant for another"
    if now_us >= nudge.expires_us or nudge.issued_us > now_us + CLOCK_TOLERANCE_US:
        return "not in its time"
    return nudge


class Hastened(Protocol):
    """What a nudge can hasten."""

    engine: Engine
    live: LiveList

    def report_now(self) -> None: ...

    def pull(self, revision: int, digest: str, *, jitter: bool = False) -> None: ...


class NudgeListener:
    """A light kombu consumer without acknowledgement; it reconnects for ever."""

    def __init__(
        self, broker: str, agent: str, trust: Trust, control: Hastened, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.trust = trust
        self._broker = broker
        self._agent = agent
        self._control = control
        self._loop = loop
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nudges", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends with its present wait; the thread never holds up the process."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = 1.0
        while not self._stopped.is_set():
            try:
                self._consume()
                pause_s = 1.0
            except Exception as error:
                # Whatever a broker does to its clients, an agent serves on without it.
                log.warning("no nudges from the broker (%s): reports alone bring policy and grants", error)
                self._stopped.wait(pause_s)
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    def _consume(self) -> None:
        options = REDIS_TRANSPORT_OPTIONS if self._broker.startswith(("redis", "valkey")) else {}
        with Connection(  # type: ignore[no-untyped-call]
            self._broker, transport_options=options, heartbeat=0, connect_timeout=5
        ) as connection:
            exchange = Exchange(  # type: ignore[no-untyped-call]
                pool_exchange(self.trust.pool), type="fanout", durable=False, auto_delete=False
            )
            queues = [
                Queue(  # type: ignore[no-untyped-call]
                    broadcast_queue(self._agent), exchange, routing_key=ROUTING_KEY, durable=False, auto_delete=True
                ),
                Queue(  # type: ignore[no-untyped-call]
                    agent_queue(self._agent), durable=False, auto_delete=False, expires=QUEUE_EXPIRES_S
                ),
            ]
            with Consumer(  # type: ignore[no-untyped-call]
                connection.default_channel,
                queues,
                callbacks=[self._received],
                no_ack=True,
                accept=["json", "application/json"],
            ):
                while not self._stopped.is_set():
                    try:
                        connection.drain_events(timeout=0.5)
                    except TimeoutError:
                        continue

    def _received(self, _: object, message: Message) -> None:
        raw = message.body
        body = raw.encode() if isinstance(raw, str) else bytes(raw)
        self._loop.call_soon_threadsafe(self.take, body)

    def take(self, body: bytes) -> None:
        """On the event loop: act on one message."""
        nudge = read_nudge(body, self.trust, self._agent, self._control.engine.clock.now_us())
        if isinstance(nudge, str):
            log.warning("a nudge was not listened to: %s", nudge)
            return
        if nudge.nonce in self._seen:
            return
        self._seen[nudge.nonce] = None
        if len(self._seen) > NONCES_KEPT:
            self._seen.popitem(last=False)
        if nudge.kind == "policy" and nudge.revision is not None and nudge.digest:
            self._control.pull(nudge.revision, nudge.digest, jitter=True)
        elif nudge.kind == "recall" and nudge.slot_id is not None and nudge.fence is not None:
            self._control.engine.flex.recall(nudge.slot_id, nudge.fence)
            self._control.report_now()
        else:
            if nudge.live and self._control.live.hasten(nudge.live, self.trust):
                self._control.engine.apply_live(self._control.live)
            self._control.report_now()
