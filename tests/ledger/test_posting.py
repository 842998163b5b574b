"""The book: idempotent by key, balanced by construction, and nothing in it can be changed."""

from datetime import UTC, datetime

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from controlplane.ledger.models import Account, LedgerEvent, Transfer
from controlplane.ledger.posting import (
    ConflictingLines,
    PostingLine,
    balances,
    fleet_account,
    owner_account,
    post,
    posted_from,
    trial_balance,
)
from controlplane.ledger.posting import Source as PostingSource
from tests import factories

AT = datetime(2026, 10, 31, 23, 30, tzinfo=UTC)
FLEET = fleet_account("chat-70b")
ACME = owner_account("acme", "chat", "direct")
PLATFORM = owner_account("platform", "chat", "flex_not_lent")


@pytest.fixture
def book(db):
    factories.installation(billing_zone="Europe/Berlin")

    def write(key="event-1", lines=None, **values):
        lines = lines if lines is not None else [PostingLine(ACME, FLEET, 700), PostingLine(PLATFORM, FLEET, 300)]
        return post(key, "attribution", lines, **{"at": AT, "now": AT, "created_by": "test", **values})

    return write


def test_accounts_are_made_with_codes_that_a_person_can_read(book):
    event = book()
    assert balances() == {"fleet:chat-70b": -1000, "platform:chat:flex_not_lent": 300, "tenant:acme:chat:direct": 700}
    assert event.transfers.count() == 2
    assert Account.objects.get(code="tenant:acme:chat:direct").tenant_slug == "acme"


def test_the_period_is_the_month_of_the_billing_zone(book):
    assert book().period == "2026-11"
    assert balances("2026-10") == {}


def test_the_same_key_with_the_same_lines_is_the_same_event(book):
    first = book()
    again = book(
        lines=[PostingLine(PLATFORM, FLEET, 300), PostingLine(ACME, FLEET, 500), PostingLine(ACME, FLEET, 200)]
    )
    assert (again.pk, Transfer.objects.count()) == (first.pk, 2)


def test_the_same_key_with_other_lines_is_an_error(book):
    book()
    with pytest.raises(ConflictingLines, match="another key"):
        book(lines=[PostingLine(ACME, FLEET, 701), PostingLine(PLATFORM, FLEET, 299)])
    assert balances()["tenant:acme:chat:direct"] == 700


def test_a_negative_line_moves_the_other_way(book):
    book(lines=[PostingLine(ACME, FLEET, -5)])
    (row,) = Transfer.objects.select_related("debit", "credit")
    assert (row.debit.code, row.credit.code, row.amount_nanos) == ("fleet:chat-70b", "tenant:acme:chat:direct", 5)


@pytest.mark.parametrize(
    "lines", [[], [PostingLine(ACME, FLEET, 0)], [PostingLine(ACME, FLEET, 3), PostingLine(FLEET, ACME, 3)]]
)
def test_nothing_to_move_is_an_error(book, lines):
    with pytest.raises(ValueError, match="moves nothing"):
        book(lines=lines)
    assert not LedgerEvent.objects.exists()


def test_a_transfer_to_itself_is_an_error(book):
    with pytest.raises(ValueError, match="to itself"):
        book(lines=[PostingLine(ACME, ACME, 5)])


def test_balances_of_a_source_are_the_sum_of_its_events(book):
    source = PostingSource("attribution:chat-70b:x", AT, AT)
    book("one", source=source)
    book("two", [PostingLine(ACME, FLEET, -100), PostingLine(PLATFORM, FLEET, 100)], source=source)
    book("other", [PostingLine(ACME, FLEET, 9)])
    assert posted_from(FLEET, source.name) == {"platform:chat:flex_not_lent": 400, "tenant:acme:chat:direct": 600}
    assert posted_from(fleet_account("another"), source.name) == {}


def test_debits_equal_credits(book):
    book()
    book("two", [PostingLine(ACME, FLEET, -50)])
    trial = trial_balance()
    assert (trial.debit_nanos, trial.credit_nanos, trial.balanced) == (1050, 1050, True)
    assert trial.transfers == 3


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ledger_transfer SET amount_nanos = 1",
        "DELETE FROM ledger_transfer",
        "TRUNCATE ledger_transfer CASCADE",
        "UPDATE ledger_ledgerevent SET reason = 'x'",
        "DELETE FROM ledger_ledgerevent",
        "TRUNCATE ledger_ledgerevent CASCADE",
    ],
)
def test_the_database_refuses_to_change_the_book(book, statement):
    book()
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute(statement)
    assert Transfer.objects.count() == 2


@pytest.mark.parametrize("change", [{"amount_nanos": 0}, {"amount_nanos": -1}, {"credit": None}])
def test_the_database_refuses_transfers_of_nothing_and_to_itself(book, change):
    event = book()
    row = event.transfers.first()
    values = {"debit_id": row.debit_id, "credit_id": row.credit_id, "amount_nanos": 5}
    values |= {"credit_id": row.debit_id} if "credit" in change else change
    with pytest.raises(IntegrityError), transaction.atomic():
        Transfer.objects.create(event=event, period=event.period, **values)
