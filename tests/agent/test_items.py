"""Items on one agent: leased, run, cancelled, lapsed, refused, lost, and reported with the usage of their request."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from controlplane.agent.item_calls import RESPONSE_BYTES_MAX
from controlplane.core.batch_items import UNPAID, is_verdict
from controlplane.core.reasons import Outcome
from controlplane.core.slot_states import SlotState
from controlplane.wire.policy import LiveTenant
from controlplane.wire.report import FLAG_NOT_CHARGED, Exhausted, ItemsCancelled, Lease
from tests.agent import worlds
from tests.agent.leased_items import (
    JOB,
    body,
    ended,
    item,
    job,
    last_reports,
    lease,
    report,
    upstream_agent,
    with_boot_clock,
)
from tests.agent.test_flex_agent import FLEX_ID, flex_document, lend, recall, state
from tests.agent.upstreams import WHOLE, Upstream, respond
from tests.agent.wire_client import WireClient, chat_body, post

HANDED_BACK = Outcome.CANCELLED_BY_DRAIN.code


async def test_an_item_runs_as_a_request_and_its_end_goes_with_the_record(make_agent):
    agent = await make_agent()
    lease(agent, [item(fence) for fence in (1, 2, 3)])
    await agent.until(lambda: ended(agent) == 3)
    agent.assert_nothing_held()
    told = report(agent)
    assert {row.job for row in told.records} == {JOB % 1}
    assert {(row.tenant_id, row.key_id, row.class_id) for row in told.records} == {(2, 12, 2)}
    assert all(row.charge_output_nanos == row.output_tokens * 3000 > 0 for row in told.records)
    assert [done.request_id for done in told.items_done] == [row.request_id for row in told.records]
    assert sorted((done.job_id, done.line, done.attempt, done.fence) for done in told.items_done) == [
        (1, 1, 1, 1),
        (1, 2, 1, 2),
        (1, 3, 1, 3),
    ]
    assert {(done.outcome, done.status, done.reason) for done in told.items_done} == {(1, 200, "")}
    assert msgspec.json.decode(told.items_done[0].response)["choices"][0]["message"]["content"]
    assert told.items_through == 3
    assert not report(agent).items_done, "told once"


async def test_what_is_listed_again_runs_once(make_agent):
    """An answer came, a report cut before it was answered too: its list begins where that report stood."""
    agent = await make_agent()
    lease(agent, [item(1), item(2)])
    lease(agent, [item(1), item(2), item(3)])
    await agent.until(lambda: ended(agent) == 3)
    lease(agent, [item(2), item(3)])
    await asyncio.sleep(0.1)
    assert sorted(done.fence for done in report(agent).items_done) == [1, 2, 3]


async def test_an_item_that_cannot_begin_in_its_lease_is_handed_back_before_and_dropped_after(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(1)]}))
    clock = with_boot_clock(agent)
    lease(agent, [item(1, lease_s=100), item(2, lease_s=200)])
    await asyncio.sleep(0.1)
    assert not agent.engine.items.done, "no slot serves batch: it waits"
    clock.ahead_us = 95_000_000
    agent.engine.items._sweep()
    told = report(agent)
    assert [(done.fence, done.outcome) for done in told.items_done] == [(1, HANDED_BACK)]
    assert "lease" in told.items_done[0].reason
    clock.ahead_us = 201_000_000
    agent.engine.items._sweep()
    assert not agent.engine.items.held.by_fence
    assert (agent.engine.items.lapsed, [done.fence for done in report(agent).items_done]) == (1, [])
    agent.assert_nothing_held()


async def test_a_queued_item_whose_lease_ends_leaves_the_queue_and_a_running_one_goes_on(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=1)]}), speed=0.5)
    clock = with_boot_clock(agent)
    lease(agent, [item(1, lease_s=100), item(2, lease_s=100)])
    assert [call.running for call in agent.engine.calls.values()] == [True, False]
    clock.ahead_us = 95_000_000
    agent.engine.items._sweep()
    assert len(agent.engine.calls) == 1
    await agent.until(lambda: not agent.engine.calls)
    ends = {done.fence: done.outcome for done in report(agent).items_done}
    assert ends == {1: Outcome.COMPLETED.code, 2: HANDED_BACK}


async def test_a_cancelled_job_drops_what_waits_and_cancels_what_runs(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=2)]}), speed=0.2)
    jobs = [job(1), job(2)]
    lease(agent, [item(fence, 1) for fence in range(1, 11)] + [item(11, 2)], jobs=jobs)
    await agent.until(lambda: any(call.prefill_us for call in agent.engine.calls.values()))
    lease(agent, [], cancelled=[ItemsCancelled(1)])
    assert {held.job.job.job_id for held in agent.engine.items.held.by_fence.values()} == {2}
    told = report(agent)
    of_running = [done for done in told.items_done if done.outcome == Outcome.CANCELLED_BY_CLIENT.code]
    assert len(told.items_done) == 10 and 1 <= len(of_running) <= 4
    paid = [row for row in told.records if not row.flags & FLAG_NOT_CHARGED]
    assert paid and all(row.charge_prompt_nanos > 0 for row in paid), "prefill had begun"
    await agent.until(lambda: not agent.engine.items.held.by_fence)
    agent.assert_nothing_held()
    assert [(done.job_id, done.outcome) for done in report(agent).items_done] == [(2, 1)]


async def test_items_of_named_fences_are_dropped(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(1)]}))
    lease(agent, [item(1), item(2), item(3)])
    lease(agent, [], cancelled=[ItemsCancelled(1, [1, 3, 77]), ItemsCancelled(99)])
    assert set(agent.engine.items.held.by_fence) == {2}


@pytest.mark.parametrize("step", ["leased", "running", "ended", "cut"])
async def test_after_kill_a_result_is_reported_if_its_end_was_written_and_only_then(make_agent, step):
    """What is on disk at that instant is all that the next process has."""
    agent = await make_agent(speed=0.0 if step in ("ended", "cut") else 0.2)
    lease(agent, [item(1), item(2)])
    if step == "running":
        await agent.until(lambda: any(call.prefill_us for call in agent.engine.calls.values()))
    if step in ("ended", "cut"):
        await agent.until(lambda: ended(agent) == 2)
    if step == "cut":
        report(agent)
    agent.engine._flush()
    reports = last_reports(agent.state_dir)
    ends = [done for made in reports for done in made.items_done]
    rows = {row.request_id: row for made in reports for row in made.records}
    if step in ("leased", "running"):
        assert not ends
        assert {row.outcome for row in rows.values()} <= {Outcome.LOST.code}
    else:
        assert sorted(done.fence for done in ends) == [1, 2]
        assert {rows[done.request_id].outcome for done in ends} == {Outcome.COMPLETED.code}
        assert all(msgspec.json.decode(done.response) for done in ends)
    assert reports[-1].seal


async def test_another_epoch_of_the_same_process_does_not_run_items_of_the_one_before(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=1)]}), speed=1.0)
    lease(agent, [item(fence) for fence in range(1, 9)])
    agent.engine.start(agent.spool)
    assert agent.engine.items.through == 0
    await agent.until(lambda: not agent.engine.items.held.by_fence)
    ends = {done.fence: done.outcome for done in report(agent).items_done}
    assert len(ends) == 8
    assert set(ends.values()) == {Outcome.COMPLETED.code, HANDED_BACK}
    lease(agent, [item(20, attempt=2)])
    await agent.until(lambda: not agent.engine.items.held.by_fence)
    assert [(done.fence, done.attempt) for done in report(agent).items_done] == [(20, 2)]


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (body(stream=True), 400, "stream"),
        (body(max_tokens=0), 400, "max_tokens"),
        (body(max_tokens=4000), 400, "output"),
        (body(messages=[{"role": "user", "content": "x" * 40_000}]), 400, "prompt"),
        (b'{"model":"llama-70b"}', 400, "messages"),
        (b"[1]", 400, "not valid"),
    ],
)
async def test_an_item_that_can_never_run_fails_for_good_with_the_reason(make_agent, text, status, said):
    agent = await make_agent()
    lease(agent, [item(1, text=text), item(2)])
    await agent.until(lambda: ended(agent) == 2)
    told = {done.fence: done for done in report(agent).items_done}
    assert (told[1].status, is_verdict(told[1].status)) == (status, True)
    assert said in told[1].reason.lower()
    assert msgspec.json.decode(told[1].response)["error"]["message"]
    assert told[2].status == 200
    agent.assert_nothing_held()


async def test_what_a_person_stopped_is_handed_back_and_costs_no_attempt(make_agent):
    agent = await make_agent(speed=0.2)
    agent.engine.registry.keys[12].live = worlds.batch_key(3, state="revoked")
    agent.engine.registry.keys[12].take(worlds.batch_key(3, state="revoked"))
    lease(agent, [item(1)])
    assert [(done.outcome, done.reason) for done in report(agent).items_done] == [
        (HANDED_BACK, "It may not run now: key_revoked.")
    ]
    agent.engine.registry.keys[12].take(worlds.batch_key(4, expires_us=1))
    lease(agent, [item(2)])
    assert agent.engine.calls, "the key was good when the job was admitted"
    assert agent.live.apply(worlds.delta(LiveTenant(9, 2, "delta", "suspended"), since=2), worlds.trust())
    agent.engine.apply_live(agent.live)
    lease(agent, [item(3)])
    assert "tenant_suspended" in report(agent).items_done[0].reason
    lease(agent, [item(4, 2), item(5, 3)], jobs=[job(2, class_id=99), job(3, key_id=77)])
    assert {done.outcome for done in report(agent).items_done} == {HANDED_BACK}


async def test_items_keep_within_the_limits_of_their_key_and_nothing_counts_as_refused(make_agent):
    agent = await make_agent(keys=[worlds.live_key(), worlds.batch_key(max_concurrency=2)], speed=5.0)
    lease(agent, [item(fence) for fence in range(1, 13)])
    most = 0
    while agent.engine.items.held.by_fence:
        most = max(most, len(agent.engine.calls))
        await asyncio.sleep(0.002)
    assert most == 2
    told = report(agent)
    assert ([done.outcome for done in told.items_done], told.refusals) == ([1] * 12, [])


async def test_an_item_waits_for_a_lease_of_its_tenants_budget(make_agent):
    doc = worlds.document(tenants=[worlds.tenant_policy(), worlds.tenant_policy("delta", id=2, hard_budget=True)])
    agent = await make_agent(doc)
    asked: list[tuple[int, int]] = []
    agent.engine.desk.ask_lease = lambda tenant_id, need, job: asked.append((tenant_id, need))
    lease(agent, [item(1)])
    await agent.until(lambda: asked)
    await asyncio.sleep(0.2)
    assert asked[0][0] == 2 and asked[0][1] > 0
    assert not agent.engine.calls and not report(agent).refusals
    now_us = agent.engine.clock.now_us()
    agent.engine.leases.apply([Lease(5, 2, 10**9, now_us + 60_000_000)], [], asked_us=now_us, now_us=now_us)
    await agent.until(lambda: ended(agent) == 1)
    (spend,) = agent.engine.leases.spends()
    (row,) = report(agent).records
    assert spend.spent_nanos == row.charge_prompt_nanos + row.charge_output_nanos > 0
    agent.assert_nothing_held()


async def test_items_that_a_used_up_budget_does_not_pay_for_make_room_for_others(make_agent):
    doc = worlds.document(tenants=[worlds.tenant_policy(), worlds.tenant_policy("delta", id=2, hard_budget=True)])
    agent = await make_agent(doc)
    engine = agent.engine

    def used_up(tenant_id: int, need: int, job: str) -> None:
        now_us = engine.clock.now_us()
        engine.leases.apply([], [Exhausted(tenant_id, "delta daily", now_us)], asked_us=0, now_us=now_us)
        engine.leases.nothing_for(tenant_id, job, now_us)

    engine.desk.ask_lease = used_up
    lease(agent, [item(fence) for fence in range(1, 9)])
    await asyncio.sleep(1.0)
    assert ended(agent) == 0, "it may be there again in a moment"
    await agent.until(lambda: ended(agent) == 8)
    done = report(agent).items_done
    assert {(row.outcome, row.attempt) for row in done} == {(HANDED_BACK, 1)}
    assert all(row.reason.startswith(UNPAID) and "delta daily" in row.reason for row in done)
    agent.assert_nothing_held()


async def test_what_another_agent_could_run_is_given_back_the_last_first(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=1)]}), speed=5.0)
    now_us = agent.engine.clock.now_us()
    jobs = [job(number, deadline_us=now_us + number * 60_000_000) for number in (1, 2)]
    lease(agent, [item(fence, fence % 2 + 1) for fence in range(1, 21)], jobs=jobs)
    agent.engine.items.give_back(5)
    told = [(row.job_id, row.line, row.outcome) for row in report(agent).items_done if row.outcome == HANDED_BACK]
    assert told == [(2, line, HANDED_BACK) for line in (19, 17, 15, 13, 11)]
    agent.engine.items.give_back(100)
    assert not agent.engine.items.held.waiting and agent.engine.calls, "what was begun goes on"
    await agent.until(lambda: not agent.engine.calls)
    agent.assert_nothing_held()


async def test_the_earliest_deadline_goes_first_and_best_effort_last(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=1)]}), speed=20.0)
    now_us = agent.engine.clock.now_us()
    jobs = [job(1), job(2, deadline_us=now_us + 9 * 10**9), job(3, deadline_us=now_us + 10**9)]
    fences = {1: range(1, 5), 2: range(5, 9), 3: range(9, 13)}
    lease(agent, [item(fence, number) for number, of in fences.items() for fence in of], jobs=jobs)
    await agent.until(lambda: ended(agent) == 12)
    assert [done.job_id for done in report(agent).items_done] == [3] * 4 + [2] * 4 + [1] * 4


async def test_items_leave_direct_batch_requests_their_share_and_the_whole_queue_bound(make_agent):
    """Hundreds of items wait; another tenant's own clients get as much, and none of them is refused."""
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=2)]}), speed=10.0)
    lease(agent, [item(fence, text=body(ignore_eos=True)) for fence in range(1, 301)])
    await asyncio.sleep(0.3)
    before, answers = ended(agent), []

    async def client() -> None:
        for _ in range(10):
            wire = await WireClient.connect(agent.port)
            sent = chat_body(max_tokens=8, ignore_eos=True)
            answers.append((await wire.ask(post(sent, headers="x-flexband-class: bulk\r\n"))).status)

    await asyncio.gather(*(client() for _ in range(8)))
    of_items = ended(agent) - before
    assert answers == [200] * 80
    print(f"\n  while 80 direct requests ran, {of_items} items did")
    assert 40 <= of_items <= 160


