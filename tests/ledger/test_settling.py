"""Which hours are attributed again, the task, and the two commands."""

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.core.period import format_utc
from controlplane.fleet.models import Pool, SlotInterval, SlotTenure
from controlplane.ledger.attribution import attribute
from controlplane.ledger.models import AttributionInterval, LedgerEvent, Transfer
from controlplane.ledger.posting import balances, trial_balance
from controlplane.ledger.settling import attribute_now, attribute_open, attribute_period, cost_summary, stale_hours
from controlplane.ledger.tasks import NotAttributed
from controlplane.ledger.tasks import attribute_open as attribute_open_task
from tests.ledger.fleet_rows import HOUR, MINUTE_US, ONE_HOUR, add_rate, make_fleet, worked_example

pytestmark = pytest.mark.django_db


def ends() -> list:
    return list(AttributionInterval.objects.order_by("starts_at").values_list("ends_at", flat=True))


def test_the_open_hour_goes_up_to_the_last_whole_minute_whose_reports_are_in():
    make_fleet("i1")
    attribute_open(HOUR + timedelta(minutes=90, seconds=3))
    assert ends() == [HOUR + ONE_HOUR, HOUR + timedelta(minutes=89)]
    attribute_open(HOUR + timedelta(minutes=91, seconds=10))
    assert ends() == [HOUR + ONE_HOUR, HOUR + timedelta(minutes=91)]


def test_everything_since_the_first_slot_is_caught_up_and_a_second_run_does_nothing():
    make_fleet("i1 b1")
    now = HOUR + timedelta(hours=6)
    first = attribute_open(now)
    assert (first.intervals, first.changed, first.posted) == (6, 6, 6)
    before = (list(Transfer.objects.values()), list(AttributionInterval.objects.values()))
    again = attribute_open(now)
    assert (again.changed, again.posted) == (0, 0)
    assert again.intervals < 6
    assert (list(Transfer.objects.values()), list(AttributionInterval.objects.values())) == before


def test_a_pool_that_cannot_be_attributed_does_not_hold_up_the_others(caplog):
    broken = make_fleet("i1", slug="broken").pool
    make_fleet("i1", slug="sound")
    Pool.objects.filter(pk=broken.pk).update(idle_policy="unheard_of")
    settled = attribute_open(HOUR + timedelta(hours=2))
    assert (settled.failed, settled.changed) == (("broken",), 2)
    assert set(AttributionInterval.objects.values_list("pool__slug", flat=True)) == {"sound"}
    assert "cost of pool broken was not attributed" in caplog.text
    with pytest.raises(NotAttributed, match="broken"):
        attribute_open_task()
    with pytest.raises(CommandError, match="broken"):
        call_command("attribute_now", stdout=StringIO())


def test_a_report_that_was_days_late_changes_its_own_hour_only():
    fleet = make_fleet("i1 b1")
    now = HOUR + timedelta(hours=12)
    attribute_open(now)
    fleet.use("i1", "a", "chat", MINUTE_US, minute=HOUR + timedelta(hours=7, minutes=59))
    assert stale_hours(fleet.pool, HOUR, now) == {HOUR + timedelta(hours=7)}
    assert attribute_open(now).changed == 1
    assert not stale_hours(fleet.pool, HOUR, now)
    assert balances()["tenant:a:chat:direct"] == 41_666_667


def test_what_is_older_than_a_day_is_looked_at_twice_an_hour():
    fleet = make_fleet("i1", since=HOUR - timedelta(hours=30))
    attribute(fleet.pool, HOUR - timedelta(hours=30), HOUR - timedelta(hours=28), HOUR)
    attribute(fleet.pool, HOUR - timedelta(hours=2), HOUR, HOUR)
    fleet.use("i1", "a", "chat", MINUTE_US, minute=HOUR - timedelta(hours=29))
    attribute_open(HOUR + timedelta(minutes=1, seconds=6))
    assert "tenant:a:chat:direct" not in balances()
    attribute_open(HOUR + timedelta(minutes=30, seconds=6))
    assert balances()["tenant:a:chat:direct"] == 41_666_667


