"""What becomes of requests: limits, queues, timeouts, drains; and that all is given back."""

import asyncio
import random

import msgspec
import pytest

from controlplane.agent.reporting import cut_report
from controlplane.core.reasons import Outcome, Reason
from controlplane.wire.report import FLAG_NOT_CHARGED, Lease, Report, Share
from tests.agent import worlds
from tests.agent.wire_client import WireClient, chat_body, post

LONG = {"max_tokens": 400, "ignore_eos": True}


def one_place(**changes):
    return worlds.document(pool={"slots": [worlds.slot(1, places=1, **changes)]})


async def send(agent, **fields) -> WireClient:
    """Send a request and wait until the agent has looked at it."""
    key, headers = fields.pop("key", worlds.SECRET), fields.pop("headers", "")
    client = await WireClient.connect(agent.port)
    agent.clients.append(client)  # a client that nobody holds is closed
    before = looked_at(agent)
    client.send(post(chat_body(**fields), key=key, headers=headers))
    await agent.until(lambda: looked_at(agent) > before)
    return client


def looked_at(agent) -> int:
    """Requests that were decided on, or that wait for a lease."""
    return agent.engine.offered + sum(len(calls) for calls in agent.engine.desk.waiting.values())


def report_of(agent) -> Report:
    """The next report, as it would be sent."""
    cut_report(agent.engine, agent.spool, agent.policy, agent.live)
    return msgspec.json.decode(agent.spool.body_of(agent.spool.state.reports[-1]), type=Report)


async def test_a_full_queue_refuses_with_the_time_to_a_free_place(make_agent):
    doc = msgspec.structs.replace(one_place(), classes=[worlds.class_policy(max_queue=1)])
    agent = await make_agent(doc, speed=1.0)
    await send(agent, **LONG)
    await send(agent, **LONG)
    answer = await (await send(agent, **LONG)).answer()
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["x-flexband-estimated-wait-ms"]) > 0
    report = report_of(agent)
    assert [(row.reason, row.count) for row in report.refusals] == [(Reason.QUEUE_FULL.code, 1)]
    by_version = {row.contract_version_id: row for row in report.objectives}
    assert by_version[42].offered == 3
    assert by_version[42].admitted == 2
    assert by_version[42].bad == {"queue_full": 1}
    assert 41 not in by_version, "what is not streamed is outside a ttft contract"
    chat = next(row for row in report.figures.classes if row.class_id == 1)
    assert chat.refused_60s == {"queue_full": 1}
    assert (chat.depth, chat.running, chat.head_reason) == (1, 1, "places_taken")
    assert sum(count for _, count in chat.wait_60s) == 3, "one that started, one that waits, one refused"


