"""Balances out of sums and the transfers since: the same as adding up the whole book, at any moment of folding."""

import threading
import time
from datetime import UTC, datetime

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.ledger import balance_sums
from controlplane.ledger.balance_sums import fold_balances
from controlplane.ledger.models import Account, BalanceFold, BalanceSum, LedgerEvent, Transfer
from controlplane.ledger.posting import PostingLine, balances, fleet_account, owner_account, post, trial_balance
from tests import factories

NOW = datetime(2026, 11, 20, 10, tzinfo=UTC)
MONTHS = [datetime(2026, month, 5, tzinfo=UTC) for month in (9, 10, 11)]


def added_up(period=None):
    """The book by reading every transfer."""
    found = {}
    rows = Transfer.objects.filter(period=period) if period else Transfer.objects.all()
    for debit, credit, nanos in rows.values_list("debit__code", "credit__code", "amount_nanos"):
        found[debit] = found.get(debit, 0) + nanos
        found[credit] = found.get(credit, 0) - nanos
    return {code: nanos for code, nanos in found.items() if nanos}


def put(number, owner, nanos, at=NOW):
    line = PostingLine(owner_account(owner, "chat", "direct"), fleet_account("p"), nanos)
    return post(f"e{number}", "test", [line], at=at, now=NOW, created_by="t")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.none() | st.tuples(st.sampled_from("abc"), st.integers(-9, 9).filter(bool), st.sampled_from(MONTHS)),
        max_size=25,
    )
)
def test_folding_at_any_moment_changes_no_balance(installation, steps):
    start = LedgerEvent.objects.count()
    for number, step in enumerate(steps):
        if step is None:
            fold_balances(NOW)
        else:
            put(f"{start}-{number}", step[0], step[1], step[2])
    for period in (None, "2026-09", "2026-10", "2026-11", "2026-12"):
        assert balances(period) == added_up(period)
    assert trial_balance().transfers == Transfer.objects.count()
    assert trial_balance("2026-10").transfers == Transfer.objects.filter(period="2026-10").count()


def test_a_fold_goes_in_pieces_and_ends(installation, monkeypatch):
    for number in range(7):
        put(number, "a", 1)
    monkeypatch.setattr(balance_sums, "FOLD_MOST", 3)
    first = Transfer.objects.order_by("id").values_list("id", flat=True)[0]
    BalanceFold.objects.create(pk=1, through_id=first - 1)
    assert [fold_balances(NOW) for _ in range(4)] == [3, 3, 1, 0]
    assert BalanceSum.objects.get(account__code="tenant:a:chat:direct").debit_nanos == 7 and balances() == added_up()


@pytest.mark.django_db(transaction=True)
def test_postings_and_folds_at_the_same_time_lose_nothing_and_count_nothing_twice():
    factories.installation()
    barrier, failed, seen = threading.Barrier(6), [], []

    def work(action):
        try:
            barrier.wait(60)
            action()
        except Exception as error:
            failed.append(error)
        finally:
            connection.close()

    def poster(name):
        return lambda: [put(f"{name}{number}", name, 1) for number in range(60)]

    def folder():
        for _ in range(30):
            fold_balances(NOW)

    def reader():
        for _ in range(60):
            seen.append(trial_balance().balanced)

    actions = [poster("a"), poster("b"), poster("c"), folder, folder, reader]
    threads = [threading.Thread(target=work, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    fold_balances(NOW)
    assert not failed and all(seen) and len(seen) == 60
    assert balances() == added_up() == {
        "fleet:p": -180, "tenant:a:chat:direct": 60, "tenant:b:chat:direct": 60, "tenant:c:chat:direct": 60
    }  # fmt: skip
    assert sum(row.debits for row in BalanceSum.objects.all()) == 180


@pytest.mark.django_db(transaction=True)
def test_a_posting_that_commits_late_is_not_folded_over():
    factories.installation()
    posted, release = threading.Event(), threading.Event()
    for number, owner in enumerate("ab"):
        put(number, owner, 1)  # the accounts are there: nobody waits for who makes them

    def slow():
        try:
            with transaction.atomic():
                put("slow", "a", 5)
                posted.set()
                release.wait(60)
        finally:
            connection.close()

    def fold():
        try:
            fold_balances(NOW)
        finally:
            connection.close()

    poster, folder = threading.Thread(target=slow), threading.Thread(target=fold)
    poster.start()
    assert posted.wait(60)
    put("fast", "b", 7)  # a higher number, committed first
    folder.start()
    folder.join(0.5)
    release.set()
    for thread in (poster, folder):
        thread.join(60)
    fold_balances(NOW)
    assert balances() == {"tenant:a:chat:direct": 6, "tenant:b:chat:direct": 8, "fleet:p": -14}
    assert balances() == added_up()


@pytest.mark.slow
def test_how_long_a_trial_balance_takes_is_printed(installation, capsys):
    """The book is filled as the owner, past `post`, for its size only; speed is told, not asserted."""
    accounts = [
        Account(code=f"tenant:t{n}:chat:direct", kind="tenant", tenant_slug=f"t{n}", class_slug="chat", line="direct")
        for n in range(400)
    ]
    Account.objects.bulk_create([*accounts, Account(code="fleet:p", kind="fleet", pool_slug="p")])
    event = put("first", "a", 1)
    count = 100_000
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO ledger_transfer (event_id, debit_id, credit_id, amount_nanos, period)"
            " SELECT %s, (SELECT min(id) FROM ledger_account WHERE code LIKE 'tenant:t%%') + n %% 400,"
            " (SELECT id FROM ledger_account WHERE code = 'fleet:p'), 1 + n %% 997,"
            " '2026-' || to_char(1 + n %% 12, 'FM00')"
            " FROM generate_series(1, %s) n",
            [event.pk, count],
        )
    times = []
    for turn in range(2):
        start = time.perf_counter()
        whole, month = trial_balance(), trial_balance("2026-05")
        times.append(time.perf_counter() - start)
        assert whole.balanced and month.balanced and whole.transfers == count + 1
        if not turn:
            while fold_balances(NOW):
                pass
            connection.cursor().execute("ANALYZE ledger_balancesum")
    with capsys.disabled():
        print(f"\n  trial balances over {count:,} transfers: {times[0] * 1e3:.0f} ms, folded {times[1] * 1e3:.1f} ms")
