"""Items through the agents' door: leased by room and deadline, listed until received, settled and charged once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connection
from django.utils import timezone

from controlplane.budgets.models import BudgetWindow, Lease
from controlplane.core.pricing import RateCard as Prices
from controlplane.core.reasons import Outcome
from controlplane.exchange.items import as_repeated
from controlplane.jobs import batch_actions
from controlplane.jobs.item_sweep import sweep_items
from controlplane.jobs.models import Item, ItemHolder, ItemResult, Job
from controlplane.ledger.models import RateCard
from controlplane.usage.models import Quarantine, RollupDelta, UsageRecord
from controlplane.wire.report import FLAG_NOT_CHARGED, Answer, LeaseSpend, SlotUsage
from tests import factories
from tests.exchange.door import TestAgent
from tests.exchange.test_answers import hard_budget
from tests.jobs.batches import ADA, Worker, empty_items, later, running, states
from tests.usage_rows import usage_row

DONE, PARKED, CANCELLED, WAITING, LEASED = 2, 3, 4, 0, 1


@pytest.fixture(autouse=True)
def files(settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")


@pytest.fixture
def bulk(world):
    """The world with a rate card for its batch class."""
    empty_items()
    card = RateCard.objects.create(
        class_slug="bulk", model=world.pool.model, effective_from=factories.NOW, prompt_nanos_per_mtok=700_000_000,
        cached_nanos_per_mtok=130_000_000, output_nanos_per_mtok=2_200_000_000, created_at=factories.NOW,
        created_by="finance",
    )  # fmt: skip
    world.bulk_prices = Prices(700_000_000, 130_000_000, 2_200_000_000, 0, 0, card.pk)
    return world


@pytest_asyncio.fixture
async def worker(bulk, agent):
    return Worker(bulk, agent)


@pytest_asyncio.fixture
async def second(bulk, app):
    one = TestAgent(app)
    assert (await one.enrol(await sync_to_async(bulk.token)(), "gpu-2")).status == 200
    await one.hello()
    return Worker(bulk, one)


async def job_of(world, items, **metadata):
    return await sync_to_async(running)(world.tenant, items, **metadata)


async def now_of(job):
    return await Job.objects.aget(pk=job.pk)


def charges():
    rows = UsageRecord.objects.values_list("charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "flags")
    return [(sum(row[:3]), bool(row[3] & FLAG_NOT_CHARGED)) for row in rows]


async def test_items_are_leased_up_to_the_room_settled_once_and_the_job_ends(worker, bulk):
    job = await job_of(bulk, 5)
    answer = await worker.ask(3)
    assert [(item.line, item.attempt) for item in answer.items] == [(1, 1), (2, 1), (3, 1)]
    assert [(row.job_id, row.uuid, row.model, row.endpoint) for row in answer.item_jobs] == [
        (job.pk, str(job.uuid), "llama-70b", "/v1/chat/completions")
    ]
    assert bytes(answer.items[0].body).startswith(b'{"model": "llama-70b"')
    await worker.ask(9, **worker.finish())
    row = await now_of(job)
    assert (row.items_completed, row.state, sorted(item.line for item in worker.held.values())) == (
        3,
        "running",
        [4, 5],
    )
    await worker.ask(9, **worker.finish())
    row = await now_of(job)
    assert (row.items_completed, row.items_failed, row.state) == (5, 0, "completed")
    assert row.finished_at is not None and row.gpu_us_done == 5 * 250_000
    stored = await sync_to_async(lambda: list(ItemResult.objects.order_by("line").values_list("line", "response")))()
    assert [(number, bytes(text)) for number, text in stored] == [(number, b'{"ok":true}') for number in range(1, 6)]
    charged = await sync_to_async(charges)()
    assert len(charged) == 5 and all(nanos > 0 and not free for nanos, free in charged)
    assert row.charge_nanos == sum(nanos for nanos, _ in charged)


async def test_items_that_ended_stand_in_no_other_agents_way(worker, second, bulk):
    await job_of(bulk, 8)
    await worker.ask(4)
    await worker.ask(0, **worker.finish())
    assert (await ItemHolder.objects.aget(free=0)).held == 0
    assert len((await second.ask(4)).items) == 4


async def test_a_lost_answer_is_made_good_by_the_next_and_leases_nothing_twice(worker, bulk):
    await job_of(bulk, 10)
    report = worker.agent.build(item_room=worker.room(4))
    lost = (await worker.agent.send(report)).read(Answer)
    again = (await worker.agent.send(report)).read(Answer)
    worker.agent.seq += 1
    assert again.repeat and [item.fence for item in again.items] == [item.fence for item in lost.items]
    answer = await worker.ask(4)
    assert [item.fence for item in answer.items] == [item.fence for item in lost.items]
    answer = await worker.ask(0)
    assert not answer.items
    assert await sync_to_async(Item.objects.filter(state=LEASED).count)() == 4


async def test_the_same_report_again_settles_and_charges_once(worker, bulk):
    job = await job_of(bulk, 2)
    await worker.ask(2)
    report = worker.agent.build(**worker.finish())
    for _ in range(3):
        assert (await worker.agent.send(report)).status == 200
    row = await now_of(job)
    assert (row.items_completed, len(await sync_to_async(charges)())) == (2, 2)


async def test_two_agents_that_finish_the_same_item_give_one_result_and_one_charge(worker, second, bulk):
    job = await job_of(bulk, 1)
    await worker.ask(1)
    swept = await sync_to_async(sweep_items)(later(3_600))
    assert swept.lapsed == 1
    await second.ask(1)
    assert [item.attempt for item in second.held.values()] == [2]
    # the first agent comes late but first with its result
    await worker.ask(0, **worker.finish(response=b'{"by":1}'))
    await second.ask(0, **second.finish(response=b'{"by":2}'))
    row = await now_of(job)
    result = await ItemResult.objects.aget()
    assert (row.items_completed, row.state, bytes(result.response)) == (1, "completed", b'{"by":1}')
    charged = await sync_to_async(charges)()
    assert sorted(free for _, free in charged) == [False, True]
    assert [nanos for nanos, free in charged if free] == [0]
    rolled = await sync_to_async(lambda: sum(RollupDelta.objects.values_list("charge_output_nanos", flat=True)))()
    assert rolled == sum(
        await sync_to_async(lambda: list(UsageRecord.objects.values_list("charge_output_nanos", flat=True)))()
    )
    assert row.charge_nanos == sum(nanos for nanos, _ in charged)
    paid = await UsageRecord.objects.aget(request_id=result.request_id)
    assert (row.prompt_tokens_done, row.output_tokens_done) == (paid.prompt_tokens, paid.output_tokens) > (0, 0)


async def test_both_results_in_one_moment_give_one_result_and_one_charge(worker, second, bulk):
    job = await job_of(bulk, 50)
    await worker.ask(50)
    await sync_to_async(sweep_items)(later(3_600))
    await second.ask(50)
    first, other = worker.finish(), second.finish()
    await asyncio.gather(worker.ask(0, **first), second.ask(0, **other))
    row = await now_of(job)
    charged = await sync_to_async(charges)()
    assert (row.items_completed, len(charged), sum(free for _, free in charged)) == (50, 100, 50)
    assert await ItemResult.objects.acount() == 50


async def spends_of(worker, need=1_000_000):
    """A lease of the worker's agent, and what a report says of it that spent `charge` nanos."""
    lease = (await worker.agent.lease(worker.world.tenant.pk, need)).leases[-1]
    return lease.lease_id, lambda charge: {"spends": [LeaseSpend(lease.lease_id, charge, 0)]}