async def test_a_full_class_queue_does_not_keep_items_out(make_agent):
    agent = await make_agent(
        worlds.document(
            pool={"slots": [worlds.slot(2, "batch", places=1)]},
            classes=[worlds.class_policy(), worlds.class_policy("bulk", kind="batch", max_queue=2)],
        ),
        speed=1.0,
    )
    clients = [await WireClient.connect(agent.port) for _ in range(3)]
    for client in clients:
        client.send(post(chat_body(max_tokens=8), headers="x-flexband-class: bulk\r\n"))
    await agent.until(lambda: len(agent.engine.calls) == 3)
    lease(agent, [item(1), item(2), item(3)])
    assert len(agent.engine.calls) == 5, "two of them stand in the queue of the class"
    await agent.until(lambda: ended(agent) == 3)


async def test_preempted_and_displaced_items_run_again_while_their_lease_holds(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=1)]}), speed=1.0)
    lease(agent, [item(1), item(2)])
    running, queued = agent.engine.calls.values()
    agent.engine.requeue(running)
    agent.engine.close(queued, Outcome.DISPLACED)
    agent.engine.pump(agent.engine.clock.now_us())
    await agent.until(lambda: ended(agent) == 2)
    told = report(agent)
    assert [done.outcome for done in told.items_done] == [1, 1]
    assert sorted((row.outcome, row.attempt) for row in told.records) == [(1, 1), (1, 2), (4, 1)]
    agent.assert_nothing_held()