async def test_concurrency_share_and_key_rate(make_agent):
    keys = [worlds.live_key(requests_per_s=0.5), worlds.batch_key()]
    agent = await make_agent(worlds.document(), keys, speed=1.0)
    agent.engine.registry.apply_shares([Share("tenant", 1, 1, None, None)], agent.engine.clock.now_us())
    await send(agent, **LONG)
    answer = await (await send(agent, **LONG)).answer()
    assert (answer.status, answer.json["error"]["code"]) == (429, "concurrency_limit")
    agent.engine.registry.apply_shares([Share("tenant", 1, 9, None, None)], agent.engine.clock.now_us())
    answer = await (await send(agent, **LONG)).answer()
    assert (answer.status, answer.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_suspended_tenant_is_refused_at_once(make_agent):
    agent = await make_agent()
    assert agent.live.apply(worlds.delta(worlds.LiveTenant(9, 1, "acme", "suspended"), since=2), worlds.trust())
    agent.engine.apply_live(agent.live)
    answer = await (await send(agent)).answer()
    assert (answer.status, answer.json["error"]["code"]) == (403, "tenant_suspended")


async def test_a_previous_secret_is_good_until_its_instant(make_agent):
    digest = worlds.live_key().hashes[0]
    agent = await make_agent(keys=[worlds.live_key(hashes=["ff", digest], previous_until_us=1 << 60)])
    assert (await (await send(agent)).answer()).status == 200
    assert agent.live.apply(
        worlds.delta(worlds.live_key(5, hashes=["ff", digest], previous_until_us=1), since=1), worlds.trust()
    )
    agent.engine.apply_live(agent.live)
    client = await WireClient.connect(agent.port)
    assert (await client.ask(post(chat_body()))).status == 401


async def test_queue_and_stage_timeouts_are_failures_of_ours(make_agent):
    """One place: a long request of a patient class holds it; an impatient one waits too long for it."""
    patient, impatient = worlds.class_policy(stage_timeout_s=2), worlds.class_policy("quick", id=9, stage_timeout_s=1)
    doc = msgspec.structs.replace(
        one_place(),
        classes=[patient, impatient],
        tenants=[worlds.tenant_policy(classes=["chat", "quick"])],
        pool=msgspec.structs.replace(one_place().pool, isolation="shared"),
    )
    agent = await make_agent(doc, [worlds.live_key(classes=["chat", "quick"])], speed=1.0)
    running = await send(agent, **LONG)
    waiting = await send(agent, headers="x-flexband-class: quick\r\n", **LONG)
    late, slow = await waiting.answer(), await running.answer()
    assert (late.status, late.json["error"]["code"]) == (504, "queue_timeout")
    assert (slow.status, slow.json["error"]["code"]) == (504, "stage_timeout")
    await agent.until(lambda: not agent.engine.calls)
    for row in agent.closed_rows():
        assert row.flags & FLAG_NOT_CHARGED
        assert row.charge_prompt_nanos == row.charge_output_nanos == 0
    agent.assert_nothing_held()
    usage = {row.charged for row in report_of(agent).slot_usage}
    assert usage == {False}, "time of an attempt that is not charged is repeated work"


async def test_a_stream_that_times_out_ends_with_an_error_and_pays_what_came(make_agent):
    doc = msgspec.structs.replace(one_place(), classes=[worlds.class_policy(stage_timeout_s=1)])
    agent = await make_agent(doc, speed=1.0)
    answer = await (await send(agent, stream=True, **LONG)).answer()
    assert b'"code":"stage_timeout"' in answer.body
    (row,) = agent.closed_rows()
    assert row.outcome == Outcome.STAGE_TIMEOUT.code
    assert row.charge_output_nanos == row.output_tokens * 3000 > 0


async def test_higher_precedence_displaces_the_newest_of_lower(make_agent):
    first = worlds.class_policy(max_queue=1, overload="cancel", priority=1)
    later = worlds.class_policy("slow", id=9, max_queue=9, priority=5)
    doc = msgspec.structs.replace(
        one_place(),
        classes=[first, later],
        tenants=[worlds.tenant_policy(classes=["chat", "slow"])],
        pool=msgspec.structs.replace(one_place().pool, isolation="shared"),
    )
    agent = await make_agent(doc, [worlds.live_key(classes=["chat", "slow"])], speed=1.0)
    await send(agent, **LONG)
    older = await send(agent, headers="x-flexband-class: slow\r\n", **LONG)
    newest = await send(agent, headers="x-flexband-class: slow\r\n", **LONG)
    await send(agent, **LONG)
    await send(agent, **LONG)
    answer = await newest.answer()
    assert (answer.status, answer.json["error"]["code"]) == (503, "displaced")
    assert not older.reader.at_eof() and len(agent.engine.calls) == 4


async def test_a_downgrade_is_served_and_recorded_as_asked_and_served(make_agent):
    gold = worlds.class_policy(max_queue=0, overload="downgrade", downgrade_to="economy")
    economy = worlds.class_policy("economy", id=9, max_queue=9)
    doc = msgspec.structs.replace(
        one_place(),
        classes=[gold, economy],
        tenants=[worlds.tenant_policy(classes=["chat", "economy"])],
        rates=[msgspec.structs.replace(worlds.document().rates[0], class_slug="economy", rate_version=10)],
    )
    pool = msgspec.structs.replace(doc.pool, isolation="shared")
    agent = await make_agent(
        msgspec.structs.replace(doc, pool=pool), [worlds.live_key(classes=["chat", "economy"])], speed=40.0
    )
    await send(agent, **LONG)
    answer = await (await send(agent, max_tokens=2)).answer(20)
    assert answer.status == 200
    assert (answer.headers["x-flexband-class"], answer.headers["x-flexband-asked-class"]) == ("economy", "chat")
    row = next(row for row in agent.closed_rows() if row.class_id == 9)
    assert (row.asked_class_id, row.rate_version) == (1, 10)
    counts = {row.contract_version_id: row for row in report_of(agent).objectives}
    assert counts[42].bad == {"downgraded": 1}


async def test_interactive_preempts_batch_where_slots_are_shared(make_agent):
    """The batch request goes back to the head of its queue, keeps its arrival, and is answered all the same."""
    doc = one_place()
    agent = await make_agent(
        msgspec.structs.replace(doc, pool=msgspec.structs.replace(doc.pool, isolation="shared")), speed=10.0
    )
    batch = await send(agent, key=worlds.BATCH_SECRET, max_tokens=500, ignore_eos=True)
    await agent.until(lambda: any(call.prefill_us for call in agent.engine.calls.values()))
    await asyncio.sleep(0.05)
    chat = await send(agent, max_tokens=2)
    assert (await chat.answer()).status == 200
    answer = await batch.answer()
    assert answer.json["usage"]["completion_tokens"] == 500
    row = next(row for row in agent.closed_rows() if row.class_id == 2)
    assert (row.attempt, row.outcome) == (2, 1)
    report = report_of(agent)
    assert sum(u.gpu_us for u in report.slot_usage) == sum(m.busy_us for m in report.slot_meters)
    assert {u.charged for u in report.slot_usage if u.class_id == 2} == {True, False}
    agent.assert_nothing_held()


async def test_slot_time_adds_up_to_the_busy_meter(make_agent):
    agent = await make_agent(speed=20.0)
    clients = [await send(agent, max_tokens=30, ignore_eos=True, stream=n % 2 == 0) for n in range(10)]
    reports = [report_of(agent)]
    for client in clients:
        assert (await client.answer()).status == 200
        reports.append(report_of(agent))
    await agent.until(lambda: not agent.engine.calls)
    reports.append(report_of(agent))
    busy = sum(row.busy_us for report in reports for row in report.slot_meters)
    used = sum(row.gpu_us for report in reports for row in report.slot_usage)
    records = [row for report in reports for row in report.records]
    assert busy == used == sum(row.gpu_us for row in records) > 0
    assert len({row.request_id for row in records}) == len(records) == 10
    assert all(row.gpu_us >= 0 for report in reports for row in report.slot_usage)


async def test_stages_add_up_to_the_time_from_last_byte_to_answer(make_agent):
    agent = await make_agent(speed=5.0)
    await (await send(agent, stream=True, max_tokens=5, ignore_eos=True)).answer()
    await agent.until(lambda: not agent.engine.calls)
    (row,) = agent.closed_rows()
    stages = row.admission_us + row.queue_us + row.preprocess_us + row.prefill_us + row.decode_us + row.return_us
    assert stages == row.ended_us - row.arrived_us
    assert row.prefill_us > 5_000 and row.decode_us > 5_000
    assert row.ttft_us <= row.ended_us - row.arrived_us


class TestLeases:
    def doc(self):
        return worlds.document(tenants=[worlds.tenant_policy(hard_budget=True)])

    async def agent_with(self, make_agent, amount: int | None, *, speed: float = 0.0, answers: bool = True):
        """An agent whose question for a lease is answered with an amount, with `exhausted`, or not at all."""
        agent = await make_agent(self.doc(), speed=speed)
        agent.asked = []

        def ask(tenant_id: int, need_nanos: int, job: str) -> None:
            agent.asked.append(need_nanos)
            if answers:
                asyncio.get_running_loop().call_later(0.02, self.answer, agent, amount)

        agent.engine.desk.ask_lease = ask
        return agent

    def answer(self, agent, amount):
        now_us = agent.engine.clock.now_us()
        leases = [Lease(5, 1, amount, now_us + 60_000_000)] if amount else []
        exhausted = [] if amount else [worlds.Exhausted(1, "acme monthly", now_us + 3_600_000_000)]
        agent.engine.leases.apply(leases, exhausted, asked_us=now_us, now_us=now_us)
        agent.engine.desk.lease_answered(1)

    async def test_the_first_request_waits_for_a_lease_and_spends_it(self, make_agent):
        agent = await self.agent_with(make_agent, 10**9)
        answer = await (await send(agent)).answer()
        assert answer.status == 200
        (row,) = agent.closed_rows()
        (spend,) = agent.engine.leases.spends()
        assert spend.spent_nanos == row.charge_prompt_nanos + row.charge_output_nanos > 0
        assert spend.reserved_nanos == 0
        agent.assert_nothing_held()

    async def test_an_exhausted_budget_names_what_blocked(self, make_agent):
        agent = await self.agent_with(make_agent, None)
        answer = await (await send(agent)).answer()
        assert (answer.status, answer.json["error"]["code"]) == (429, "insufficient_quota")
        assert "acme monthly" in answer.json["error"]["message"]
        assert 3590 <= int(answer.headers["retry-after"]) <= 3600
        assert answer.headers["x-should-retry"] == "false"

    async def test_without_an_answer_the_request_is_refused_after_250_ms(self, make_agent):
        agent = await self.agent_with(make_agent, None, answers=False)
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await (await send(agent)).answer()
        assert (answer.status, answer.json["error"]["code"]) == (503, "no_lease")
        assert loop.time() - began > 0.2
        assert agent.engine.offered == 1
        agent.assert_nothing_held()

    async def test_gone_while_waiting_for_a_lease_is_one_refusal(self, make_agent):
        agent = await self.agent_with(make_agent, None, answers=False)
        client = await send(agent)
        client.abort()
        await agent.until(lambda: not agent.engine.desk.waiting, within_s=0.2)
        assert agent.engine.offered == 1
        assert [row.reason for row in agent.engine.desk.log.take_counts()] == [Reason.NO_LEASE.code]

    async def test_never_more_is_reserved_than_the_lease_holds(self, make_agent):
        agent = await self.agent_with(make_agent, 400_000, speed=1.0)
        answers = await asyncio.gather(*[self.one(agent) for _ in range(12)])
        assert {200} < {answer.status for answer in answers}
        (spend,) = agent.engine.leases.spends()
        assert 0 < spend.spent_nanos <= 400_000
        agent.assert_nothing_held()

    async def one(self, agent):
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(max_tokens=20, ignore_eos=True)))
        return await client.answer(20)

    async def test_a_lease_that_an_answer_no_longer_names_is_over(self, make_agent):
        agent = await self.agent_with(make_agent, 10**9)
        book, now_us = agent.engine.leases, agent.engine.clock.now_us()
        book.apply([Lease(5, 1, 10**9, now_us + 60_000_000)], [], asked_us=now_us, now_us=now_us)
        book.apply([], [], asked_us=now_us - 1, now_us=now_us + 1)
        assert book.remaining_nanos(1, now_us + 1) == 10**9, "the answer was to an older question"
        book.apply([], [], asked_us=now_us + 1, now_us=now_us + 2)
        assert book.remaining_nanos(1, now_us + 2) == 0


