"""Attribution from rows to lines and book: worked numbers, conservation, idempotence."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db.models import Sum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.fleet.models import Pool, SlotInterval, SlotTenure
from controlplane.ledger.attribution import attribute, hours, source_of
from controlplane.ledger.models import AttributionInterval, AttributionLine, LedgerEvent, Transfer
from controlplane.ledger.posting import balances, fleet_account, owner_account, posted_from, trial_balance
from controlplane.tenants.models import Installation, Tenant
from controlplane.usage.models import SlotMinute, SlotUsageMinute
from tests.ledger.fleet_rows import HOUR, MINUTE_US, ONE_HOUR, add_rate, make_fleet, worked_example
from tests.threads import at_once

pytestmark = pytest.mark.django_db
LATER = HOUR + timedelta(hours=5)


def by_tenant(**where) -> dict[str, int]:
    sums: dict[str, int] = {}
    for slug, nanos in AttributionLine.objects.filter(**where).values_list("tenant_slug", "amount_nanos"):
        sums[slug] = sums.get(slug, 0) + nanos
    return sums


def by_line(**where) -> dict[str, int]:
    sums: dict[str, int] = {}
    for line, nanos in AttributionLine.objects.filter(**where).values_list("line", "amount_nanos"):
        sums[line] = sums.get(line, 0) + nanos
    return sums


def run(fleet, start=HOUR, end=HOUR + ONE_HOUR, now=LATER):
    return attribute(fleet.pool, start, end, now)


@pytest.mark.parametrize(
    ("idle", "weights", "expected"),
    [
        ("usage", {}, {"a": 9_166_666_667, "b": 4_583_333_333, "c": 6_250_000_000}),
        ("weights", {"a": 1, "b": 3}, {"a": 6_562_500_000, "b": 7_187_500_000, "c": 6_250_000_000}),
        ("even", {}, {"a": 8_125_000_000, "b": 5_625_000_000, "c": 6_250_000_000}),
        (
            "platform",
            {},
            {"a": 5_000_000_000, "b": 2_500_000_000, "c": 5_625_000_000, "platform": 6_875_000_000},
        ),
    ],
)
def test_eight_slots_for_an_hour_cost_twenty_and_idle_goes_by_the_policy(idle, weights, expected):
    fleet = worked_example(idle_policy=idle)
    Tenant.objects.filter(slug__in="ab").update(classes=["chat"])
    Tenant.objects.filter(slug="c").update(classes=["bulk"])
    for slug, weight in weights.items():
        Tenant.objects.filter(slug=slug).update(weight=weight)
    (result,) = run(fleet)
    assert result.cost_nanos == 20_000_000_000
    assert by_tenant() == expected
    interval = AttributionInterval.objects.get()
    assert (interval.owned_us, interval.complete, interval.state) == (8 * 3_600_000_000, True, "priced")
    assert sum(AttributionLine.objects.values_list("gpu_us", flat=True)) == interval.owned_us
    book = balances("2026-11")
    assert book.pop("fleet:chat-70b") == -20_000_000_000
    assert sum(book.values()) == 20_000_000_000
    assert trial_balance().balanced


def test_idle_is_never_one_lump():
    fleet = worked_example(idle_policy="platform")
    run(fleet)
    lines = by_line(tenant_slug="platform")
    assert set(lines) == {
        "batch_floor_unused", "draining", "flex_not_lent", "interactive_floor_unused", "lent_unused",
    }  # fmt: skip
    # F2 home all the hour and F1 the second half of it, nobody on them
    assert lines["flex_not_lent"] == 3_750_000_000


def test_running_again_writes_no_row_and_leaves_the_same_book():
    fleet = worked_example()
    run(fleet)
    before = (trial_balance(), list(Transfer.objects.values()), list(AttributionLine.objects.values()))
    again = [run(fleet, now=LATER + timedelta(days=days))[0] for days in range(3)]
    assert [result.changed for result in again] == [False] * 3
    assert (trial_balance(), list(Transfer.objects.values()), list(AttributionLine.objects.values())) == before
    assert trial_balance().fingerprint == before[0].fingerprint


def test_late_usage_posts_the_difference_alone():
    fleet = worked_example()
    run(fleet)
    first = LedgerEvent.objects.get()
    fleet.use("f2", "a", "chat", 36_000_000, minute=HOUR + timedelta(minutes=7))
    SlotMinute.objects.filter(slot_id=fleet.slots["f2"].pk, minute=HOUR + timedelta(minutes=7)).update(
        busy_us=36_000_000
    )
    (result,) = run(fleet)
    assert result.changed
    second = LedgerEvent.objects.exclude(pk=first.pk).get()
    assert second.source == first.source
    assert second.transfers.count() < first.transfers.count() + 1
    assert sum(by_tenant().values()) == 20_000_000_000
    assert balances()["tenant:a:chat:direct"] == by_line(tenant_slug="a")["direct"] == 5_025_000_000
    assert balances()["fleet:chat-70b"] == -20_000_000_000


def test_the_order_and_number_of_runs_do_not_matter():
    fleets = [make_fleet("i1 b1 f1", slug=slug, model=slug) for slug in ("pool-x", "pool-y")]
    starts = [HOUR + number * ONE_HOUR for number in range(3)]
    for fleet in fleets:
        for number, start in enumerate(starts):
            fleet.use("i1", "a", "chat", 7_777_777 * (number + 1), minute=start)
            fleet.use("f1", "b", "chat", 1_234_567, minute=start + timedelta(minutes=30))
            fleet.observe(start, start + timedelta(minutes=45))
    for start in starts:
        run(fleets[0], start, start + ONE_HOUR)
    for start in (starts[2], starts[0], starts[1], starts[0]):
        run(fleets[1], start, start + timedelta(minutes=20), now=start + timedelta(minutes=20))
        run(fleets[1], start, start + ONE_HOUR)

    def lines(fleet):
        rows = AttributionLine.objects.filter(interval__pool=fleet.pool).order_by("interval__starts_at", "id")
        return list(
            rows.values_list("interval__starts_at", "tenant_slug", "class_slug", "line", "gpu_us", "amount_nanos")
        )

    assert lines(fleets[0]) == lines(fleets[1])
    assert balances()["fleet:pool-x"] == balances()["fleet:pool-y"] == -3 * 7_500_000_000


def test_an_hour_that_is_not_over_grows():
    fleet = worked_example()
    (open_,) = run(fleet, now=HOUR + timedelta(minutes=20))
    assert open_.cost_nanos == 6_666_666_667
    assert not AttributionInterval.objects.get().complete
    (same,) = run(fleet, now=HOUR + timedelta(minutes=10))
    assert (same.changed, same.end) == (False, HOUR + timedelta(minutes=20))
    run(fleet)
    interval = AttributionInterval.objects.get()
    assert (interval.run, interval.complete, interval.cost_nanos) == (2, True, 20_000_000_000)
    assert balances()["fleet:chat-70b"] == -20_000_000_000


def test_a_rate_that_changes_inside_the_hour_cuts_it():
    fleet = make_fleet("i1 b1")
    add_rate(fleet.pool, 5_000_000_000, HOUR + timedelta(minutes=20, seconds=30))
    fleet.use("i1", "a", "chat", MINUTE_US, minute=HOUR + timedelta(minutes=20))
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    (result,) = run(fleet)
    seconds = 20 * 60 + 30
    # each part is rounded by itself
    assert result.cost_nanos == round(5_000_000_000 * seconds / 3600) + round(10_000_000_000 * (3600 - seconds) / 3600)
    # half of the busy minute at each rate
    assert by_line()["direct"] == pytest.approx(30 / 3600 * 7_500_000_000, abs=2)
    assert sum(by_tenant().values()) == result.cost_nanos


def test_without_a_rate_the_cost_is_unknown_and_never_zero():
    fleet = make_fleet("i1 b1", rate_nanos=None)
    fleet.use("i1", "a", "chat", MINUTE_US, minute=HOUR)
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    (result,) = run(fleet)
    assert result.cost_nanos is None
    interval = AttributionInterval.objects.get()
    assert (interval.state, interval.unpriced_us) == ("unpriced", 2 * 3_600_000_000)
    assert set(AttributionLine.objects.values_list("amount_nanos", flat=True)) == {None}
    assert AttributionLine.objects.get(line="direct").gpu_us == MINUTE_US
    assert not LedgerEvent.objects.exists()
    add_rate(fleet.pool, 2_500_000_000, HOUR + timedelta(minutes=30))
    run(fleet)
    interval.refresh_from_db()
    assert (interval.state, interval.cost_nanos) == ("partly_unpriced", 2_500_000_000)
    add_rate(fleet.pool, 1_000_000_000, HOUR)
    run(fleet)
    interval.refresh_from_db()
    assert (interval.state, interval.cost_nanos, interval.unpriced_us) == ("priced", 3_500_000_000, 0)
    assert balances()["fleet:chat-70b"] == -3_500_000_000


def test_a_silent_meter_is_a_gap_with_a_name():
    fleet = worked_example(idle_policy="platform")
    missing = (HOUR + timedelta(minutes=10), HOUR + timedelta(minutes=30))
    SlotMinute.objects.filter(slot_id=fleet.slots["f2"].pk, minute__gte=missing[0], minute__lt=missing[1]).delete()
    run(fleet)
    assert AttributionInterval.objects.get().findings == [
        {"kind": "gap", "slot": "f2", "us": 20 * MINUTE_US, "minutes": 20}
    ]
    assert by_line()["unobserved"] == 833_333_333
    assert min(AttributionLine.objects.values_list("amount_nanos", flat=True)) >= 0


def test_the_time_of_a_lost_slot_is_unobserved_whatever_its_meter_says_of_idleness():
    """A vanished agent: nobody's time, no class pays the rest; work that it told of afterwards is paid as work."""
    fleet = make_fleet("f1", idle_policy="usage")
    fleet.use("f1", "a", "chat", 30_000_000, minute=HOUR + timedelta(minutes=12))
    fleet.use("f1", "a", "chat", 30_000_000, minute=HOUR + timedelta(minutes=40))
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    lost_from, lost_to = HOUR + timedelta(minutes=10), HOUR + timedelta(minutes=30)
    fleet.own(
        "f1", [(HOUR, lost_from, "chat", "home"), (lost_from, lost_to, "", "lost"), (lost_to, None, "chat", "home")]
    )
    (result,) = run(fleet)
    times = dict(AttributionLine.objects.values_list("line").annotate(us=Sum("gpu_us")))
    assert times["unobserved"] == 20 * MINUTE_US - 30_000_000
    assert times["direct"] == 60_000_000
    assert {row.tenant_slug for row in AttributionLine.objects.filter(line="unobserved")} == {"platform"}
    assert sum(times.values()) == 60 * MINUTE_US
    assert sum(by_tenant().values()) == result.cost_nanos


