"""Nudges: who may say what, and over a real broker."""

import os
import secrets
import time
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kombu import Connection, Exchange, Queue

from controlplane.agent.nudges import NudgeListener, read_nudge
from controlplane.agent.policy_state import LiveList
from controlplane.wire import signing
from controlplane.wire.nudging import (
    QUEUE_EXPIRES_S,
    REDIS_TRANSPORT_OPTIONS,
    ROUTING_KEY,
    agent_queue,
    pool_exchange,
)
from controlplane.wire.policy import LiveTenant, Nudge, SignedNudge, nudge_message
from controlplane.wire.report import Grant
from tests.agent import worlds
from tests.agent.test_flex_agent import FLEX_ID, flex_document, lend, state

AGENT = "0f5a6c1e-0000-4000-8000-000000000001"
NOW_US = 1_800_000_000_000_000


def nudge(**changes) -> Nudge:
    base = {
        "kind": "report", "pool": worlds.POOL, "agent": None, "slot_id": None, "fence": None, "revision": None,
        "digest": None, "wave": None, "nonce": secrets.token_hex(4), "issued_us": NOW_US,
        "expires_us": NOW_US + 60_000_000,
    }  # fmt: skip
    return Nudge(**{**base, **changes})


def signed(body: Nudge, key: Ed25519PrivateKey = worlds.SIGNING_KEY) -> bytes:
    raw = signing.canonical(body)
    message = nudge_message(installation=worlds.INSTALLATION, digest=signing.digest_hex(raw))
    return msgspec.json.encode(SignedNudge(worlds.KID, signing.to_text(key.sign(message)), signing.to_text(raw)))


@pytest.mark.parametrize(
    ("changes", "now_us", "said"),
    [
        ({"pool": "else"}, NOW_US, "meant for another"),
        ({"agent": "someone"}, NOW_US, "meant for another"),
        ({}, NOW_US + 60_000_000, "not in its time"),
        ({"issued_us": NOW_US + 6_000_000}, NOW_US, "not in its time"),
    ],
)
def test_what_is_not_listened_to(changes, now_us, said):
    assert read_nudge(signed(nudge(**changes)), worlds.trust(), AGENT, now_us) == said


def test_forged_and_broken_ones():
    other = Ed25519PrivateKey.generate()
    assert "signature" in read_nudge(signed(nudge(), other), worlds.trust(), AGENT, NOW_US)
    for body in (b"", b"{}", b'{"kid":"a","signature":"b","body":"\xff"}'):
        assert str(read_nudge(body, worlds.trust(), AGENT, NOW_US)).startswith("unreadable")
    good = nudge(agent=AGENT)
    assert read_nudge(signed(good), worlds.trust(), AGENT, NOW_US) == good


class Heard:
    """What a nudge hastened."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.live = LiveList(Path("nowhere"))
        self.reports = 0
        self.pulls: list[tuple[int, str]] = []

    def report_now(self) -> None:
        self.reports += 1

    def pull(self, revision: int, digest: str, *, jitter: bool = False) -> None:
        self.pulls.append((revision, digest))


def fresh(**changes) -> bytes:
    now_us = time.time_ns() // 1000
    return signed(nudge(issued_us=now_us, expires_us=now_us + 60_000_000, **changes))


async def test_what_stops_something_is_in_force_before_the_report_is_answered(make_agent):
    agent = await make_agent(flex_document())
    heard = Heard(agent.engine)
    listener = NudgeListener("", AGENT, worlds.trust(), heard, agent.front.loop)
    tenant = next(iter(agent.engine.registry.tenants.values()))
    stop = LiveTenant(9, tenant.policy.id, tenant.policy.slug, "suspended")
    assert tenant.view.active
    listener.take(fresh(kind="live", live=[worlds.live_item(stop, key=Ed25519PrivateKey.generate())]))
    assert tenant.view.active and heard.reports == 1, "what does not verify is asked for, like anything else"
    listener.take(fresh(kind="live", live=[worlds.live_item(stop)]))
    assert not tenant.view.active
    assert (heard.reports, heard.live.number) == (2, 0)


async def test_over_the_broker(make_agent):
    """A broadcast to the pool, and a recall to one agent that ends its loan at once; the same nonce counts once."""
    agent = await make_agent(flex_document())
    heard = Heard(agent.engine)
    url = os.environ["REDIS_URL"]
    loop = agent.front.loop
    lend(agent, fence=3)
    listener = NudgeListener(url, AGENT, worlds.trust(), heard, loop)
    listener.start()
    with Connection(url, transport_options=REDIS_TRANSPORT_OPTIONS) as connection:
        producer = connection.Producer()
        fanout = Exchange(pool_exchange(worlds.POOL), type="fanout", durable=False, auto_delete=False)
        own = Queue(agent_queue(AGENT), durable=False, auto_delete=False, expires=QUEUE_EXPIRES_S)

        def publish(body: bytes, **where) -> None:
            producer.publish(body, serializer=None, content_type="application/json", content_encoding="utf-8", **where)

        def broadcast() -> bool:
            publish(
                fresh(kind="policy", revision=9, digest="d9"),
                exchange=fanout,
                routing_key=ROUTING_KEY,
                declare=[fanout],
            )
            return bool(heard.pulls)

        await agent.until(broadcast, within_s=5)
        assert heard.pulls[0] == (9, "d9")
        recall = fresh(kind="recall", agent=AGENT, slot_id=FLEX_ID, fence=4)
        for _ in range(2):
            publish(recall, exchange="", routing_key=own.name, declare=[own])
        await agent.until(lambda: heard.reports >= 1)
        assert state(agent) is worlds.SlotState.HOME
        assert agent.engine.flex.slots["S3"].grant.fence == 4
        publish(fresh(kind="live"), exchange=fanout, routing_key=ROUTING_KEY, declare=[fanout])
        await agent.until(lambda: heard.reports == 2)
    listener.stop()
    assert agent.engine.flex.apply([Grant(FLEX_ID, 3, "lend", 1000)], sent_boot_us=0)