async def test_a_drain_hands_back_what_has_not_begun(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=1)]}), speed=0.5)
    lease(agent, [item(fence) for fence in range(1, 6)])
    agent.engine.draining = True
    assert [room.items for room in report(agent).item_room] == [0]
    agent.engine.cancel_all(Outcome.CANCELLED_BY_DRAIN)
    assert not agent.engine.items.held.by_fence
    assert {done.outcome for done in report(agent).items_done} == {HANDED_BACK}


# -- what the inference server says ------------------------------------------------------------------


async def one_end(agent, text: bytes | None = None):
    lease(agent, [item(1, text=text)])
    await agent.until(lambda: ended(agent) == 1)
    told = report(agent)
    return told.items_done[0], told.records[0]


async def test_the_servers_document_is_the_result_on_one_line(make_agent):
    async def pretty(_, __, writer) -> None:
        respond(writer, 200, json.dumps(json.loads(WHOLE), indent=2).encode())

    async with Upstream(pretty) as upstream:
        done, row = await one_end(await upstream_agent(make_agent, upstream))
    assert msgspec.json.decode(done.response) == json.loads(WHOLE)
    assert b"\n" not in bytes(done.response)
    assert (row.prompt_tokens, row.output_tokens) == (21, 3)


@pytest.mark.parametrize(
    ("status", "sent", "outcome", "told", "charged"),
    [
        (400, b'{"error":{"message":"bad schema"}}', Outcome.UPSTREAM_ERROR, 400, False),
        (429, b'{"error":{"message":"slow down"}}', Outcome.UPSTREAM_ERROR, 429, False),
        (401, b'{"error":{"message":"key"}}', Outcome.UPSTREAM_ERROR, 502, False),
        (500, b"oops", Outcome.UPSTREAM_ERROR, 502, False),
        (200, b'{"choices":[', Outcome.UPSTREAM_ERROR, 502, False),
        (200, b'"' + b"x" * (RESPONSE_BYTES_MAX + 1) + b'"', Outcome.UPSTREAM_ERROR, 413, False),
    ],
)
async def test_outcomes_as_the_wire_promises(make_agent, status, sent, outcome, told, charged):
    async def script(_, __, writer) -> None:
        respond(writer, status, sent)

    async with Upstream(script) as upstream:
        agent = await upstream_agent(make_agent, upstream)
        done, row = await one_end(agent)
    assert (done.outcome, done.status) == (row.outcome, row.status) == (outcome.code, told)
    assert done.reason
    assert bool(row.flags & FLAG_NOT_CHARGED) is not charged
    if told in (400, 429):
        assert bytes(done.response) == sent
    else:
        assert bytes(done.response) == b"null"
    agent.assert_nothing_held()


