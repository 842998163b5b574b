"""Windows depend on the calendar and the budget's zone alone, and tile time through clock changes."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

import pytest
from django.db import connection, transaction

from controlplane.budgets.ingest import settle_soft
from controlplane.budgets.leases import Asking, acquire
from controlplane.budgets.models import BudgetWindow
from controlplane.budgets.sweep import sweep
from controlplane.budgets.windows import BudgetRow, window_of
from controlplane.core.period import to_us

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Chatham"]


def row(zone, period="day", anchor_day=1):
    return BudgetRow(1, 1, "acme", "plan", period, anchor_day, zone, 1, True)


def test_tokyos_month_begins_at_its_own_midnight():
    august = window_of(row("Asia/Tokyo", "month"), datetime(2026, 8, 10, tzinfo=UTC))
    assert august.start == datetime(2026, 7, 31, 15, tzinfo=UTC)
    before = datetime(2026, 7, 31, 14, 59, 59, 999000, tzinfo=UTC)
    assert window_of(row("Asia/Tokyo", "month"), before).end == august.start


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("period", ["day", "week", "month"])
def test_windows_tile_the_year_without_gap(zone, period):
    at, seen = datetime(2026, 1, 1, tzinfo=UTC), 0
    while at < datetime(2027, 1, 10, tzinfo=UTC):
        window = window_of(row(zone, period), at)
        assert window.start <= at < window.end
        assert window_of(row(zone, period), window.start) == window
        at, seen = window.end, seen + 1
    assert seen >= {"day": 374, "week": 53, "month": 12}[period]


def test_a_night_with_a_clock_change_has_its_own_length():
    berlin = row("Europe/Berlin")
    assert window_of(berlin, datetime(2026, 10, 25, 12, tzinfo=UTC)).hours == 25
    assert window_of(berlin, datetime(2026, 3, 29, 12, tzinfo=UTC)).hours == 23


def test_a_window_rolls_over_and_its_successor_starts_empty(budget, in_transaction):
    daily = budget(limit=100, zone="America/New_York")
    before = datetime(2026, 11, 2, 4, 59, 59, tzinfo=UTC)
    after = datetime(2026, 11, 2, 5, 0, 0, tzinfo=UTC)
    asking = Asking(1, 1, budget.child.pk, 100)
    assert in_transaction(acquire, asking, before).lease.expires_us == to_us(after)
    assert in_transaction(acquire, asking, before).lease is None
    assert in_transaction(acquire, asking, after).lease is not None
    windows = list(BudgetWindow.objects.filter(budget=daily).order_by("starts_at"))
    assert windows[0].ends_at == windows[1].starts_at == after
    assert [window.leased_nanos for window in windows] == [100, 100]


def test_soft_budgets_settle_by_admission_on_every_level(budget, in_transaction):
    own = budget(limit=50, hard=False, zone="Asia/Kolkata")
    group = budget(limit=1_000, hard=False, tenant=budget.parent, period="month")
    midnight = to_us(datetime(2026, 11, 28, 18, 30, tzinfo=UTC))
    charges = [(budget.child.pk, midnight - 1, 30), (budget.child.pk, midnight, 40), (budget.child.pk, midnight + 1, 5)]
    in_transaction(settle_soft, charges)
    in_transaction(settle_soft, charges[:1])
    spent = list(BudgetWindow.objects.filter(budget=own).order_by("starts_at").values_list("settled_nanos", flat=True))
    assert spent == [60, 45]
    assert BudgetWindow.objects.get(budget=group).settled_nanos == 105


def test_the_sweep_makes_windows_notes_thresholds_once_and_follows_limits(budget, in_transaction, noon):
    own = budget(limit=100, hard=False)
    assert sweep(noon).windows == 1
    in_transaction(settle_soft, [(budget.child.pk, to_us(noon), 85)])
    assert sweep(noon).thresholds == 2
    assert sweep(noon).thresholds == 0
    assert BudgetWindow.objects.get(budget=own).notified_percent == 80
    own.limit_nanos = 80
    own.save(update_fields=["limit_nanos"])
    assert sweep(noon).thresholds == 1
    found = BudgetWindow.objects.get(budget=own)
    assert (found.notified_percent, found.limit_nanos) == (100, 80)


def test_a_lease_that_waited_for_a_lowered_limit_does_not_raise_it_again(budget, in_transaction, noon):
    """The limit is lowered while a lease waits for the window's lock: the lease must see the lower one."""
    own = budget(limit=1_000)
    asking = Asking(1, 1, budget.child.pk, 100)
    in_transaction(acquire, asking, noon)
    leased = BudgetWindow.objects.get(budget=own).leased_nanos
    granted = []
    waiter = threading.Thread(target=lambda: granted.append(in_transaction(acquire, asking, noon)))
    with transaction.atomic():
        BudgetWindow.objects.select_for_update().get(budget=own)
        waiter.start()
        _until_someone_waits_for_a_lock()
        type(own).objects.filter(pk=own.pk).update(limit_nanos=leased)
        BudgetWindow.objects.filter(budget=own).update(limit_nanos=leased)
    waiter.join(60)
    window = BudgetWindow.objects.get(budget=own)
    assert granted[0].lease is None and granted[0].exhausted is not None
    assert (window.limit_nanos, window.leased_nanos) == (leased, leased)


def _until_someone_waits_for_a_lock():
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
                " WHERE NOT l.granted AND a.datname = current_database()"
            )
            if cursor.fetchone()[0]:
                return
        time.sleep(0.01)
    raise AssertionError("nobody waited for the window")
