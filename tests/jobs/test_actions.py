"""Jobs: what may be declared, idempotency, cancelling, and the arithmetic of the backlog."""

import threading
from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import connection

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.jobs import actions, queries
from controlplane.jobs.actions import JobOrder, KeyReused
from controlplane.jobs.models import Job
from tests import factories

OWNER = Actor(id=None, name="key nightly", role="tenant")


def order(**values) -> JobOrder:
    return JobOrder(
        **{"class_slug": "bulk", "items": 100, "prompt_tokens": 1_000, "expected_output_tokens": 200, **values}
    )


@pytest.fixture
def tenant(installation):
    factories.workload_class("chat")
    factories.workload_class("bulk", "batch", default_deadline_s=7_200)
    pool = factories.pool("chat", prefill_us_per_token=60, decode_us_per_token=2_500)
    factories.batch_floor(pool)
    return factories.tenant("acme")


def submit(tenant, now, key=None, allowed=None, **values):
    return actions.submit_job(
        tenant=tenant, order=order(**values), actor=OWNER, now=now, idempotency_key=key, allowed_classes=allowed
    )


def test_a_job_takes_the_class_deadline_and_the_only_pool(tenant, now):
    job = submit(tenant, now).job
    assert (job.pool.slug, job.deadline) == ("chat", now + timedelta(hours=2))
    entry = AuditEntry.objects.get()
    assert (entry.action, entry.tenant_slug, entry.after["items"]) == ("job.submit", "acme", 100)


def test_a_best_effort_job_has_no_deadline(tenant, now):
    assert submit(tenant, now, best_effort=True).job.deadline is None


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"items": 0}, "items"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"prompt_tokens": 0, "expected_output_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 9_000}, "prompt_tokens"),
        ({"expected_output_tokens": 3_000}, "expected_output_tokens"),
        ({"class_slug": "chat"}, "class"),
        ({"class_slug": "other"}, "class"),
        ({"pool": "nowhere"}, "pool"),
        ({"model": "nothing"}, "model"),
        ({"name": "x" * 121}, "name"),
    ],
)
def test_what_cannot_be_run_is_refused_by_field(tenant, now, values, field):
    with pytest.raises(ValidationError) as error:
        submit(tenant, now, **values)
    assert list(error.value.error_dict) == [field]
    assert not Job.objects.exists()


def test_deadlines_lie_ahead_with_their_offset(tenant, now):
    for deadline in (now, now - timedelta(hours=1), (now + timedelta(hours=1)).replace(tzinfo=None)):
        with pytest.raises(ValidationError) as error:
            submit(tenant, now, deadline=deadline)
        assert list(error.value.error_dict) == ["deadline"]
    with pytest.raises(ValidationError):
        submit(tenant, now, deadline=now + timedelta(hours=1), best_effort=True)


def test_a_key_limits_the_classes(tenant, now):
    with pytest.raises(ValidationError, match="You may use: chat"):
        submit(tenant, now, allowed=["chat"])


def test_with_two_pools_one_has_to_be_named(tenant, now):
    factories.batch_floor(factories.pool("second"))
    with pytest.raises(ValidationError, match="chat, second"):
        submit(tenant, now)
    assert submit(tenant, now, pool="second").job.pool.slug == "second"


def test_a_suspended_tenant_sends_no_jobs(tenant, now):
    tenant.state = "suspended"
    with pytest.raises(ValidationError):
        submit(tenant, now)


def test_the_same_key_answers_the_same_job_and_never_another(tenant, now):
    first = submit(tenant, now, key="night-1")
    again = submit(tenant, now + timedelta(minutes=1), key="night-1")
    assert (first.repeated, again.repeated, again.job.pk) == (False, True, first.job.pk)
    with pytest.raises(KeyReused):
        submit(tenant, now, key="night-1", items=101)
    assert Job.objects.count() == AuditEntry.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_one_key_sent_twice_at_once_makes_one_job(installation, now):
    factories.workload_class("bulk", "batch")
    factories.batch_floor(factories.pool("chat"))
    tenant = factories.tenant("acme")
    answers: list = []
    barrier = threading.Barrier(4)

    def send() -> None:
        barrier.wait()
        try:
            answers.append(submit(tenant, now, key="night-1"))
        finally:
            connection.close()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Job.objects.count() == AuditEntry.objects.count() == 1
    assert {answer.job.pk for answer in answers} == {Job.objects.get().pk}
    assert sorted(answer.repeated for answer in answers) == [False, True, True, True]


def test_cancelling_ends_a_job_once(tenant, now):
    job = submit(tenant, now).job
    later = now + timedelta(minutes=5)
    actions.cancel_job(job_uuid=job.uuid, actor=OWNER, now=later)
    again = actions.cancel_job(job_uuid=job.uuid, actor=OWNER, now=later + timedelta(minutes=5))
    assert (again.state, again.finished_at) == ("cancelled", later)
    assert AuditEntry.objects.filter(action="job.cancel").count() == 1
    assert queries.backlog(job.pool_id, later) == []


