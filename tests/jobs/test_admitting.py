"""Admission of jobs on real rows: deadlines against slots, money against hard budgets, two at once, the way back."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connection as django_connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.budgets.job_reservations import release, reserve, reserved_nanos
from controlplane.budgets.leases import open_leases
from controlplane.budgets.models import Budget, BudgetWindow, Lease
from controlplane.exchange.database import close_pools, connection
from controlplane.exchange.job_funds import fund_items, fund_request
from controlplane.fleet.models import Slot, SlotInterval
from controlplane.jobs import actions, batch_actions, batch_import, tasks
from controlplane.jobs.actions import JobOrder
from controlplane.jobs.admitting import NotAdmitted, give_back
from controlplane.jobs.batch_capacity import capacity_of
from controlplane.jobs.models import Batch, BatchEfficiency, ItemHolder, Job
from controlplane.ledger.models import RateCard
from controlplane.tenants import key_actions
from controlplane.wire.lease import LeaseRequest
from tests import factories
from tests.jobs.batches import ADA, empty_items, jsonl, line, running, submit
from tests.jobs.settling import lease, run_all
from tests.world import build_world

HOUR_US = 3_600_000_000


@pytest.fixture
def world(transactional_db, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    settings.SECURE_SSL_REDIRECT = False
    empty_items()
    ItemHolder.objects.all().delete()
    world = build_world()
    RateCard.objects.create(
        class_slug="bulk", model=world.pool.model, effective_from=factories.NOW, prompt_nanos_per_mtok=1_000_000_000,
        cached_nanos_per_mtok=100_000_000, output_nanos_per_mtok=2_000_000_000, discount_ppm=500_000,
        created_at=factories.NOW, created_by="finance",
    )  # fmt: skip
    world.pool.safe_rate = {}
    world.pool.save()
    yield world
    close_pools()


def hard_budget(tenant, limit, **values):
    return Budget.objects.create(
        tenant=tenant, name="plan", period="day", zone="UTC", limit_nanos=limit, created_at=factories.NOW,
        updated_at=factories.NOW, **values,
    )  # fmt: skip


def declare(world, *, hours=1.0, slots=1.0, **values):
    """A declared job that takes so many slots until its deadline."""
    rates = world.pool
    tokens = 1_000 * rates.decode_us_per_token + 1_000 * rates.prefill_us_per_token
    items = max(1, round(hours * HOUR_US * slots / tokens))
    order = JobOrder(
        class_slug="bulk", items=items, prompt_tokens=1_000, expected_output_tokens=1_000,
        deadline=timezone.now() + timedelta(hours=hours), **values,
    )  # fmt: skip
    return actions.submit_job(tenant=world.tenant, order=order, actor=ADA, now=timezone.now()).job


def leased():
    """What is out on lease in the one window; 0 where nothing ever was."""
    return sum(BudgetWindow.objects.values_list("leased_nanos", flat=True))


def test_a_job_that_fits_the_floor_is_accepted_with_its_arithmetic(world):
    job = declare(world, slots=1.5)
    assert (job.admission["verdict"], job.admission["available"], job.admission["available_with_band"]) == (
        "accepted", 2.0, 2.0,
    )  # fmt: skip
    assert job.admission["required"] == pytest.approx(1.5, rel=0.01)
    assert job.admission["slack"] == pytest.approx(0.25, abs=0.01)
    assert job.estimated_gpu_us == pytest.approx(1.5 * HOUR_US, rel=0.01)


def test_one_that_does_not_fit_is_refused_or_runs_behind_everything(world):
    declare(world, slots=1.5)
    with pytest.raises(NotAdmitted) as refused:
        declare(world, slots=1.0)
    assert "2.50 slots; batch has 2.00 and 2.00 with all that the flex band may lend" in refused.value.words
    assert Job.objects.count() == 1, "nothing of a refused job is left"
    late = declare(world, slots=1.0, if_late="best_effort")
    assert (late.deadline, late.admission["verdict"]) == (None, "best_effort")
    # later is early enough
    assert declare(world, slots=0.2, hours=4).admission["verdict"] == "accepted"


def test_the_band_counts_as_far_as_policy_lends_and_a_lost_slot_does_not(world):
    now = timezone.now()
    pool = world.pool
    assert capacity_of(pool, now).with_band == 2
    pool.safe_rate = {"entries": {"4": 10.0}}
    assert (capacity_of(pool, now).floor, capacity_of(pool, now).with_band) == (2, 4)
    pool.max_lent = 1
    assert capacity_of(pool, now).with_band == 3
    pool.safe_rate["valid_until"] = (now - timedelta(minutes=1)).isoformat()
    assert capacity_of(pool, now).with_band == 2
    SlotInterval.objects.create(slot=Slot.objects.get(name="b4"), started_at=now, state="lost", owner_class="bulk")
    assert capacity_of(pool, now).floor == 1
    pool.isolation = "shared"
    world.bulk.min_share_ppm = 250_000
    world.bulk.save()
    assert (capacity_of(pool, now).floor, capacity_of(pool, now).with_band) == (1.75, 7)


def test_two_jobs_at_once_are_never_promised_the_same_slots(world):
    ends = []

    def send():
        try:
            ends.append(declare(world, slots=1.2).admission["verdict"])
        except NotAdmitted as refused:
            ends.append(refused.refusal)
        finally:
            django_connection.close()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ends) == ["accepted", *["deadline_cannot_be_met"] * 3]


def test_a_measured_efficiency_is_what_a_slot_is_worth(world):
    now = timezone.now()
    row = BatchEfficiency.objects.create(
        pool_id=world.pool.pk, efficiency=0.5, work_us=1, metered_us=2, measured_at=now
    )
    assert capacity_of(world.pool, now).floor == 1
    with pytest.raises(NotAdmitted):
        declare(world, slots=1.5)
    row.measured_at = now - timedelta(hours=2)
    row.save()
    assert capacity_of(world.pool, now).floor == 2, "what was measured long ago is not known"


# ---- money ----


def test_the_bound_is_reserved_from_every_level_and_given_back_at_the_end(world):
    group = factories.tenant("group")
    world.tenant.parent = group
    world.tenant.save()
    hard_budget(world.tenant, 10**12)
    hard_budget(group, 10**12)
    job = declare(world, slots=0.1)
    bound = job.admission["bound_nanos"]
    assert bound == job.reserved_nanos > job.estimated_charge_nanos > 0
    assert [row.leased_nanos for row in BudgetWindow.objects.all()] == [bound, bound]
    give_back(timezone.now())
    assert [row.leased_nanos for row in BudgetWindow.objects.all()] == [bound, bound]
    actions.cancel_job(job_uuid=job.uuid, actor=ADA, now=timezone.now())
    tasks.sweep()
    assert [row.leased_nanos for row in BudgetWindow.objects.all()] == [0, 0]
    assert not Lease.objects.filter(state="open").exists()


def test_a_job_over_the_budget_is_refused_and_the_window_named(world):
    hard_budget(world.tenant, 1_000)
    secret = key_actions.create_key(
        tenant_id=world.tenant.pk, name="n", classes=["bulk"], default_class="bulk", actor=ADA, now=timezone.now()
    ).secret
    body = {"class": "bulk", "items": 10, "prompt_tokens": 100, "expected_output_tokens": 100}
    answer = Client().post(
        "/api/v1/jobs", body, content_type="application/json", headers={"Authorization": f"Bearer {secret}"}
    )
    assert (answer.status_code, answer.json()["code"]) == (429, "budget_exhausted"), answer.content
    assert answer["x-should-retry"] == "false"
    assert 0 < int(answer["Retry-After"]) <= 86_400
    assert "acme" in answer.json()["title"] and answer.json()["admission"]["bound_nanos"] > 1_000
    assert not Job.objects.exists() and not leased()


def test_the_deadline_is_refused_over_rest_with_the_arithmetic(world):
    secret = key_actions.create_key(
        tenant_id=world.tenant.pk, name="n", classes=["bulk"], default_class="bulk", actor=ADA, now=timezone.now()
    ).secret
    body = {"class": "bulk", "items": 10**6, "prompt_tokens": 1_000, "expected_output_tokens": 1_000}
    headers = {"Authorization": f"Bearer {secret}"}
    answer = Client().post("/api/v1/jobs", body, content_type="application/json", headers=headers)
    told = answer.json()
    assert (answer.status_code, told["code"], told["admission"]["available"]) == (409, "deadline_cannot_be_met", 2.0)
    assert told["admission"]["slack"] < told["admission"]["slack_with_band"] + 1e-9 < 0
    body["if_late"] = "best_effort"
    taken = Client().post("/api/v1/jobs", body, content_type="application/json", headers=headers)
    assert (taken.status_code, taken.json()["standing"]) == (201, "best_effort")
    assert taken.json()["admission"]["verdict"] == "best_effort"
    body["if_late"] = "whatever"
    assert Client().post("/api/v1/jobs", body, content_type="application/json", headers=headers).status_code == 400


def test_a_batch_is_decided_when_its_last_line_is_in(world):
    big = jsonl([line(n, body={"max_tokens": 2_000}) for n in range(1, 4)])
    world.pool.decode_us_per_token = 2_000_000_000
    world.pool.save()
    kept = running(world.tenant, big)
    assert (kept.deadline, kept.admission["verdict"], kept.state) == (None, "best_effort", "running")
    refused = submit(world.tenant, big, if_late="refuse")
    batch_import.import_batch(refused.pk, timezone.now())
    refused.refresh_from_db()
    assert (refused.state, refused.errors[0]["code"], refused.errors[0]["param"]) == (
        "failed", "deadline_cannot_be_met", "metadata.deadline",
    )  # fmt: skip
    assert refused.job.state == "failed"
    assert refused.job.admission["verdict"] == "refused"


def test_a_batch_that_nobody_pays_for_fails_with_the_window(world):
    hard_budget(world.tenant, 10)
    batch = submit(world.tenant, 3)
    batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert (batch.state, batch.errors[0]["code"]) == ("failed", "budget_exhausted")
    assert leased() == 0


def funded(world, agent=9_001, epoch=1):
    with connection() as held:
        fund_items(held, [(agent, epoch)], timezone.now())
    rows = Lease.objects.filter(agent_id=agent, job__isnull=False, state="open")
    return sum(rows.values_list("amount_nanos", flat=True))


def test_agents_get_what_their_items_can_cost_though_the_budget_is_used_up(world):
    budget = hard_budget(world.tenant, 10**9)
    job = running(world.tenant, 10)
    budget.limit_nanos = 0
    budget.save()
    assert funded(world) == 0, "who holds no item gets nothing"
    lease(world, 3)
    each = -(-job.reserved_nanos // 10)
    assert 3 * each <= funded(world) <= 6 * each
    assert funded(world) <= 6 * each, "a report that finds enough takes no more"
    lease(world, 10)
    assert funded(world) == job.reserved_nanos
    assert leased() == job.reserved_nanos, "nothing is counted twice"
    run_all(world)
    tasks.sweep()
    job.refresh_from_db()
    assert job.state == "completed"
    assert leased() == funded(world), "what the agent holds comes back when its leases end"


def test_a_request_of_a_declared_job_is_paid_from_its_reservation_and_no_other(world):
    hard_budget(world.tenant, 10**12)
    job, stranger = declare(world, slots=0.1), factories.tenant("stranger")
    with connection() as held, held.transaction(), held.cursor() as cursor:
        agent, now = (9_001, 1), timezone.now()

        def pays(need, tenant=world.tenant, named=str(job.uuid), waiting=0):
            return fund_request(cursor, agent, LeaseRequest(tenant.pk, need, [], waiting, named), now)

        assert pays(1_000, waiting=9_000)
        (told,) = open_leases(cursor, [agent])[9_001]
        assert (told.job, told.amount_nanos) == (str(job.uuid), 18_000), "twice what waits"
        assert not pays(1_000, tenant=stranger)
        assert not pays(1_000, named="nonsense")
        assert not pays(job.reserved_nanos + 1)
        assert reserved_nanos(cursor, [job.uuid]) == {job.uuid: job.reserved_nanos}
    assert leased() == job.reserved_nanos


def test_parked_items_that_run_again_reserve_again_or_are_refused(world):
    budget = hard_budget(world.tenant, 10**9)
    job = running(world.tenant, 4)
    run_all(world, parked={2: "too long"})
    tasks.sweep()
    assert leased() == 0
    batch_actions.retry_parked(job_uuid=job.uuid, actor=ADA, now=timezone.now())
    assert leased() == -(-job.reserved_nanos // 4)
    run_all(world, parked={2: "too long"})
    tasks.sweep()
    Batch.objects.update(state="completed")
    budget.limit_nanos = 1
    budget.save()
    with pytest.raises(NotAdmitted, match="budget of acme"):
        batch_actions.retry_parked(job_uuid=job.uuid, actor=ADA, now=timezone.now())
    job.refresh_from_db()
    assert (job.state, job.items_parked) == ("completed", 1)


def test_one_job_reserves_once(world):
    hard_budget(world.tenant, 1_000)
    job = Job(tenant=world.tenant)
    with connection() as held, held.transaction(), held.cursor() as cursor:
        now = timezone.now()
        assert reserve(cursor, tenant_id=world.tenant.pk, job=job.uuid, amount_nanos=600, now=now).amount_nanos == 600
        other = Job().uuid
        assert reserve(cursor, tenant_id=world.tenant.pk, job=other, amount_nanos=401, now=now).blocked_by is not None
        assert release(cursor, [job.uuid, other], now) == 600
        assert release(cursor, [job.uuid], now) == 0


def test_the_tenants_page_tells_a_reservation_from_what_agents_hold(world):
    hard_budget(world.tenant, 10**12)
    job = declare(world, slots=0.1)
    answer = factories.person("admin").get(reverse("tenant", args=["acme"]), {"tab": "budgets"})
    page = answer.content.decode()
    assert f"job {str(job.uuid)[:8]}" in page and "with its job" in page
