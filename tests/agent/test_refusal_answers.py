"""What clients are told, reason by reason, over a socket: status, code, headers, and a message that says what to do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from controlplane.agent.answers import SENTENCES, refusal_answer
from controlplane.core.reasons import ANSWERS, Outcome, Reason
from controlplane.wire.report import Lease, Share
from tests.agent import worlds
from tests.agent.wire_client import WireClient, chat_body, post

LONG = {"max_tokens": 400, "ignore_eos": True}


@dataclass
class Case:
    """A world in which a request is refused for one reason."""

    reason: Reason
    document: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, Any] = field(default_factory=dict)
    slot: dict[str, Any] = field(default_factory=dict)
    tenant: dict[str, Any] = field(default_factory=dict)
    key: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    headers: str = ""
    secret: str = worlds.SECRET
    busy: int = 0
    """Long requests that are sent before."""
    share: Share | None = None
    exhausted: bool = False
    suspended: bool = False
    retry_after: tuple[int, int] | None = None


CASES = [
    Case(Reason.KEY_UNKNOWN, secret="fb_nobody"),
    Case(Reason.KEY_REVOKED, key={"state": "revoked"}),
    Case(Reason.KEY_EXPIRED, key={"expires_us": 1}),
    Case(Reason.TENANT_SUSPENDED, suspended=True),
    Case(Reason.CLASS_NOT_ALLOWED, headers="x-flexband-class: gold\r\n"),
    Case(Reason.MODEL_NOT_ALLOWED, body={"model": "gpt-5"}),
    Case(Reason.PROMPT_TOO_LONG, classes={"max_prompt_tokens": 1}),
    Case(Reason.OUTPUT_TOO_LONG, body={"max_tokens": 10_000}),
    Case(Reason.BUDGET_EXHAUSTED, tenant={"hard_budget": True}, exhausted=True, retry_after=(3590, 3600)),
    Case(Reason.NO_LEASE, tenant={"hard_budget": True}, retry_after=(1, 1)),
    Case(Reason.CONCURRENCY_LIMIT, share=Share("tenant", 1, 0, None, None), retry_after=(1, 1)),
    Case(Reason.RATE_LIMIT, share=Share("class", 1, None, 0.25, None), busy=1, retry_after=(3, 4)),
    Case(Reason.RATE_LIMIT, key={"tokens_per_minute": 30}, body={"max_tokens": 200}, retry_after=(1, 60)),
    Case(Reason.NEVER_FITS, slot={"kv_tokens": 20}, body={"max_tokens": 100}),
    Case(Reason.QUEUE_FULL, classes={"max_queue": 0}, busy=1, retry_after=(1, 30)),
    Case(Reason.WAIT_TOO_LONG, classes={"max_wait_ms": 1}, busy=1, retry_after=(1, 30)),
    Case(Reason.WAIT_TOO_LONG, slot={"band": "batch"}, retry_after=(30, 30)),
    Case(Reason.QUEUE_FULL, slot={"band": "batch"}, classes={"max_queue": 0}, retry_after=(30, 30)),
]


async def refused(make_agent, case: Case):
    doc = worlds.document(
        classes=[worlds.class_policy(**case.classes), worlds.class_policy("bulk", kind="batch")],
        tenants=[worlds.tenant_policy(**case.tenant)],
        pool={"slots": [worlds.slot(1, places=1) if not case.slot else worlds.slot(1, **{"places": 1, **case.slot})]},
    )
    agent = await make_agent(doc, [worlds.live_key(**case.key)], speed=1.0)
    engine = agent.engine
    if case.share is not None:
        engine.registry.apply_shares([case.share], engine.clock.now_us())
    if case.suspended:
        assert agent.live.apply(worlds.delta(worlds.LiveTenant(9, 1, "acme", "suspended"), since=1), worlds.trust())
        engine.apply_live(agent.live)
    if case.exhausted:
        now_us = engine.clock.now_us()
        said = worlds.Exhausted(1, "acme: plan", now_us + 3_600_000_000)
        engine.leases.apply([], [said], asked_us=now_us, now_us=now_us)
    for _ in range(case.busy):
        client = await WireClient.connect(agent.port)
        agent.clients.append(client)
        client.send(post(chat_body(**LONG)))
    await agent.until(lambda: engine.offered >= case.busy)
    client = await WireClient.connect(agent.port)
    return agent, await client.ask(post(chat_body(**case.body), key=case.secret, headers=case.headers))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.reason.value)
async def test_each_refusal_says_what_it_is_and_what_to_do(make_agent, case):
    agent, answer = await refused(make_agent, case)
    expected = ANSWERS[case.reason]
    error = answer.json["error"]
    assert set(answer.json) == {"error"} and set(error) == {"message", "type", "code", "param"}
    assert (answer.status, error["type"], error["code"], error["param"]) == (
        expected.status, expected.error_type, expected.error_code, expected.param,
    )  # fmt: skip
    assert error["message"].startswith(SENTENCES[case.reason])
    hopeless = answer.status in (400, 401, 403) or case.reason is Reason.BUDGET_EXHAUSTED
    assert answer.headers.get("x-should-retry") == ("false" if hopeless else None)
    if case.retry_after is None:
        assert "retry-after" not in answer.headers
    else:
        least, most = case.retry_after
        assert least <= int(answer.headers["retry-after"]) <= most
    assert len(answer.headers["x-request-id"]) == 36
    if case.reason is not Reason.KEY_UNKNOWN:
        assert [row.reason for row in agent.engine.desk.log.take_counts()] == [case.reason.code]
        (sample,) = [one for one in agent.engine.desk.log.take_samples() if one.decision == "reject"]
        assert sample.request_id == answer.headers["x-request-id"]
        assert any(not check.held for check in sample.checks)


def test_every_reason_has_a_case():
    assert {case.reason for case in CASES} == set(Reason)


@pytest.mark.parametrize("why", [*Reason, *Outcome])
def test_every_message_has_a_second_sentence_that_says_what_to_do(why):
    if ANSWERS[why].error_type is None:
        assert why not in SENTENCES, "nobody is told"
        return
    parts = [part for part in SENTENCES[why].split(". ") if part]
    assert len(parts) >= 2
    body = msgspec.json.decode(refusal_answer(why, None).body)
    assert body["error"]["message"] == SENTENCES[why]


async def test_the_class_that_queues_tells_the_estimate_and_bounds_its_depth_only(make_agent):
    doc = worlds.document(
        classes=[worlds.class_policy(overload="queue", max_queue=3, max_wait_ms=1)],
        tenants=[worlds.tenant_policy(classes=["chat"])],
        pool={"slots": [worlds.slot(1, places=1)]},
    )
    agent = await make_agent(doc, [worlds.live_key(classes=["chat"])], speed=20.0)
    clients = []
    for _ in range(5):
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(max_tokens=50, ignore_eos=True)))
        clients.append(client)
        await agent.until(lambda: agent.engine.offered >= len(clients))
    answers = [await client.answer() for client in clients]
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 200, 429]
    waits = [int(answer.headers["x-flexband-estimated-wait-ms"]) for answer in answers if answer.status == 200]
    assert waits[0] == 0 and waits == sorted(waits) and waits[-1] > 1, "longer than max_wait, and told"
    full = next(answer for answer in answers if answer.status == 429)
    assert full.json["error"]["code"] == "queue_full"
    agent.assert_nothing_held()


async def test_what_waits_for_a_lease_is_decided_in_the_order_of_arrival(make_agent):
    """The lease covers some of those that wait: the first ones."""
    doc = worlds.document(tenants=[worlds.tenant_policy(hard_budget=True)])
    agent = await make_agent(doc)
    engine, asked = agent.engine, []

    def ask(tenant_id: int, need_nanos: int, job: str) -> None:
        asked.append((need_nanos, engine.desk.waiting_nanos(tenant_id)))

    engine.desk.ask_lease = ask
    clients = []
    for number in range(6):
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(max_tokens=20, ignore_eos=True)))
        clients.append(client)
        await agent.until(lambda number=number: len(engine.desk.waiting.get(1, ())) == number + 1)
    need = asked[0][0]
    assert [one for one, _ in asked] == [need] * 6
    assert engine.desk.waiting_nanos(1) == 6 * need
    now_us = engine.clock.now_us()
    engine.leases.apply([Lease(5, 1, 2 * need, now_us + 60_000_000)], [], asked_us=now_us, now_us=now_us)
    engine.desk.lease_answered(1)
    assert len(engine.desk.waiting[1]) == 4, "the rest goes on waiting and asks again"
    assert len(asked) > 6
    answers = await asyncio.gather(*(client.answer() for client in clients))
    assert [answer.status for answer in answers[:2]] == [200, 200]
    assert {answer.status for answer in answers[3:]} <= {200, 503}
    agent.assert_nothing_held()