class TestPolicyChange:
    async def test_what_waits_and_runs_goes_on_under_the_new_revision(self, make_agent):
        agent = await make_agent(one_place(), speed=10.0)
        running = await send(agent, stream=True, max_tokens=30, ignore_eos=True)
        waiting = await send(agent, max_tokens=3)
        agent.apply(worlds.document(2, pool={"slots": [worlds.slot(1, places=2), worlds.slot(4)]}))
        assert len(agent.engine.scheduler.requests) == 2
        assert (await waiting.answer()).status == 200
        assert (await running.answer()).body.endswith(b"[DONE]\n\n")
        assert {row.revision for row in agent.closed_rows()} == {1}, "a request is judged and priced as it arrived"
        agent.assert_nothing_held()

    async def test_a_slot_that_leaves_finishes_its_work(self, make_agent):
        agent = await make_agent(one_place(), speed=10.0)
        running = await send(agent, stream=True, max_tokens=30, ignore_eos=True)
        agent.apply(worlds.document(2, pool={"slots": [worlds.slot(4)]}))
        report_of(agent)
        assert agent.engine.leaving
        assert (await running.answer()).body.endswith(b"[DONE]\n\n")
        await agent.until(lambda: not agent.engine.calls)
        reports = report_of(agent)
        assert any(row.slot_id == 1 for row in reports.slot_usage)
        assert not agent.engine.leaving
        agent.assert_nothing_held()

    async def test_requests_of_a_class_that_is_gone_are_told(self, make_agent):
        agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(1)]}), speed=10.0)
        queues = [worlds.class_policy(), worlds.class_policy("bulk", kind="batch", overload="queue")]
        agent.apply(worlds.document(2, classes=queues, pool={"slots": [worlds.slot(1)]}))
        waiting = await send(agent, key=worlds.BATCH_SECRET)
        agent.apply(worlds.document(3, classes=[worlds.class_policy()], pool={"slots": [worlds.slot(1)]}))
        assert (await waiting.answer()).json["error"]["code"] == "displaced"
        agent.assert_nothing_held()