def test_a_rate_added_for_the_past_is_taken_up_by_the_next_run():
    fleet = make_fleet("i1", rate_nanos=None)
    now = HOUR + timedelta(hours=5)
    attribute_open(now)
    assert cost_summary().unpriced_us == 5 * 3_600_000_000 - MINUTE_US
    add_rate(fleet.pool, 1_000_000_000, HOUR, created_at=now + timedelta(minutes=1))
    attribute_open(now + timedelta(minutes=2))
    summary = cost_summary()
    assert (summary.unpriced_us, summary.fleet) == (0, 5_016_666_667)


def test_a_pool_without_slots_costs_nothing_and_takes_no_time(django_assert_max_num_queries):
    fleet = make_fleet("i1")
    gone = HOUR + timedelta(minutes=30)
    SlotTenure.objects.update(ended_at=gone)
    SlotInterval.objects.update(ended_at=gone)
    attribute_open(HOUR + timedelta(hours=2))
    assert cost_summary().fleet == 1_250_000_000
    with django_assert_max_num_queries(8):
        assert attribute_open(HOUR + timedelta(days=20)).intervals == 0
    assert AttributionInterval.objects.filter(pool=fleet.pool).count() == 1


def test_the_number_of_statements_does_not_grow_with_slots(db):
    counts = []
    for slots in ("i1 b1", "i1 i2 i3 i4 b1 b2 f1 f2"):
        slug = f"pool-{len(slots)}"
        fleet = make_fleet(slots, slug=slug, model=slug)
        with CaptureQueriesContext(connection) as taken:
            attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, HOUR + ONE_HOUR)
        counts.append(len(taken))
    assert counts[1] <= counts[0] < 40


def test_now_means_this_instant_and_the_running_minute():
    fleet = make_fleet("i1")
    fleet.use("i1", "a", "chat", 12_000_000, minute=HOUR + timedelta(minutes=1))
    attribute_now(HOUR + timedelta(minutes=1, seconds=30))
    summary = cost_summary()
    assert summary.fleet == summary.attributed == 62_500_000
    assert summary.by_tenant == {"a": 62_500_000}


def test_fleet_and_attributed_are_the_same_number_however_it_is_cut():
    worked_example(idle_policy="platform")
    attribute_period("2026-11-20", HOUR + timedelta(hours=3))
    summary = cost_summary(HOUR, HOUR + ONE_HOUR)
    assert summary.fleet == summary.attributed == 20_000_000_000
    assert sum(summary.by_tenant.values()) == sum(summary.by_class.values()) == 20_000_000_000
    assert summary.by_tenant["platform"] == 6_875_000_000


def test_settling_many_times_ends_in_the_same_book():
    worked_example()
    prints = set()
    for _ in range(3):
        attribute_period("2026-11", HOUR + timedelta(hours=3))
        prints.add((trial_balance().fingerprint, LedgerEvent.objects.count()))
    assert len(prints) == 1


def test_the_task_needs_an_installation():
    assert attribute_open_task() == 0
    make_fleet("i1", since=timezone.now() - ONE_HOUR)
    assert attribute_open_task() >= 1


def test_the_command_attributes_a_period_and_prints_one_document():
    worked_example()
    out = StringIO()
    call_command("attribute", "--period", "2026-11-20", "--json", stdout=out)
    body = json.loads(out.getvalue())
    assert (body["since"], body["currency"]) == (format_utc(HOUR.replace(hour=0)), "EUR")
    assert body["fleet"] == body["attributed"] == sum(body["by_tenant"].values())
    out = StringIO()
    call_command("attribute", "--period", "2026-11-20", stdout=out)
    assert "0 changed, 0 events posted" in out.getvalue()


def test_a_period_that_is_none_is_an_error_with_what_to_write():
    make_fleet("i1")
    with pytest.raises(CommandError, match="write a month 2026-10") as error:
        call_command("attribute", "--period", "October")
    assert error.value.returncode == 2


def test_the_sums_of_a_stopped_fleet():
    make_fleet("i1", since=timezone.now() - ONE_HOUR)
    out = StringIO()
    call_command("attribute_now", "--json", stdout=out)
    body = json.loads(out.getvalue())
    assert body["fleet"] == body["attributed"] == sum(body["by_tenant"].values()) > 0
    assert set(body) == {"fleet", "attributed", "by_tenant", "by_class", "unpriced_us"}
