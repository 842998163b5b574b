"""Hours of objectives: what is read by hours is what minutes add up to, also with counts that come late."""

import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.contracts.hours import FOLD_LOCK, KEPT_FOR, fold_hours
from controlplane.contracts.ingest import add_objectives
from controlplane.contracts.models import FoldedHour, ObjectiveHour, ObjectiveMinute
from controlplane.contracts.queries import standings
from controlplane.core.period import to_us
from controlplane.live import contracts
from controlplane.wire.report import ObjectiveCount
from tests import factories
from tests.live.scene import contract_row, objective

NOW = datetime(2026, 11, 29, 20, 17, 31, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def pools(installation):
    return factories.pool(), factories.pool("chat-8b")


@pytest.fixture
def rows(pools):
    """Three contracts of one class: without a load range, with one, and one of a window of its own."""
    chat = factories.workload_class()
    return [
        contract_row("all", chat, NOW, budget_period_s=3 * 86_400),
        contract_row("quiet", chat, NOW, tenant=factories.tenant("acme"), load_limit_per_s=2.0),
        contract_row("long", chat, NOW, tenant=factories.tenant("zeta"), window_s=7_200, budget_period_s=86_400),
    ]


def looked_at(rows, at, pool=None):
    found = contracts.evaluate(standings([row for row, _ in rows], at), at, pool_id=pool and pool.pk, with_causes=False)
    return {key: one.spans for key, one in found.items()}


def by_minutes(rows, at, pool=None):
    """The same without a single hour."""
    with transaction.atomic():
        FoldedHour.objects.all().delete()
        answer = looked_at(rows, at, pool)
        transaction.set_rollback(True)
    return answer


def added(version, pool, minute, offered, *, good=None, now=NOW):
    count = ObjectiveCount(
        version.pk, to_us(minute), offered, offered, offered, offered if good is None else good, 0, {}
    )
    with connection.cursor() as cursor:
        add_objectives(cursor, [(pool.pk, count)], now)


minutes_ago = st.one_of(st.integers(240, 420), st.integers(0, 4 * 24 * 60))
offered_counts = st.sampled_from([0, 1, 60, 119, 120, 121, 500])
counted = st.tuples(st.integers(0, 2), st.integers(0, 1), minutes_ago, offered_counts)


@pytest.mark.django_db
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    early=st.lists(counted, max_size=30),
    late=st.lists(counted, max_size=5),
    ago=st.timedeltas(timedelta(0), timedelta(days=1)),
)
def test_what_is_read_by_hours_is_what_the_minutes_add_up_to(pools, rows, early, late, ago):
    with transaction.atomic():
        for which, pool, minutes, offered in early:
            minute = NOW.replace(second=0) - timedelta(minutes=minutes)
            added(rows[which][1], pools[pool], minute, offered, good=offered // 2, now=minute)
        fold_hours(NOW)
        for _ in range(2):
            for at in (NOW, NOW - ago):
                for pool in (None, *pools):
                    assert looked_at(rows, at, pool) == by_minutes(rows, at, pool)
            for which, pool, minutes, offered in late:
                added(rows[which][1], pools[pool], NOW.replace(second=0) - timedelta(minutes=minutes), offered)
            for pool in (None, *pools):
                assert looked_at(rows, NOW, pool) == by_minutes(rows, NOW, pool)
            fold_hours(NOW)
        transaction.set_rollback(True)


@pytest.mark.django_db
def test_hours_are_what_is_read_where_they_are_folded(pools, rows):
    old = NOW.replace(minute=5, second=0) - 10 * HOUR
    objective(rows[0][1], pools[0], old, 100, 10)
    before = looked_at(rows, NOW)
    assert fold_hours(NOW) == 8
    assert FoldedHour.objects.count() == 8
    assert FoldedHour.objects.latest("hour").hour == NOW.replace(minute=0, second=0) - 3 * HOUR
    ObjectiveMinute.objects.all().delete()
    assert looked_at(rows, NOW) == before


@pytest.mark.django_db
def test_late_counts_take_the_mark_of_their_hour_away_and_fresh_ones_none(pools, rows):
    old = NOW.replace(minute=5, second=0) - 5 * HOUR
    added(rows[0][1], pools[0], old, 100, now=old)
    assert fold_hours(NOW) == 3
    added(rows[0][1], pools[0], NOW.replace(second=0), 1)
    assert FoldedHour.objects.count() == 3
    added(rows[0][1], pools[1], old, 7)
    assert sorted(FoldedHour.objects.values_list("hour", flat=True)) == [
        old.replace(minute=0) + HOUR, old.replace(minute=0) + 2 * HOUR
    ]  # fmt: skip
    assert fold_hours(NOW) == 1
    assert sum(ObjectiveHour.objects.values_list("offered", flat=True)) == 107


@pytest.mark.django_db
def test_hours_older_than_any_budget_are_dropped_and_not_folded_again(pools, rows):
    begun = NOW.replace(minute=0, second=0) - KEPT_FOR
    for hours in (0, 1):
        added(rows[0][1], pools[0], begun + hours * HOUR, 1, now=begun + hours * HOUR)
    fold_hours(begun + 5 * HOUR)
    assert ObjectiveHour.objects.count() == 2
    fold_hours(NOW + HOUR)
    assert list(ObjectiveHour.objects.values_list("hour", flat=True)) == [begun + HOUR]
    assert not FoldedHour.objects.filter(hour=begun).exists()


@pytest.mark.django_db(transaction=True)
def test_nothing_is_folded_while_late_counts_are_being_added(pools, rows):
    old = NOW.replace(minute=5, second=0) - 5 * HOUR
    added(rows[0][1], pools[0], old, 100, now=old)
    adding, looked = threading.Event(), threading.Event()

    def late() -> None:
        with transaction.atomic():
            added(rows[0][1], pools[0], old, 7)
            adding.set()
            looked.wait(30)
        connection.close()

    writer = threading.Thread(target=late)
    writer.start()
    assert adding.wait(30)
    assert fold_hours(NOW) == 0
    looked.set()
    writer.join(30)
    assert fold_hours(NOW) == 3
    assert sum(ObjectiveHour.objects.values_list("offered", flat=True)) == 107


@pytest.mark.django_db(transaction=True)
def test_late_counts_wait_until_their_hour_is_folded(pools, rows):
    old = NOW.replace(minute=5, second=0) - 5 * HOUR
    added(rows[0][1], pools[0], old, 100, now=old)
    done = threading.Event()

    def late() -> None:
        with transaction.atomic():
            added(rows[0][1], pools[0], old, 7)
        done.set()
        connection.close()

    writer = threading.Thread(target=late)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [FOLD_LOCK])
        writer.start()
        assert not done.wait(0.3)
    assert done.wait(30)
    writer.join(30)
    assert looked_at(rows, NOW) == by_minutes(rows, NOW)