@pytest.mark.parametrize("seed", range(3))
async def test_every_offered_request_ends_exactly_once(make_agent, seed):
    """Random arrivals, sizes, classes, aborts and a policy change: refused, completed, cancelled or failed, once."""
    rng = random.Random(seed)
    classes = [
        worlds.class_policy(max_queue=6, stage_timeout_s=2),
        worlds.class_policy("bulk", kind="batch", max_queue=6),
    ]
    doc = worlds.document(
        classes=classes, pool={"slots": [worlds.slot(1, places=2), worlds.slot(2, "batch", places=1)]}
    )
    agent = await make_agent(doc, speed=20.0)
    statuses: list[int] = []

    async def client() -> None:
        await asyncio.sleep(rng.random())
        connection = await WireClient.connect(agent.port)
        key = rng.choice([worlds.SECRET, worlds.SECRET, worlds.BATCH_SECRET])
        connection.send(
            post(chat_body(max_tokens=rng.choice([1, 5, 60]), stream=rng.random() < 0.5, ignore_eos=True), key=key)
        )
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() * 0.3)
            connection.abort()
            return
        statuses.append((await connection.answer(60)).status)

    tasks = [asyncio.create_task(client()) for _ in range(120)]
    await asyncio.sleep(0.5)
    agent.apply(
        msgspec.structs.replace(doc, revision=2, pool=msgspec.structs.replace(doc.pool, slots=[worlds.slot(1)]))
    )
    # Batch has no slot any more: what waits for one ends with the drain.
    await agent.until(lambda: all(call.klass.is_batch for call in agent.engine.calls.values()), within_s=60)
    agent.engine.draining = True
    agent.engine.cancel_all(Outcome.CANCELLED_BY_DRAIN)
    await asyncio.gather(*tasks)
    await agent.until(lambda: not agent.engine.calls)
    await asyncio.sleep(0.05)
    agent.assert_nothing_held()
    rows = agent.closed_rows()
    refused = sum(row.count for row in report_of(agent).refusals)
    assert agent.engine.offered == refused + len(rows)
    assert len({row.request_id for row in rows}) == len(rows)
    assert sum(agent.engine.outcomes.values()) == len(rows)
    assert set(statuses) <= {200, 429, 503, 504}
