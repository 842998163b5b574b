"""What a batch slot is worth: measured from meters against the pool's rates, and used wherever slots are counted."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction

import pytest
from django.utils import timezone

from controlplane.core.reasons import Outcome
from controlplane.flex.leadership import Shard
from controlplane.flex.reading import snapshot_of
from controlplane.flex.telemetry import read
from controlplane.jobs import queries, tasks
from controlplane.jobs.batch_capacity import EFFICIENCY_LEAST, capacity_of
from controlplane.jobs.models import BatchEfficiency, Job
from controlplane.usage.models import RollupMinute, SlotUsageMinute
from tests import factories
from tests.flex.conftest import add_job, make_band

PREFILL, DECODE = 60, 2_500


@pytest.fixture
def band(transactional_db):
    return make_band(timezone.now(), prefill_us_per_token=PREFILL, decode_us_per_token=DECODE)


def bulk_id():
    return Job._meta.get_field("workload_class").related_model.objects.get(slug="bulk").pk


def used(band, *, metered_us, requests=30, prompt=1_000, output=200, minutes_ago=10, charged=True, outcome=None):
    """An old minute in which batch took so much of a slot, and what completed meanwhile."""
    minute = band.now.replace(second=0, microsecond=0) - timedelta(minutes=minutes_ago)
    tenant = factories.tenant(f"t{minutes_ago}-{charged}")
    slot = band.slots["batch-1"] if "batch-1" in band.slots else next(iter(band.slots.values()))
    SlotUsageMinute.objects.create(
        slot_id=slot.pk, minute=minute, tenant_id=tenant.pk, class_id=bulk_id(), charged=charged, gpu_us=metered_us
    )
    RollupMinute.objects.create(
        minute=minute, pool_id=band.pool.pk, tenant_id=tenant.pk, class_id=bulk_id(), model_id=band.pool.model_id,
        rate_version=0, outcome=outcome or Outcome.COMPLETED.code, requests=requests,
        prompt_tokens=requests * prompt, cached_tokens=0, output_tokens=requests * output, gpu_us=metered_us,
        charge_prompt_nanos=0, charge_cached_nanos=0, charge_output_nanos=0, charge_gpu_nanos=0, stages=b"",
    )  # fmt: skip


WORK_US = 200 * (1_000 * PREFILL + 200 * DECODE)


def measured():
    tasks.measure_efficiency()
    return BatchEfficiency.objects.values_list("efficiency", flat=True).first()


def test_it_is_work_at_the_rates_over_what_the_meters_saw(band):
    used(band, requests=200, metered_us=WORK_US * 5 // 4)
    assert measured() == pytest.approx(0.8)
    used(band, requests=200, metered_us=WORK_US * 5 // 4, minutes_ago=20)
    assert measured() == pytest.approx(0.8)


def test_repeated_work_takes_the_meter_and_brings_nothing(band):
    used(band, requests=200, metered_us=WORK_US)
    used(band, requests=200, metered_us=WORK_US, minutes_ago=11, charged=False, outcome=Outcome.UPSTREAM_ERROR.code)
    assert measured() == pytest.approx(0.5)


def test_too_little_or_too_old_is_unknown(band):
    used(band, requests=200, metered_us=WORK_US, minutes_ago=70)
    used(band, requests=19, metered_us=WORK_US)
    assert measured() is None
    assert capacity_of(band.pool, band.now).floor == 2


def test_nonsense_is_bounded(band):
    used(band, requests=200, metered_us=WORK_US * 1_000)
    assert measured() == EFFICIENCY_LEAST


def test_the_band_and_admission_count_slots_by_what_they_are_worth(band):
    band.report()
    add_job(band, gpu_s=3_600, due_in=timedelta(hours=1))
    BatchEfficiency.objects.create(pool_id=band.pool.pk, efficiency=0.5, work_us=1, metered_us=2, measured_at=band.now)
    reading = read(Shard(), band.now).pools[band.pool.pk]
    picture = snapshot_of(reading, {}, 0, frozenset({band.chat_id}))
    assert {slot.batch_efficiency for slot in picture.slots} == {0.5}
    assert sum(job.remaining_gpu_us for job in picture.jobs) == pytest.approx(3_600 * 10**6, rel=0.01)
    assert capacity_of(band.pool, band.now).floor == Fraction(1)


def test_what_was_learnt_from_items_is_slot_time_and_not_counted_twice(band):
    job = add_job(band, gpu_s=3_600, due_in=timedelta(hours=1))
    done = job.items // 2
    Job.objects.filter(pk=job.pk).update(items_completed=done, gpu_us_done=done * 1_000_000)
    BatchEfficiency.objects.create(pool_id=band.pool.pk, efficiency=0.5, work_us=1, metered_us=2, measured_at=band.now)
    ((_, work_us),) = queries.backlog_jobs([band.pool.pk], band.now)
    # a second of slot time an item, at half a slot's worth: each of these slots does one a second
    assert work_us == (job.items - done) * 500_000
