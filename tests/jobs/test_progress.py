"""Progress over time: one sample a minute, few points however long a job ran, and the effect of actions on slack."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.fleet.models import SlotInterval
from controlplane.jobs import effects, progress
from controlplane.jobs.models import BatchEfficiency, Job, JobProgress
from controlplane.tenants.models import Tenant
from tests import factories


@pytest.fixture
def make(people):
    pool = factories.pool("chat", prefill_us_per_token=0, decode_us_per_token=1_000)
    bulk = factories.workload_class("bulk", "batch")
    for name in ("b1", "b2"):
        SlotInterval.objects.create(slot=factories.slot(pool, name, "batch"), state="home", started_at=factories.NOW)

    def job(**values):
        now = timezone.now()
        defaults = {
            "workload_class": bulk, "pool": pool, "items": 3_600, "prompt_tokens": 0, "expected_output_tokens": 1_000,
            "deadline": now + timedelta(hours=1), "created_by": "key", "created_at": now - timedelta(hours=1),
        }  # fmt: skip
        return Job.objects.create(tenant=Tenant.objects.get(slug="acme"), **{**defaults, **values})

    return job


def test_a_minute_is_sampled_once_and_only_of_running_jobs(make):
    running, _ended = make(items_completed=7), make(state="completed", finished_at=timezone.now())
    now = timezone.now().replace(second=10)
    assert progress.sample(now) == 1
    assert progress.sample(now + timedelta(seconds=30)) == 0
    Job.objects.filter(pk=running.pk).update(items_completed=9)
    assert progress.sample(now + timedelta(minutes=1)) == 1
    rows = JobProgress.objects.filter(job=running).order_by("at")
    assert list(rows.values_list("items_completed", flat=True)) == [7, 9]


def test_a_long_job_is_a_bounded_number_of_points_that_never_fall(make):
    now = timezone.now()
    job = make(created_at=now - timedelta(hours=20), items_completed=1_199)
    start = job.created_at.replace(second=0, microsecond=0)
    JobProgress.objects.bulk_create(
        JobProgress(
            job=job, minute=start + timedelta(minutes=n), at=start + timedelta(minutes=n, seconds=2),
            items_completed=n, items_failed=0, items_parked=0, items_cancelled=0, gpu_us_done=0,
        )
        for n in range(1, 1_190)
    )  # fmt: skip
    line = progress.points(job, now)
    assert 200 < len(line) <= progress.POINTS_MOST + 3
    assert (line[0].at, line[0].completed) == (job.created_at, 0) and (line[-1].at, line[-1].completed) == (now, 1_199)
    assert [p.completed for p in line] == sorted(p.completed for p in line)
    assert [p.at for p in line] == sorted(p.at for p in line)


def test_samples_go_with_the_files(make, settings):
    settings.JOB_FILE_DAYS = 1
    make()
    progress.sample(timezone.now() - timedelta(days=2))
    progress.sample(timezone.now())
    assert progress.purge(timezone.now()) == 1
    assert JobProgress.objects.count() == 1


def test_cancelling_frees_what_the_job_asked_for(make):
    # 3,600 GPU-s in 1 h are one slot of two
    job, now = make(), timezone.now()
    effect = effects.of_cancel(job, now)
    assert effect.before.slack == pytest.approx(0.5, abs=0.001)
    assert (effect.after.required, effect.after.slack, effect.items) == (0, 1, 3_600)


def test_more_time_is_less_demand_and_retried_items_are_more(make):
    job, now = make(items_completed=0, items_parked=1_800), timezone.now()
    extended = effects.of_extension(job, now + timedelta(hours=2), now)
    assert extended.before.slack == pytest.approx(0.75, abs=0.001)
    assert extended.after.slack == pytest.approx(0.875, abs=0.001)
    retried = effects.of_retry(job, now)
    assert (retried.items, retried.after.slack) == (1_800, pytest.approx(0.5, abs=0.001))


def test_parked_items_of_a_job_that_ended_count_again(make):
    job = make(state="completed", items_completed=1_800, items_parked=1_800, finished_at=timezone.now())
    effect = effects.of_retry(job, timezone.now())
    assert (effect.before.slack, effect.after.slack) == (1, pytest.approx(0.75, abs=0.001))


def test_what_a_batch_slot_is_worth_counts_on_both_sides(make):
    """Slots at half efficiency: learnt slot time is turned into work, so that the slack of an extension is the same."""
    job, now = make(items=4_000, items_completed=400, gpu_us_done=400 * 1_000_000), timezone.now()
    BatchEfficiency.objects.create(pool_id=job.pool_id, efficiency=0.5, work_us=1, metered_us=2, measured_at=now)
    effect = effects.of_extension(job, now + timedelta(hours=2), now)
    assert (effect.before.available, effect.before.slack) == (1, pytest.approx(0.5, abs=0.001))
    assert effect.after.slack == pytest.approx(0.75, abs=0.001)


def test_a_missed_deadline_has_no_slack_until_it_is_moved(make):
    now = timezone.now()
    job = make(deadline=now - timedelta(minutes=1))
    effect = effects.of_extension(job, now + timedelta(hours=1), now)
    assert effect.before.slack is None and effect.after.slack == pytest.approx(0.5, abs=0.001)
