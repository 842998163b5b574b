"""The live socket over the whole ASGI stack: origin, roles over topics, limits, revocation, and first frames."""

import asyncio
import json
import time

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.conf import settings
from django.contrib.auth.models import User

from controlplane.access.models import Session
from controlplane.config.asgi import application
from controlplane.live.consumers import MESSAGES_PER_10_S, REVOKED, TOO_MUCH, may_subscribe
from controlplane.live.frames import Publisher, connect
from controlplane.tenants.models import Member
from tests import factories
from tests.live.socket_people import sign_in, sweep

ROLES = ("admin", "finance", "oncall", "viewer", "tenant", "stranger", "anonymous")
TOPICS = (
    "fleet",
    "alerts",
    "pool:chat-70b",
    "rollout:1",
    "tenant:socket-own",
    "tenant:socket-other",
    "pool:../x",
    "audit",
    "",
)
SEES = {
    **{role: set(TOPICS[:6]) for role in ("admin", "finance", "oncall", "viewer")},
    "tenant": {"tenant:socket-own"},
    "stranger": {"tenant:socket-other"},
}


def end_session(key, name):
    Session.objects.filter(session_key=key).delete()


def change_role(key, name):
    Member.objects.filter(user__username=f"socket-{name}").update(role="viewer")


def lock_out(key, name):
    User.objects.filter(username=f"socket-{name}").update(is_active=False)


def new_password(key, name):
    User.objects.filter(username=f"socket-{name}").update(password="!!")


def remove_member(key, name):
    Member.objects.filter(user__username=f"socket-{name}").delete()


REVOCATIONS = (end_session, change_role, lock_out, new_password, remove_member)


def socket(key, origin="http://localhost"):
    headers = [(b"origin", origin.encode()), (b"host", b"localhost"), (b"cookie", f"sessionid={key}".encode())]
    return WebsocketCommunicator(application, "/ws/live/", headers=headers)


@pytest.fixture(scope="module")
def keys(django_db_setup, django_db_blocker):
    """Session keys by role, and one of on-call for each way to lose it. Committed once for the module."""
    with django_db_blocker.unblock():
        sweep()
        own, other = factories.tenant("socket-own"), factories.tenant("socket-other", classes=[])
        made = {role: sign_in(role, role) for role in ("admin", "finance", "oncall", "viewer")}
        made |= {"tenant": sign_in("tenant", "tenant", own), "stranger": sign_in("stranger", "tenant", other)}
        made |= {act.__name__: sign_in(act.__name__, "oncall") for act in REVOCATIONS}
        yield made
        sweep()


@pytest.fixture
def told(frames_redis, now):
    """Every topic of the matrix has been told something of its own."""
    states = [(topic, {"of": topic}) for topic in TOPICS[:6]]
    Publisher(frames_redis).publish(states, now)


async def answers(one, count, seconds=60.0):
    found = []
    ends = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < ends:
        message = await one.receive_output(timeout=max(0.05, ends - time.monotonic()))
        if message["type"] == "websocket.send":
            found.append(json.loads(message["text"]))
        else:
            found.append(message)
    return found


async def closed_with(one, seconds=5.0):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        message = await one.receive_output(timeout=ends - time.monotonic())
        if message["type"] == "websocket.close":
            return message["code"]
    return None


@pytest.mark.parametrize("role", [role for role in ROLES if role != "anonymous"])
async def test_each_role_gets_its_own_topics_and_an_error_for_the_rest(keys, told, role):
    one = socket(keys[role])
    assert (await one.connect())[0]
    await one.send_json_to({"subscribe": list(TOPICS)})
    found = await answers(one, len(TOPICS))
    seen = {frame["topic"] for frame in found if frame["type"] == "snapshot"}
    refused = {frame["topic"] for frame in found if frame["type"] == "error"}
    assert seen == SEES[role]
    assert refused == set(TOPICS) - SEES[role]
    for frame in found:
        if frame["type"] == "snapshot":
            assert frame["data"] == {"of": frame["topic"]}
    await one.disconnect()