async def test_a_busy_server_is_asked_again_within_the_agents_own_retry_budget(make_agent):
    async def once_busy(upstream, _, writer) -> None:
        respond(writer, 503 if len(upstream.bodies) == 1 else 200, WHOLE)

    async with Upstream(once_busy) as upstream:
        done, row = await one_end(await upstream_agent(make_agent, upstream))
        assert len(upstream.bodies) == 2
    assert (done.outcome, done.attempt, row.attempt) == (1, 1, 2)


async def test_items_run_on_lent_slots_and_go_back_to_the_queue_when_the_loan_ends(make_agent):
    agent = await make_agent(flex_document(drain_bound_s=1), speed=0.5)
    lease(agent, [item(fence, text=body(max_tokens=200, ignore_eos=True)) for fence in (1, 2, 3)])
    assert not any(call.running for call in agent.engine.calls.values())
    assert [room.items for room in report(agent).item_room] == [0], "no slot serves batch"
    lend(agent, fence=1)
    agent.engine.step()
    assert [call.slot.policy.id for call in agent.engine.calls.values() if call.slot] == [FLEX_ID]
    assert [room.items > 0 for room in report(agent).item_room] == [True]
    recall(agent, 2)
    agent.engine.step()
    assert [room.items for room in report(agent).item_room] == [0], "the slot is on its way home"
    await agent.until(lambda: state(agent) is SlotState.HOME)
    assert not any(call.running for call in agent.engine.calls.values())
    assert len(agent.engine.items.held.by_fence) == 3, "all leases still hold"
    agent.engine.backend.inner.speed = 50.0
    lend(agent, fence=3)
    await agent.until(lambda: not agent.engine.items.held.by_fence)
    told = report(agent)
    assert [done.outcome for done in told.items_done] == [1, 1, 1]
    assert {row.slot_id for row in told.records} == {FLEX_ID}
    assert max(row.attempt for row in told.records) == 2
    agent.assert_nothing_held()


async def test_items_of_one_shot_work_run_too(make_agent):
    agent = await make_agent()
    text = json.dumps({"model": worlds.MODEL, "input": ["one text", "another"]}).encode()
    lease(agent, [item(1, text=text), item(2, text=b'{"model":"llama-70b"}')], jobs=[job(endpoint="/v1/embeddings")])
    await agent.until(lambda: ended(agent) == 2)
    told = {done.fence: done for done in report(agent).items_done}
    assert len(msgspec.json.decode(told[1].response)["data"]) == 2
    assert (told[2].status, "input" in told[2].reason) == (400, True)
    agent.assert_nothing_held()