def test_backlog_is_unfinished_items_times_the_current_estimate(tenant, now):
    job = submit(tenant, now, deadline=now + timedelta(hours=4)).job
    item_us = 1_000 * 60 + 200 * 2_500
    assert queries.backlog(job.pool_id, now) == [(100 * item_us, job.deadline)]
    Job.objects.update(items_completed=19, items_failed=1, gpu_us_done=19_000_000)
    # the one that failed is still to be done
    assert queries.backlog(job.pool_id, now) == [(81 * item_us, job.deadline)]
    Job.objects.update(items_completed=20, gpu_us_done=20_000_000)
    assert queries.backlog(job.pool_id, now) == [(80 * 1_000_000, job.deadline)]


def test_backlog_is_in_order_of_deadlines_with_best_effort_last(tenant, now):
    best = submit(tenant, now, best_effort=True).job
    late = submit(tenant, now, deadline=now + timedelta(hours=3)).job
    soon = submit(tenant, now, deadline=now + timedelta(hours=1)).job
    assert [job.pk for job, _ in queries.backlog_jobs([best.pool_id], now)] == [soon.pk, late.pk, best.pk]


def test_a_missed_job_counts_for_half_an_hour_and_leaves(tenant, now):
    job = submit(tenant, now, deadline=now + timedelta(hours=1)).job
    grace = job.deadline + timedelta(minutes=30)
    assert len(queries.backlog(job.pool_id, grace - timedelta(microseconds=1))) == 1
    assert queries.backlog(job.pool_id, grace) == []


def test_a_job_whose_client_gave_up_is_missed_and_asks_for_nothing_after_its_grace(tenant, now):
    job = submit(tenant, now, deadline=now + timedelta(hours=1)).job
    Job.objects.update(items_completed=60, items_failed=400, gpu_us_done=60_000_000, first_attempt_at=now)
    late = job.deadline + timedelta(minutes=30)
    assert queries.backlog(job.pool_id, late - timedelta(seconds=1)) == [(40 * 1_000_000, job.deadline)]
    assert queries.backlog(job.pool_id, late) == []
    assert list(queries.missed(Job.objects.all(), late)) == [job]
    status = queries.status_of(Job.objects.get(), late)
    assert (status.standing, status.unfinished, status.required_slots) == ("missed", 40, None)
    assert queries.pool_slack(job.pool, late).required == 0


def test_standing_follows_progress_and_the_deadline(tenant, now):
    job = submit(tenant, now).job
    assert queries.status_of(job, now).standing == "waiting"
    job.first_attempt_at = now
    status = queries.status_of(job, now + timedelta(hours=1))
    assert (status.standing, status.time_left_us) == ("running", 3_600_000_000)
    assert status.required_slots == pytest.approx(100 * 560_000 / 3_600_000_000)
    assert queries.status_of(job, now + timedelta(hours=3)).standing == "missed"
    job.state, job.finished_at = "completed", now + timedelta(hours=1)
    assert queries.status_of(job, now + timedelta(hours=3)).standing == "completed"


def test_what_was_never_taken_or_ran_out_of_time_is_not_waiting(tenant, now):
    job = submit(tenant, now).job
    for state, kept, standing, grade, word in (
        ("importing", job.deadline, "importing", "neutral", "Importing"),
        ("failed", job.deadline, "failed", "bad", "Refused"),
        ("failed", None, "failed", "bad", "Refused"),
        ("failed", now - timedelta(hours=1), "failed", "bad", "Refused"),
        ("expired", None, "expired", "neutral", "Expired"),
        ("expired", now - timedelta(hours=1), "missed", "bad", "Deadline missed"),
    ):
        job.state, job.deadline, job.finished_at = state, kept, None if state == "importing" else now
        status = queries.status_of(job, now)
        assert (status.standing, status.grade, status.word) == (standing, grade, word)
        assert status.standing in queries.STANDINGS
    Job.objects.update(state="failed", deadline=now - timedelta(hours=1), finished_at=now)
    assert not queries.missed(Job.objects.all(), now).exists()
    Job.objects.update(state="expired")
    assert queries.missed(Job.objects.all(), now).exists()


def test_a_time_and_a_zone_are_the_same_order_tomorrow(now):
    tonight = order(deadline=now, clock="06:00 Europe/Berlin")
    assert tonight.digest() == order(deadline=now + timedelta(days=1), clock="06:00 Europe/Berlin").digest()
    assert tonight.digest() not in (order(deadline=now).digest(), order(deadline=now, clock="07:00 UTC").digest())
