"""Charges in the book: one event for each day and model, differences after it, and no row without a difference."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.core.period import load_zone, parse_period
from controlplane.ledger.charging import billed_elsewhere, post_charges, post_due_charges
from controlplane.ledger.models import LedgerEvent, Period, Transfer
from controlplane.ledger.posting import PostingLine, Source, balances, post, trial_balance
from controlplane.ledger.proposals import billed_account, revenue_account
from controlplane.ledger.queries import charges
from controlplane.tenants.models import Installation
from controlplane.usage.models import RollupDelta
from tests.ledger.fleet_rows import HOUR, make_fleet
from tests.ledger.test_pages import roll_up
from tests.threads import at_once

NEXT = datetime(2026, 11, 21, 0, 20, tzinfo=UTC)
DAY = "charges:2026-11-20:llama-70b"


@pytest.fixture
def fleet(db):
    return make_fleet("i1", tenants="a b")


def keys():
    return list(LedgerEvent.objects.order_by("id").values_list("key", flat=True))


def by_day_and_model():
    """(source, tenant, class) -> nanos, from the transfers alone."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT e.source, d.code, sum(t.amount_nanos)::bigint FROM ledger_transfer t"
            " JOIN ledger_ledgerevent e ON e.id = t.event_id JOIN ledger_account d ON d.id = t.debit_id"
            " WHERE d.kind = 'billed' GROUP BY 1, 2"
        )
        return {(source, code): nanos for source, code, nanos in cursor.fetchall()}


def test_a_day_is_booked_once_when_it_is_over(fleet):
    roll_up(fleet, "a", "chat", nanos=(9, 1, 3, 2))
    roll_up(fleet, "b", "chat", nanos=(4, 0, 0, 0), model=RollupDelta)
    assert post_due_charges(datetime(2026, 11, 21, 0, 5, tzinfo=UTC)) == [], "reports of the last minutes may come"
    assert post_due_charges(NEXT) == [f"{DAY}#1"] and post_due_charges(NEXT) == []
    assert balances("2026-11") == {"billed:a:chat": 15, "billed:b:chat": 4, "revenue:chat": -19}
    assert by_day_and_model() == {(DAY, "billed:a:chat"): 15, (DAY, "billed:b:chat"): 4}
    event = LedgerEvent.objects.get()
    assert (event.kind, event.interval_start, event.interval_end - event.interval_start) == (
        "charges", datetime(2026, 11, 20, tzinfo=UTC), timedelta(days=1),
    )  # fmt: skip


def test_what_comes_late_is_a_difference_and_what_was_too_much_goes_back(fleet):
    roll_up(fleet, "a", "chat", nanos=(9, 0, 0, 0))
    post_due_charges(NEXT)
    late = roll_up(fleet, "a", "chat", nanos=(5, 0, 0, 0), version=2)
    assert post_due_charges(NEXT) == [f"{DAY}#2"]
    assert [(row.debit.code, row.amount_nanos) for row in Transfer.objects.order_by("id")] == [
        ("billed:a:chat", 9), ("billed:a:chat", 5),
    ]  # fmt: skip
    late.delete()
    assert post_due_charges(NEXT) == [f"{DAY}#3"]
    assert Transfer.objects.latest("id").debit.code == "revenue:chat" and balances()["billed:a:chat"] == 9


def test_days_older_than_the_last_ones_are_looked_at_in_an_hours_first_minutes(fleet):
    roll_up(fleet, "a", "chat")
    assert post_due_charges(datetime(2026, 11, 25, 3, 30, tzinfo=UTC)) == []
    assert post_due_charges(datetime(2026, 11, 25, 4, 0, tzinfo=UTC)) == [f"{DAY}#1"]


def test_a_day_is_one_of_the_billing_zone(fleet):
    Installation.objects.update(billing_zone="America/New_York")
    roll_up(fleet, "a", "chat", at=datetime(2026, 11, 21, 4, 45, tzinfo=UTC))
    roll_up(fleet, "a", "chat", at=datetime(2026, 11, 21, 5, 0, tzinfo=UTC), nanos=(50, 0, 0, 0))
    assert post_due_charges(datetime(2026, 11, 22, 6, tzinfo=UTC)) == [f"{DAY}#1", "charges:2026-11-21:llama-70b#1"]
    assert by_day_and_model()[DAY, "billed:a:chat"] == 3


