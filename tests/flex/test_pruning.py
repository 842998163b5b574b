"""Samples of pools: thinned to one a minute after two days, gone after ninety, in slices that take a moment."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta

import pytest
from django.db import connection, transaction

from controlplane.flex import pruning, queries
from controlplane.flex.models import PoolSample
from controlplane.flex.pruning import LEAST_EMPTY_SLICE, LEAST_SLICE, LONGEST_SLICE, Pruner
from tests.flex.conftest import Band


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """However busy the machine is, a slice counts as one that took a moment."""
    monkeypatch.setattr(pruning, "SLICE_TAKES_S", 60.0)
    monkeypatch.setattr(pruning, "SLICE_TAKES_MOST_MS", 60_000)


def prune(pruner: Pruner, now: datetime) -> int:
    """As many slices as it takes; at the longest each is an hour."""
    removed = 0
    for _ in range(100 + 90 * 24):
        removed += pruner.prune(now)
        if pruner.is_done(now):
            return removed
    raise AssertionError("an hour a tick goes through ninety days")


def test_old_samples_are_thinned_to_one_a_minute_and_then_go(band: Band):
    band.step(1)
    now = band.now.replace(second=30, microsecond=0)
    ages = [timedelta(hours=47), timedelta(hours=49), timedelta(hours=49, seconds=30), timedelta(days=91, seconds=30)]
    PoolSample.objects.all().delete()
    for age in ages:
        PoolSample.objects.create(pool=band.pool, at=now - age)
    assert prune(Pruner(), now) == 2
    kept = set(PoolSample.objects.values_list("at", flat=True))
    assert kept == {now - ages[0], now - ages[2]}, "49 h 0 min 30 s ago began a minute, 49 h ago did not"


def test_what_was_gone_through_is_not_looked_at_again(band: Band):
    """Each tick goes on where the one before ended."""
    band.step(1)
    pruner, now = Pruner(), band.now.replace(second=30, microsecond=0)
    prune(pruner, now)
    PoolSample.objects.all().delete()
    for age_s in (1, -1, -3):
        PoolSample.objects.create(pool=band.pool, at=now - timedelta(hours=48, seconds=age_s))
    assert [pruner.prune(now + timedelta(seconds=second)) for second in range(5)] == [0, 0, 1, 0, 1]
    assert PoolSample.objects.get().at < now - timedelta(hours=48), "what came late into time that is done stays"


def test_a_slice_is_as_long_as_it_is_quick_and_catches_up_however_slow_it_is(monkeypatch):
    monkeypatch.setattr(pruning, "SLICE_TAKES_S", 0.02)
    pruner = Pruner()

    def after(took_s: float, removed: int) -> timedelta:
        for _ in range(20):
            pruner._fit(took_s, removed)
        return pruner._slice

    assert after(0.001, 0) == after(0.001, 500) == LONGEST_SLICE
    assert after(0.5, 500) == LEAST_SLICE > timedelta(seconds=1), "a tick comes each second"
    assert after(0.5, 0) == LEAST_EMPTY_SLICE
    assert after(0.03, 500) == LEAST_EMPTY_SLICE, "what takes as long as it may stays as it is"


@pytest.mark.django_db(transaction=True)
def test_a_slice_that_takes_too_long_is_given_up_for_a_shorter_one(band: Band, monkeypatch):
    """Else a tick of a leader that comes after a long pause would last as long as all that is due."""
    monkeypatch.setattr(pruning, "SLICE_TAKES_MOST_MS", 300)
    now = band.now.replace(second=30, microsecond=0)
    for age_s in (3_000, 10):
        PoolSample.objects.create(pool=band.pool, at=now - timedelta(hours=48, seconds=age_s))
    pruner = Pruner()
    pruner._done_to, pruner._removed_old_at = now - timedelta(hours=49), now
    pruner._slice = LONGEST_SLICE
    locked, free = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                PoolSample.objects.select_for_update().get(at=now - timedelta(hours=48, seconds=10))
                locked.set()
                free.wait(60)
        finally:
            connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(60)
    assert pruner.prune(now) == 0 and PoolSample.objects.count() == 2, "all of it or nothing"
    assert not pruner.is_done(now) and pruner._slice == LONGEST_SLICE / 8
    assert [pruner.prune(now) for _ in range(2)] == [0, 1], "what was given up is gone through by parts"
    free.set()
    holder.join(60)
    assert prune(pruner, now) == 1 and not PoolSample.objects.exists()


def test_a_whole_sample_of_each_minute_is_kept_and_can_be_read_alone(band: Band):
    band.step(190)
    written = PoolSample.objects.count()
    assert PoolSample.objects.exclude(whole_at=None).count() > 150, "most ticks only say what differs"
    prune(Pruner(), band.now + timedelta(hours=48, seconds=1))
    kept = list(PoolSample.objects.order_by("at"))
    assert written == 190 and len(kept) in (4, 5), "the first one, and one a minute at the pool's turn"
    turns = [row for row in kept if row.at.second == band.pool.pk % 60]
    assert len(turns) >= 3 and len(kept) - len(turns) <= 1
    assert all("seen" in row.figures and row.whole_at is None for row in kept)
    assert queries.decision_at(band.pool.pk, kept[-1].at + timedelta(seconds=40)) is not None
