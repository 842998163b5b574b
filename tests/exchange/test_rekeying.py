"""A new key of an agent: asked for, posted signed by the old, both good until a report by the new, then one."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest
from asgiref.sync import sync_to_async
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.fleet import keys
from controlplane.fleet.models import Agent
from controlplane.wire import signing
from controlplane.wire.rekeying import Rekey, Rekeyed, proof_message

ADA = Actor(id=None, name="ada", role="admin")


@sync_to_async
def ask(agent) -> None:
    keys.ask_for_new_key(agent_id=agent.id, actor=ADA, now=timezone.now(), reason="yearly")


@sync_to_async
def stored(agent) -> Agent:
    return Agent.objects.get(pk=agent.id)


def raw(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


async def post(agent, new: Ed25519PrivateKey, *, proved_by=None, signed_by=None, app=None):
    public = raw(new)
    proof = signing.sign(proved_by or new, proof_message(agent.uuid, public))
    body = msgspec.json.encode(Rekey(signing.to_text(public), signing.to_text(proof)))
    return await agent.signed("POST", "/agent/v1/key", body, key=signed_by, app=app)


async def report_by(agent, key, *, app=None):
    """A report signed by a key; it is the next one if it is taken."""
    report = agent.build()
    response = await agent.signed(
        "POST", "/agent/v1/report", msgspec.json.encode(report), seq=report.seq, key=key, app=app
    )
    if response.status == 200:
        agent.seq += 1
    return response


async def test_from_asking_to_the_old_key_refused(agent):
    old, new = agent.key, Ed25519PrivateKey.generate()
    assert not (await agent.report()).rotate_key
    await ask(agent)
    assert (await agent.report()).rotate_key
    posted = await post(agent, new)
    assert posted.status == 200, posted.body
    left_us = posted.read(Rekeyed).until_us - signing_now_us()
    assert 0 < 24 * 3_600_000_000 - left_us < 60_000_000
    assert (await report_by(agent, old)).status == 200, "both are good"
    assert (await stored(agent)).next_public_key is not None
    answer = await report_by(agent, new)
    assert answer.status == 200
    assert b'"rotate_key":true' not in answer.body, "the answer to the report that ends it asks for nothing"
    row = await stored(agent)
    assert (bytes(row.public_key), row.next_public_key, row.key_rotation_asked_at) == (raw(new), None, None)
    assert (await report_by(agent, old)).problem.code == "bad_signature"
    assert (await report_by(agent, new)).status == 200
    actions = await sync_to_async(lambda: list(AuditEntry.objects.order_by("id").values_list("action", flat=True)))()
    assert [a for a in actions if "key" in a] == ["agent.rotate_key", "agent.key_posted", "agent.key_changed"]


def signing_now_us() -> int:
    return int(timezone.now().timestamp() * 1_000_000)


async def test_a_hello_with_the_new_key_does_not_end_the_old_one(agent):
    new = Ed25519PrivateKey.generate()
    await ask(agent)
    await post(agent, new)
    hello = await agent.signed("POST", "/agent/v1/hello", b'{"software":"1","boot_id":"b"}', epoch=0, key=new)
    assert hello.status == 200
    agent.epoch, agent.seq = msgspec.json.decode(hello.body)["epoch"], 0
    assert (await report_by(agent, agent.key)).status == 200


async def test_doubled_and_late_messages_are_answered_the_same(agent):
    new = Ed25519PrivateKey.generate()
    await ask(agent)
    first, second = await post(agent, new), await post(agent, new)
    assert first.body == second.body
    report = agent.build()
    body = msgspec.json.encode(report)
    answers = [
        await agent.signed("POST", "/agent/v1/report", body, seq=report.seq, key=new) for _ in range(2)
    ]  # the first answer was lost
    assert [answer.status for answer in answers] == [200, 200]
    assert msgspec.json.decode(answers[1].body)["repeat"] is True
    late = await post(agent, new, signed_by=new)
    assert late.status == 200, "posted again after it came into force"
    assert (await post(agent, new)).problem.code == "bad_signature", "the old key posts nothing any more"


async def test_after_a_day_only_the_new_key_is_good(agent):
    new = Ed25519PrivateKey.generate()
    await ask(agent)
    await post(agent, new)
    day_ago = timezone.now() - keys.KEY_OVERLAP
    await sync_to_async(Agent.objects.filter(pk=agent.id).update)(next_key_at=day_ago + timedelta(seconds=30))
    agent.app._handlers.directory.forget()
    assert (await report_by(agent, agent.key)).status == 200
    await sync_to_async(Agent.objects.filter(pk=agent.id).update)(next_key_at=day_ago)
    agent.app._handlers.directory.forget()
    assert (await report_by(agent, agent.key)).problem.code == "bad_signature"
    assert (await report_by(agent, new)).status == 200


async def test_no_key_is_taken_that_was_not_asked_for(agent):
    response = await post(agent, Ed25519PrivateKey.generate())
    assert (response.status, response.problem.code) == (409, "conflict")
    assert (await stored(agent)).next_public_key is None


async def test_another_key_than_the_posted_one_is_a_conflict_until_an_admin_asks_again(agent):
    """Who has stolen the old key may post one too: the second of two is refused and a person decides."""
    await ask(agent)
    stolen, own = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    assert (await post(agent, stolen)).status == 200
    refused = await post(agent, own)
    assert refused.problem.code == "conflict" and "retire it" in refused.problem.detail
    await ask(agent)
    agent.app._handlers.directory.forget()
    assert (await report_by(agent, stolen)).problem.code == "bad_signature", "the posted key was withdrawn"
    assert (await post(agent, own)).status == 200
    assert (await report_by(agent, own)).status == 200


async def test_a_key_withdrawn_behind_a_snapshot_signs_no_report_to_the_end(agent):
    """Its agent would drop the old key for one that nobody knows, and be locked out."""
    await ask(agent)
    new = Ed25519PrivateKey.generate()
    assert (await post(agent, new)).status == 200
    assert (await report_by(agent, agent.key)).status == 200
    await ask(agent)
    refused = await report_by(agent, new)
    assert refused.problem.code == "bad_signature", "the snapshot still had it"
    assert bytes((await stored(agent)).public_key) == raw(agent.key)
    agent.seq += 1  # it was stored: the same bytes signed by the old key would be a repeat
    assert (await report_by(agent, agent.key)).status == 200


@pytest.mark.parametrize("how", ["by another key", "for another agent", "no key", "no base64", "low order"])
async def test_a_key_needs_its_proof(agent, how):
    await ask(agent)
    new = Ed25519PrivateKey.generate()
    public, proof = raw(new), signing.sign(new, proof_message(agent.uuid, raw(new)))
    if how == "by another key":
        proof = signing.sign(Ed25519PrivateKey.generate(), proof_message(agent.uuid, public))
    elif how == "for another agent":
        proof = signing.sign(new, proof_message("7f1c9f5e-0000-4000-8000-000000000000", public))
    elif how == "no key":
        public = b"short"
    elif how == "low order":
        public = bytes(32)
    message = Rekey("%%" if how == "no base64" else signing.to_text(public), signing.to_text(proof))
    response = await agent.signed("POST", "/agent/v1/key", msgspec.json.encode(message))
    assert (response.status, response.problem.code) == (400, "unreadable")
    assert (await stored(agent)).next_public_key is None


async def test_a_key_taken_by_one_process_is_good_at_the_others_at_once(agent, process):
    """Each process has a snapshot of agents of its own; a signature that does not fit makes it look again."""
    other, new = process(), Ed25519PrivateKey.generate()
    assert (await report_by(agent, agent.key, app=other)).status == 200, "its snapshot is of before"
    await ask(agent)
    assert (await post(agent, new)).status == 200
    assert (await report_by(agent, new, app=other)).status == 200


async def test_a_retired_agent_posts_no_key(agent):
    await ask(agent)
    await sync_to_async(Agent.objects.filter(pk=agent.id).update)(state="retired")
    agent.app._handlers.directory.forget()
    assert (await post(agent, Ed25519PrivateKey.generate())).problem.code == "retired"