def test_a_long_name_of_a_model_fits_and_stays_its_own(fleet):
    type(fleet.pool.model).objects.update(name="x" * 120)
    roll_up(fleet, "a", "chat")
    (key,) = post_due_charges(NEXT)
    assert len(key) < 125 and key.startswith("charges:2026-11-20:xxx") and "~" in key and post_due_charges(NEXT) == []


def test_a_month_of_an_earlier_release_stays_booked_as_a_whole(fleet):
    roll_up(fleet, "a", "chat", nanos=(9, 0, 0, 0))
    window = parse_period(load_zone("UTC"), "2026-11")
    post(
        "charges:2026-11#1", "charges", [PostingLine(billed_account("a", "chat"), revenue_account("chat"), 9)],
        at=HOUR, now=NEXT, created_by="x", source=Source("charges:2026-11"),
    )  # fmt: skip
    assert post_due_charges(NEXT) == []
    roll_up(fleet, "a", "chat", nanos=(2, 0, 0, 0), version=4)
    assert post_due_charges(NEXT) == []
    assert post_charges("2026-11", window, now=NEXT, created_by="x").key == "charges:2026-11#2"
    assert balances() == {"billed:a:chat": 11, "revenue:chat": -11}


def test_late_charges_of_a_closed_month_are_booked_elsewhere_and_said_so(fleet):
    roll_up(fleet, "a", "chat", nanos=(9, 0, 0, 0))
    post_due_charges(NEXT)
    Period.objects.create(name="2026-11", state="closed", version=1)
    roll_up(fleet, "a", "chat", nanos=(5, 0, 0, 0), version=2)
    assert post_due_charges(NEXT) == [f"{DAY}#2"]
    event = LedgerEvent.objects.latest("id")
    assert (event.period, event.corrects.key) == ("2026-12", f"{DAY}#1")
    assert billed_elsewhere("2026-11") == {("a", "chat"): 5} and billed_elsewhere("2026-12") == {}


@pytest.mark.django_db(transaction=True)
def test_runs_at_once_book_a_day_once():
    fleet = make_fleet("i1", tenants="a b")
    for tenant in ("a", "b"):
        roll_up(fleet, tenant, "chat", nanos=(7, 0, 0, 0))
    found = at_once([lambda: post_due_charges(NEXT)] * 4)
    assert sorted(found) == [[], [], [], [f"{DAY}#1"]]
    assert balances() == {"billed:a:chat": 7, "billed:b:chat": 7, "revenue:chat": -14}


NANOS = st.integers(0, 2**40)
LATE_USE = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 95), NANOS, st.sampled_from(["post", "month", "close", "no"])),
    min_size=1,
    max_size=8,
)


@pytest.mark.django_db
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(LATE_USE)
def test_the_book_is_what_usage_says_whatever_the_order_and_number_of_runs(steps):
    with transaction.atomic():
        check_the_book(steps)
        transaction.set_rollback(True)


def check_the_book(steps):
    fleet = make_fleet("i1", tenants="a b")
    window = parse_period(load_zone("UTC"), "2026-11")
    for number, (tenant, quarter, nanos, then) in enumerate(steps):
        at = HOUR.replace(hour=0) + timedelta(minutes=15 * quarter)
        roll_up(fleet, tenant, "chat", at=at, version=number, nanos=(nanos, 0, 0, 0))
        if then == "post":
            post_due_charges(NEXT)
        elif then == "month":
            post_charges("2026-11", window, now=NEXT, created_by="x")
        elif then == "close":
            Period.objects.update_or_create(name="2026-11", defaults={"state": "closed", "version": 1})
    post_due_charges(NEXT)
    post_charges("2026-11", window, now=NEXT, created_by="x")
    rows = LedgerEvent.objects.count()
    assert post_due_charges(NEXT) == [] and LedgerEvent.objects.count() == rows
    usage: dict[str, int] = {}
    for one in charges(window.start, window.end):
        usage[f"billed:{one.tenant}:chat"] = usage.get(f"billed:{one.tenant}:chat", 0) + one.nanos
    booked = {code: nanos for code, nanos in balances().items() if code.startswith("billed")}
    assert booked == {code: nanos for code, nanos in usage.items() if nanos} and trial_balance().balanced
    assert sum(row.amount_nanos for row in Transfer.objects.all()) == sum(usage.values()), "nothing was booked twice"