def charge_of(parts):
    return sum(
        row.charge_prompt_nanos + row.charge_cached_nanos + row.charge_output_nanos + row.charge_gpu_nanos
        for row in parts["records"]
    )


@pytest.mark.parametrize("seals", [False, True])
async def test_a_result_that_came_second_costs_its_hard_budget_nothing(worker, second, bulk, seals):
    """Both agents spent a lease for the item; what the second spent is free again, also when its lease is over."""
    await sync_to_async(hard_budget)(bulk, limit=100_000_000)
    await job_of(bulk, 1)
    await worker.ask(1)
    await sync_to_async(sweep_items)(later(3_600))
    await second.ask(1)
    paid, spent = await spends_of(worker)
    first = worker.finish(lease=paid)
    await worker.ask(0, **first, **spent(charge_of(first)))
    paid, spent = await spends_of(second)
    other = second.finish(lease=paid)
    assert charge_of(other) > 0
    if seals:
        # the total is told by one report, the record and its result come with a later one
        await second.ask(0, **spent(charge_of(other)))
        assert (await BudgetWindow.objects.aget()).settled_nanos == charge_of(first) + charge_of(other)
        await sync_to_async(Lease.objects.filter(pk=paid).update)(expires_at=later(-60))
        await second.ask(0, **spent(charge_of(other)))
        assert (await Lease.objects.aget(pk=paid)).state == "closed"
        await second.ask(0, **other)
    else:
        await second.ask(0, **other, **spent(charge_of(other)))
    window = await BudgetWindow.objects.aget()
    assert window.settled_nanos == charge_of(first) == sum(nanos for nanos, _ in await sync_to_async(charges)())
    open_leases = [row async for row in Lease.objects.filter(state="open")]
    assert window.leased_nanos == sum(row.amount_nanos - row.spent_nanos for row in open_leases)