async def test_nobody_signed_in_is_closed_at_once(keys, told):
    one = socket("")
    await one.connect()
    assert await closed_with(one) == REVOKED


async def test_a_foreign_origin_never_gets_in(keys, told):
    one = socket(keys["admin"], origin="https://elsewhere.example")
    assert not (await one.connect())[0]


async def test_the_matrix_of_the_rule_itself():
    assert not may_subscribe(None, None, "fleet")
    assert not may_subscribe("tenant", None, "tenant:None")
    assert not may_subscribe("admin", None, "pool:UPPER")
    assert may_subscribe("tenant", "socket-own", "tenant:socket-own")


@pytest.mark.parametrize("act", REVOCATIONS)
async def test_revocation_closes_within_five_seconds_and_nothing_comes_after(keys, told, frames_redis, now, act):
    key = keys[act.__name__]
    one = socket(key)
    await one.connect()
    await one.send_json_to({"subscribe": ["fleet"]})
    assert (await answers(one, 1))[0]["type"] == "snapshot"
    await sync_to_async(act)(key, act.__name__)
    began = time.monotonic()
    assert await closed_with(one, 6) == REVOKED
    assert time.monotonic() - began <= 5
    publisher = Publisher(frames_redis)
    await asyncio.to_thread(publisher.publish, [("fleet", {"secret": 1})], now)
    assert await one.receive_nothing(timeout=0.3)


async def test_frames_follow_a_join_and_a_second_subscription_is_a_snapshot(keys, frames_redis, now):
    publisher = Publisher(frames_redis)
    one = socket(keys["viewer"])
    await one.connect()
    await one.send_json_to({"subscribe": ["fleet"]})
    async with asyncio.timeout(60):
        while b"fb:frame:fleet" not in frames_redis.pubsub_channels("fb:frame:*"):
            await asyncio.sleep(0.02)
    found = []
    for number in range(3):
        await asyncio.to_thread(publisher.publish, [("fleet", {"n": number, "same": 1})], now, clock_s=float(number))
        found += await answers(one, 1)
    assert [(frame["type"], frame["seq"]) for frame in found] == [("snapshot", 1), ("delta", 2), ("delta", 3)]
    await one.send_json_to({"subscribe": ["fleet"]})
    (again,) = await answers(one, 1)
    assert (again["type"], again["seq"], again["data"]) == ("snapshot", 3, {"n": 2, "same": 1})
    await one.disconnect()


@pytest.mark.parametrize("text", ["{", "[]", '{"subscribe": "fleet"}', '{"subscribe": [1]}', '{"other": []}', "null"])
async def test_what_is_not_the_protocol_gets_an_error_and_keeps_the_socket(keys, told, text):
    one = socket(keys["viewer"])
    await one.connect()
    await one.send_to(text_data=text)
    (frame,) = await answers(one, 1)
    assert frame["type"] == "error" and "subscribe" in frame["detail"]
    await one.send_json_to({"subscribe": ["fleet"]})
    assert (await answers(one, 1))[0]["type"] == "snapshot"
    await one.disconnect()


async def test_a_message_that_is_too_large_ends_the_socket(keys, told):
    one = socket(keys["viewer"])
    await one.connect()
    await one.send_to(text_data=json.dumps({"subscribe": ["x" * 9_000]}))
    assert await closed_with(one) == TOO_MUCH


async def test_too_many_messages_end_the_socket(keys, told):
    one = socket(keys["viewer"])
    await one.connect()
    for _ in range(MESSAGES_PER_10_S + 1):
        await one.send_json_to({"subscribe": []})
    assert await closed_with(one) == TOO_MUCH


async def test_at_most_so_many_topics(keys, told):
    one = socket(keys["viewer"])
    await one.connect()
    await one.send_json_to({"subscribe": [f"pool:p{number}" for number in range(70)]})
    found = await answers(one, 6)
    assert {frame["type"] for frame in found} == {"error"} and len(found) == 6
    await one.disconnect()


def test_the_publishers_connection_is_bounded():
    assert connect().connection_pool.connection_kwargs["socket_timeout"] <= 1
    assert settings.REDIS_URL