def test_more_busy_time_than_a_minute_has_is_unobserved_and_only_that_minute():
    fleet = make_fleet("i1", idle_policy="platform")
    fleet.use("i1", "a", "chat", MINUTE_US + 1, minute=HOUR)
    fleet.use("i1", "a", "chat", 30_000_000, minute=HOUR + timedelta(minutes=1))
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    run(fleet)
    times = dict(AttributionLine.objects.values_list("line", "gpu_us"))
    assert times == {"direct": 30_000_000, "unobserved": MINUTE_US, "interactive_floor_unused": 3_510_000_000}
    assert [row["kind"] for row in AttributionInterval.objects.get().findings] == ["meter"]


def test_busy_time_that_no_request_explains_is_unobserved():
    fleet = make_fleet("i1", idle_policy="platform")
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    SlotMinute.objects.filter(minute=HOUR).update(busy_us=20_000_000, warming_us=10_000_000, broken_us=5_000_000)
    run(fleet)
    times = dict(AttributionLine.objects.values_list("line", "gpu_us"))
    assert times == {
        "unobserved": 20_000_000, "warming": 10_000_000, "broken": 5_000_000,
        "interactive_floor_unused": 3_565_000_000,
    }  # fmt: skip


def test_no_idle_at_all_is_looked_into_when_the_meter_saw_some():
    """Requests that fill every slot-minute beside a meter that was busy for half of it: one of the two is wrong."""
    fleet = make_fleet("i1", idle_policy="platform")
    for number in range(60):
        fleet.use("i1", "a", "chat", MINUTE_US, minute=HOUR + timedelta(minutes=number))
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    run(fleet)
    assert AttributionInterval.objects.get().findings == [], "a slot that was busy all the time has no idle"
    SlotMinute.objects.update(busy_us=MINUTE_US // 2)
    run(fleet)
    found = AttributionInterval.objects.get().findings
    assert sum(row["us"] for row in found) == 30 * MINUTE_US and {row["kind"] for row in found} == {"meter"}
    assert by_tenant() == {"a": 2_500_000_000}, "use that was reported is paid"


def test_repeated_work_is_a_line_of_its_own():
    fleet = make_fleet("i1")
    fleet.use("i1", "a", "chat", 30_000_000, minute=HOUR)
    fleet.use("i1", "a", "chat", 10_000_000, minute=HOUR, charged=False)
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    run(fleet)
    times = dict(AttributionLine.objects.values_list("line", "gpu_us"))
    assert (times["direct"], times["repeated_work"]) == (30_000_000, 10_000_000)


def test_the_lend_price_is_a_pair_that_adds_up_to_nothing():
    fleet = worked_example(lend_price_share_ppm=400_000)
    run(fleet)
    lines = by_line()
    # 1,800 s of 2.50 an hour, drain included, at 40 %
    assert (lines["lend_price"], lines["lend_income"]) == (500_000_000, -500_000_000)
    assert by_line(tenant_slug="c")["lend_price"] == 500_000_000
    assert sum(by_tenant().values()) == 20_000_000_000
    assert by_tenant()["c"] == 6_750_000_000


def test_shared_capacity_that_nobody_used_goes_to_the_platform():
    fleet = make_fleet("i1 i2", isolation=Pool.Isolation.SHARED)
    fleet.use("i1", "a", "chat", MINUTE_US, minute=HOUR)
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    run(fleet)
    assert by_line(tenant_slug="platform") == {"unused": 5_000_000_000 - 41_666_667}
    assert by_tenant()["a"] == 41_666_667


def test_slices_of_a_gpu_cost_their_share():
    fleet = make_fleet("i1 i2 i3")
    for slot in fleet.slots.values():
        slot.gpu_share_ppm = 250_000
        slot.save(update_fields=["gpu_share_ppm"])
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    (result,) = run(fleet)
    assert result.cost_nanos == 1_875_000_000
    assert sum(AttributionLine.objects.values_list("gpu_us", flat=True)) == 2_700_000_000


def test_cost_runs_over_tenure():
    fleet = make_fleet("i1 b1")
    leaves = HOUR + timedelta(minutes=15)
    SlotTenure.objects.filter(slot=fleet.slots["b1"]).update(ended_at=leaves)
    SlotInterval.objects.filter(slot=fleet.slots["b1"]).update(ended_at=leaves)
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    (result,) = run(fleet)
    assert result.cost_nanos == 2_500_000_000 + 625_000_000
    fleet.use("b1", "c", "bulk", 1_000_000, minute=HOUR + timedelta(minutes=40))
    run(fleet)
    interval = AttributionInterval.objects.get()
    assert interval.cost_nanos == 3_125_000_000
    assert {"kind": "no_tenure", "slot": "b1", "us": 1_000_000, "minutes": 1} in interval.findings


def test_what_a_slot_did_in_its_first_minute_it_did_in_the_fleet():
    """Price and slot both begin inside a minute whose figures are known as a whole."""
    joins = HOUR + timedelta(minutes=48, seconds=16, microseconds=342_663)
    minute = HOUR + timedelta(minutes=48)
    fleet = make_fleet("b1", since=joins, idle_policy="platform")
    fleet.use("b1", "c", "bulk", 26_863_073, minute=minute)
    fleet.observe(minute + timedelta(minutes=1), HOUR + ONE_HOUR)
    slot_id = fleet.slots["b1"].pk
    SlotMinute.objects.create(slot_id=slot_id, minute=minute, busy_us=26_863_073, observed_us=28_575_398)
    (result,) = run(fleet)
    interval = AttributionInterval.objects.get()
    # 15.08 s before the first report: idle that nobody saw, and nothing to look into
    assert interval.findings == []
    times = dict(AttributionLine.objects.values_list("line", "gpu_us"))
    assert times["direct"] == 26_863_073
    assert times["unobserved"] == 43_657_337 - 28_575_398
    assert sum(times.values()) == interval.owned_us == 43_657_337 + 11 * MINUTE_US
    assert sum(by_tenant().values()) == result.cost_nanos


def test_a_rate_that_changes_in_a_slots_first_minute_splits_by_its_time_in_the_fleet():
    joins = HOUR + timedelta(seconds=20)
    fleet = make_fleet("i1", since=joins, rate_nanos=1_000_000_000)
    add_rate(fleet.pool, 3_000_000_000, HOUR + timedelta(seconds=30))
    fleet.use("i1", "a", "chat", 40_000_000, minute=HOUR)
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    (result,) = run(fleet)
    assert AttributionInterval.objects.get().findings == []
    # 10 of its 40 s at the old rate
    assert by_line()["direct"] == round(1_000_000_000 * 10 / 3600) + round(3_000_000_000 * 30 / 3600)
    assert sum(by_tenant().values()) == result.cost_nanos


@pytest.mark.parametrize(
    ("first_report_s", "silent_s", "said_us"),
    [
        (25, 0, None),
        (60, 0, None),
        (65, 0, None),
        # an agent that came late: what is beyond the first minute
        (90, 0, 30_000_000),
        # late reports are no silence
        (0, 9, None),
        (0, 10, 10_000_000),
    ],
)
def test_a_gap_is_more_than_a_start_or_a_late_report(first_report_s, silent_s, said_us):
    fleet = make_fleet("i1", idle_policy="platform")
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    for number in range(2):
        seen_us = MINUTE_US - min(max(first_report_s - 60 * number, 0), 60) * 1_000_000
        SlotMinute.objects.filter(minute=HOUR + timedelta(minutes=number)).update(observed_us=seen_us)
    SlotMinute.objects.filter(minute=HOUR + timedelta(minutes=30)).update(observed_us=MINUTE_US - silent_s * 1_000_000)
    run(fleet)
    said = [(row["kind"], row["us"]) for row in AttributionInterval.objects.get().findings]
    assert said == ([] if said_us is None else [("gap", said_us)])
    unseen_us = (first_report_s + silent_s) * 1_000_000
    assert AttributionLine.objects.get(line="unobserved").gpu_us == unseen_us


def test_a_completed_hour_keeps_the_policy_it_was_completed_under():
    fleet = worked_example(idle_policy="usage")
    run(fleet)
    Pool.objects.update(idle_policy="platform")
    fleet.pool.refresh_from_db()
    assert not run(fleet)[0].changed
    assert "platform" not in by_tenant()
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, LATER, present_settings=True)
    assert by_tenant()["platform"] == 6_875_000_000
    assert balances()["fleet:chat-70b"] == -20_000_000_000