async def test_a_request_of_a_clients_own_that_names_a_job_with_items_is_paid_for(worker, bulk):
    """Its header says so and no result comes of it: it would be free to whoever has a job."""
    job = await job_of(bulk, 1)
    record = usage_row(
        bulk, prices=bulk.bulk_prices, job=str(job.uuid), class_id=bulk.bulk.pk, asked_class_id=bulk.bulk.pk
    )
    await worker.ask(0, records=[record])
    assert await sync_to_async(charges)() == [(charge_of({"records": [record]}), False)]
    assert (await now_of(job)).items_completed == 0


async def test_work_that_no_key_submitted_is_charged_to_its_tenant_and_in_no_sum_missing(worker, bulk):
    """Usage without an owner below the tenant is not dropped: it is under the tenant, with a dash for its key."""
    job = await job_of(bulk, 2)
    assert job.key_id is None
    await worker.ask(2)
    await worker.ask(0, **worker.finish(key_id=0))
    records = await sync_to_async(charges)()
    assert len(records) == 2 and all(nanos > 0 and not free for nanos, free in records)
    assert (await now_of(job)).charge_nanos == sum(nanos for nanos, _ in records)

    def of_tenant():
        lines = ("charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "charge_gpu_nanos")
        rows = RollupDelta.objects.filter(tenant_id=bulk.tenant.pk).values_list(*lines)
        return sum(sum(row) for row in rows)

    assert await sync_to_async(of_tenant)() == sum(nanos for nanos, _ in records)


async def test_three_failures_park_an_item_with_its_reason_and_charge_nothing(worker, bulk):
    job = await job_of(bulk, 1)
    for attempt in (1, 2, 3):
        await worker.ask(1)
        assert [item.attempt for item in worker.held.values()] == [attempt]
        how = {"outcome": Outcome.UPSTREAM_ERROR.code, "status": 502, "reason": f"engine died {attempt}"}
        await worker.ask(0, **worker.finish(response=b"null", **how))
    item = await Item.objects.aget()
    assert (item.state, item.failures, item.reason) == (PARKED, 3, "engine died 3")
    row = await now_of(job)
    assert (row.items_parked, row.items_failed, row.state) == (1, 3, "completed")
    assert all(nanos == 0 for nanos, _ in await sync_to_async(charges)())
    retried = await sync_to_async(batch_actions.retry_parked)(job_uuid=job.uuid, actor=ADA, now=timezone.now())
    assert retried == 1
    await worker.ask(1)
    await worker.ask(0, **worker.finish())
    row = await now_of(job)
    assert (row.items_completed, row.items_parked, row.state) == (1, 0, "completed")


async def test_a_verdict_of_the_engine_is_not_tried_again(worker, bulk):
    await job_of(bulk, 1)
    await worker.ask(1)
    how = {"outcome": Outcome.UPSTREAM_ERROR.code, "status": 400, "reason": "no such tool"}
    await worker.ask(0, **worker.finish(response=b'{"error":{"message":"no such tool"}}', **how))
    item, result = await Item.objects.aget(), await ItemResult.objects.aget()
    assert (item.state, item.reason, result.status) == (PARKED, "no such tool", 400)


async def test_an_item_handed_back_costs_no_attempt(worker, bulk):
    await job_of(bulk, 1)
    await worker.ask(1)
    await worker.ask(0, **worker.finish(outcome=Outcome.CANCELLED_BY_DRAIN.code, status=0, response=b"null"))
    item = await Item.objects.aget()
    assert (item.state, item.attempt, item.failures) == (WAITING, 1, 0)


async def test_a_cancelled_job_is_named_in_the_next_answer_and_nothing_more_is_leased(worker, bulk):
    job = await job_of(bulk, 6)
    await worker.ask(2)
    batch = await sync_to_async(lambda: job.batch)()
    await sync_to_async(batch_actions.cancel_batch)(batch_id=batch.pk, actor=ADA, now=timezone.now())
    answer = await worker.ask(5)
    assert ([(row.job_id, row.fences) for row in answer.items_cancelled], answer.items) == ([(job.pk, [])], [])
    swept = await sync_to_async(sweep_items)(timezone.now())
    assert swept.ended == 4
    one, two = worker.held.values()
    ended = worker.finish([one]), worker.finish([two], outcome=Outcome.CANCELLED_BY_CLIENT.code, status=499)
    parts = {name: ended[0][name] + ended[1][name] for name in ended[0]}
    answer = await worker.ask(5, **parts)
    assert not answer.items_cancelled
    assert await sync_to_async(states)(job) == {1: DONE, 2: CANCELLED, **dict.fromkeys(range(3, 7), CANCELLED)}
    row = await now_of(job)
    assert (row.state, row.items_completed, row.items_cancelled) == ("cancelled", 1, 5)
    # what ran until its owner ended it is paid for
    assert all(not free for _, free in await sync_to_async(charges)())


async def test_the_earliest_deadline_is_leased_first_and_best_effort_last(worker, bulk):
    best = await job_of(bulk, 2, best_effort="true")
    late = await job_of(bulk, 2, deadline=later(7_200).isoformat())
    soon = await job_of(bulk, 2, deadline=later(3_600).isoformat())
    missed = await job_of(bulk, 1)
    await Job.objects.filter(pk=missed.pk).aupdate(deadline=later(-3_600))
    answer = await worker.ask(6)
    # a job that missed its deadline for good makes way for those that can still hold theirs
    assert [item.job_id for item in answer.items] == [soon.pk, soon.pk, late.pk, late.pk, missed.pk, best.pk]


async def test_too_little_work_is_shared_in_proportion_to_room(worker, second, bulk):
    await worker.ask(30)
    await second.ask(10)
    await job_of(bulk, 20)
    first = await worker.ask(30)
    other = await second.ask(10)
    assert (len(first.items), len(other.items)) == (15, 5)


async def test_who_holds_all_that_is_left_gives_back_what_another_could_run(worker, second, bulk):
    job = await job_of(bulk, 20)
    await worker.ask(20)
    assert (await second.ask(20)).items == []
    answer = await worker.ask(0)
    assert (answer.items_give_back, answer.items) == (10, [])
    back = list(worker.held.values())[-answer.items_give_back :]
    assert (await worker.ask(0, **worker.finish(back, outcome=Outcome.CANCELLED_BY_DRAIN.code))).items_give_back == 0
    await second.ask(20)
    assert (len(worker.held), len(second.held)) == (10, 10)
    assert (await worker.ask(0)).items_give_back == (await second.ask(10)).items_give_back == 0
    for one in (worker, second):
        await one.ask(20, **one.finish())
    row = await now_of(job)
    assert (row.state, row.items_completed, row.items_failed) == ("completed", 20, 0)


async def test_a_restarted_agent_gets_its_items_back_when_its_old_reports_are_sealed(worker, bulk):
    await job_of(bulk, 3)
    await worker.ask(3)
    old = worker.agent.epoch
    await worker.agent.hello([old])
    worker.through, worker.held = 0, {}
    await worker.ask(3)
    assert not worker.held
    assert (await sync_to_async(sweep_items)(timezone.now())).lapsed == 0
    sealed = worker.agent.build(epoch=old, seq=2, seal=True)
    assert (await worker.agent.send(sealed)).status == 200
    assert (await sync_to_async(sweep_items)(timezone.now())).lapsed == 3
    answer = await worker.ask(3)
    assert [(item.line, item.attempt) for item in answer.items] == [(1, 2), (2, 2), (3, 2)]


async def test_an_agent_of_another_pool_cannot_settle_items(worker, bulk, app):
    job = await job_of(bulk, 1)
    await worker.ask(1)
    elsewhere = await sync_to_async(factories.pool)("other-pool")
    foreign = TestAgent(app)
    token = await sync_to_async(lambda: __import__("tests.world", fromlist=["x"]).enrolment_token(elsewhere))()
    assert (await foreign.enrol(token, "gpu-9")).status == 200
    await foreign.hello()
    end, _ = worker.done(next(iter(worker.held.values())))
    answer = await foreign.report(items_done=[end])
    assert answer.accepted_through == 1
    assert await sync_to_async(states)(job) == {1: LEASED}


async def test_an_item_cannot_be_settled_under_a_lease_that_was_never_given(worker, bulk):
    import msgspec

    job = await job_of(bulk, 1)
    await worker.ask(1)
    end, record = worker.done(next(iter(worker.held.values())))
    await worker.ask(0, items_done=[msgspec.structs.replace(end, fence=end.fence + 1_000)], records=[record])
    assert await sync_to_async(states)(job) == {1: LEASED}
    assert [free for _, free in await sync_to_async(charges)()] == [True]


async def test_a_job_of_a_revoked_key_gets_no_items_leased(worker, bulk):
    """Agents would hand them back one after the other; other jobs go on."""
    of_key = await sync_to_async(running)(bulk.tenant, 3, key=bulk.key)
    other = await job_of(bulk, 2)
    bulk.key.state = "revoked"
    await sync_to_async(bulk.key.save)()
    assert {item.job_id for item in (await worker.ask(9)).items} == {other.pk}
    bulk.key.state = "active"
    await sync_to_async(bulk.key.save)()
    assert {item.job_id for item in (await worker.ask(9)).items} == {of_key.pk}


async def test_a_suspended_tenant_gets_no_items_leased(worker, bulk):
    await job_of(bulk, 2)
    await sync_to_async(lambda: type(bulk.tenant).objects.update(state="suspended"))()
    assert not (await worker.ask(2)).items


async def test_answers_are_cut_at_their_bytes_and_go_on_with_the_next(worker, bulk, monkeypatch):
    from controlplane.jobs import item_leases

    monkeypatch.setattr(item_leases, "BYTES_PER_ANSWER", 500)
    await job_of(bulk, 10)
    first = await worker.ask(10)
    assert 0 < len(first.items) < 10
    for _ in range(10):
        await worker.ask(0)
    assert sorted(item.line for item in worker.held.values()) == list(range(1, 11))
    holder = await ItemHolder.objects.aget()
    assert holder.held == 10


async def test_impossible_ends_of_items_are_set_aside_and_the_rest_counts(worker, bulk):
    """Result and record alike: a result that never lands is not charged, and one that does is charged once."""
    job = await job_of(bulk, 2)
    await worker.ask(2)
    parts = worker.finish()
    sound = parts["items_done"][1].request_id
    parts["items_done"][0] = msgspec.structs.replace(parts["items_done"][0], line=2**40)
    answer = await worker.ask(0, **parts)
    assert (answer.accepted_through, answer.quarantined) == (2, 1)
    assert sorted((await sync_to_async(states)(job)).values()) == [LEASED, DONE]

    def read():
        aside = {row.reason: (row.records, list(row.payload)) for row in Quarantine.objects.all()}
        return [str(row.request_id) for row in UsageRecord.objects.all()], aside, charges()

    stored, aside, charged = await sync_to_async(read)()
    assert stored == [sound]
    assert aside == {"impossible_number": (0, ["items_done"]), "impossible_item": (1, ["records"])}
    row = await now_of(job)
    assert (row.items_completed, row.charge_nanos) == (1, charged[0][0]) and charged[0][0] > 0

    await sync_to_async(sweep_items)(later(300))
    await worker.ask(0)
    worker.held.clear()
    await worker.ask(2)
    await worker.ask(0, **worker.finish())
    row = await now_of(job)
    charged = await sync_to_async(charges)()
    assert (row.state, row.items_completed, len(charged)) == ("completed", 2, 2)
    assert row.charge_nanos == sum(nanos for nanos, free in charged if not free)


def test_gpu_time_of_a_refused_result_becomes_repeated_work_and_sums_stay():
    rows = [
        SlotUsage(1, 60, 7, 8, True, 100),
        SlotUsage(1, 120, 7, 8, True, 50),
        SlotUsage(1, 120, 7, 8, False, 5),
        SlotUsage(1, 120, 9, 8, True, 40),
        SlotUsage(2, 120, 7, 8, True, 30),
    ]
    moved = as_repeated(rows, {(1, 7, 8): 70})
    by_charge = {(r.slot_id, r.minute_us, r.tenant_id, r.charged): 0 for r in moved}
    for row in moved:
        by_charge[(row.slot_id, row.minute_us, row.tenant_id, row.charged)] += row.gpu_us
    assert by_charge == {
        (1, 60, 7, True): 80, (1, 60, 7, False): 20, (1, 120, 7, False): 55, (1, 120, 9, True): 40,
        (2, 120, 7, True): 30,
    }  # fmt: skip
    assert as_repeated(rows, {}) == rows
    assert sum(row.gpu_us for row in as_repeated(rows, {(1, 7, 8): 999})) == 225


def test_the_tables_hold_one_row_an_item(bulk):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_constraint WHERE conrelid = 'jobs_itemresult'::regclass AND contype = 'p'"
        )
        assert cursor.fetchone() == (1,)