@pytest.mark.parametrize(
    ("zone", "day", "pieces", "total_h"),
    [
        ("Europe/Berlin", datetime(2026, 10, 24, 22, tzinfo=UTC), 25, 25),
        ("America/New_York", datetime(2026, 3, 8, 5, tzinfo=UTC), 23, 23),
        ("Asia/Kolkata", datetime(2026, 11, 19, 18, 30, tzinfo=UTC), 25, 24),
    ],
)
def test_a_local_day_is_as_long_as_its_clocks_say(zone, day, pieces, total_h):
    end = day + timedelta(hours=total_h)
    found = hours(day, end, zone)
    assert (len(found), found[0].start, found[-1].end) == (pieces, day, end)
    fleet = make_fleet("i1", since=day - timedelta(days=2), rate_nanos=1_000_000_000)
    Installation.objects.update(billing_zone=zone)
    attribute(fleet.pool, day, end, end + timedelta(days=1))
    intervals = AttributionInterval.objects.filter(starts_at__gte=day, starts_at__lt=end)
    assert sum(intervals.values_list("cost_nanos", flat=True)) == total_h * 1_000_000_000


def test_the_month_of_the_billing_zone_is_the_period():
    fleet = make_fleet("i1", since=datetime(2026, 10, 31, 22, tzinfo=UTC), rate_nanos=1_000_000_000)
    Installation.objects.update(billing_zone="Asia/Kolkata")
    fleet.pool.refresh_from_db()
    start = datetime(2026, 11, 30, 18, tzinfo=UTC)
    attribute(fleet.pool, start, start + ONE_HOUR, start + timedelta(days=1))
    assert balances("2026-11")["fleet:chat-70b"] == balances("2026-12")["fleet:chat-70b"] == -500_000_000


slot_minutes = st.fixed_dictionaries(
    {
        "slot": st.sampled_from(["i1", "b1", "f1"]),
        "tenant": st.sampled_from(["a", "b", "c"]),
        "class_": st.sampled_from(["chat", "bulk"]),
        "minute": st.integers(0, 59),
        "gpu_us": st.integers(1, 70_000_000),
        "charged": st.booleans(),
    }
)
meters = st.fixed_dictionaries(
    {
        "slot": st.sampled_from(["i1", "b1", "f1"]), "minute": st.integers(0, 59),
        "busy_us": st.integers(0, MINUTE_US), "observed_us": st.integers(0, MINUTE_US),
        "warming_us": st.integers(0, MINUTE_US), "broken_us": st.integers(0, MINUTE_US),
    }
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(slot_minutes, max_size=25),
    seen=st.lists(meters, max_size=40, unique_by=lambda row: (row["slot"], row["minute"])),
    idle=st.sampled_from(["usage", "even", "weights", "platform"]),
    lend=st.integers(0, 1_000_000),
    rate=st.integers(0, 9_999_999_999),
    cuts=st.lists(st.integers(1, 3_599_999_999), min_size=2, max_size=2, unique=True).map(sorted),
)
def test_lines_add_up_to_the_cost_whatever_the_rows(db, rows, seen, idle, lend, rate, cuts):
    slug = f"pool-{Pool.objects.count()}"
    fleet = make_fleet("i1 b1 f1", slug=slug, model=slug, rate_nanos=rate, idle_policy=idle, lend_price_share_ppm=lend)
    lent, back = (HOUR + timedelta(microseconds=cut) for cut in cuts)
    fleet.own("f1", [(HOUR, lent, "chat", "home"), (lent, back, "bulk", "lent"), (back, None, "bulk", "draining")])
    keys = set()
    for row in rows:
        key = (row["slot"], row["tenant"], row["class_"], row["minute"], row["charged"])
        if key not in keys:
            keys.add(key)
            fleet.use(
                row["slot"], row["tenant"], row["class_"], row["gpu_us"], charged=row["charged"],
                minute=HOUR + timedelta(minutes=row["minute"]),
            )  # fmt: skip
    for row in seen:
        SlotMinute.objects.create(
            **{name: row[name] for name in ("busy_us", "observed_us", "warming_us", "broken_us")},
            slot_id=fleet.slots[row["slot"]].pk, minute=HOUR + timedelta(minutes=row["minute"]),
        )  # fmt: skip
    run(fleet, now=HOUR + timedelta(minutes=17))
    (result,) = run(fleet)
    assert result.cost_nanos == 3 * rate
    mine = AttributionLine.objects.filter(interval__pool=fleet.pool)
    assert sum(mine.values_list("amount_nanos", flat=True)) == 3 * rate
    assert sum(mine.values_list("gpu_us", flat=True)) == 3 * 3_600_000_000
    assert all(us >= 0 for us in mine.values_list("gpu_us", flat=True))
    lends = by_line(interval__pool=fleet.pool)
    assert lends.get("lend_price", 0) + lends.get("lend_income", 0) == 0
    assert balances().get(f"fleet:{slug}", 0) == -3 * rate
    assert trial_balance().balanced
    lines = {
        owner_account(line.tenant_slug, line.class_slug, line.line).code: line.amount_nanos
        for line in mine
        if line.amount_nanos
    }
    assert lines == posted_from(fleet_account(slug), source_of(fleet.pool, HOUR))


@pytest.mark.django_db(transaction=True)
def test_two_runs_at_once_post_once():
    fleet = worked_example()
    changed = at_once([lambda: run(fleet)[0].changed] * 4, within_s=60)
    assert sorted(changed) == [False, False, False, True]
    assert LedgerEvent.objects.count() == 1
    assert balances()["fleet:chat-70b"] == -20_000_000_000
    assert SlotUsageMinute.objects.exists()
