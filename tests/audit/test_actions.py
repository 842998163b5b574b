"""The audit log: chained, append-only in the database, without secrets, only inside the change's transaction."""

import threading
from datetime import UTC, datetime

import pytest
from django.db import DatabaseError, connection, transaction

from controlplane.audit.actions import changes, none_recorded, record
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.audit.queries import verify_chain

NOW = datetime(2026, 11, 29, 20, 0, 0, 123456, tzinfo=UTC)
ACTOR = Actor(id=None, name="ada", role="admin", request_id="r-1")


def write(number: int) -> AuditEntry:
    return record(actor=ACTOR, action="tenant.edit", noun="tenant", object_id=number, now=NOW, after={"weight": number})


@pytest.mark.django_db
def test_entries_are_chained_and_the_chain_holds():
    entries = [write(number) for number in range(5)]
    assert bytes(entries[3].previous_hash) == bytes(entries[2].hash)
    check = verify_chain()
    assert (check.entries, check.broken_at) == (5, None)


@pytest.mark.django_db(transaction=True)
def test_a_changed_entry_breaks_the_chain_where_it_was_changed():
    with transaction.atomic():
        entries = [write(number) for number in range(4)]
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE audit_auditentry DISABLE TRIGGER append_only_row")
        cursor.execute("UPDATE audit_auditentry SET reason = 'other' WHERE id = %s", [entries[2].pk])
        cursor.execute("ALTER TABLE audit_auditentry ENABLE TRIGGER append_only_row")
    assert verify_chain().broken_at == entries[2].pk


@pytest.mark.django_db
@pytest.mark.parametrize("statement", ["UPDATE audit_auditentry SET reason = 'x'", "DELETE FROM audit_auditentry"])
def test_the_database_refuses_to_change_or_remove_entries(statement):
    write(1)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)
    assert AuditEntry.objects.count() == 1


@pytest.mark.django_db
def test_secrets_are_left_out_by_name():
    entry = record(actor=ACTOR, action="key.new", noun="key", object_id=1, now=NOW, after={"secret": "s", "name": "n"})
    assert entry.after == {"name": "n"}


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_is_refused():
    with pytest.raises(RuntimeError, match="transaction"):
        write(1)


@pytest.mark.django_db(transaction=True)
def test_concurrent_writers_take_turns_in_the_chain():
    def writer(number: int) -> None:
        with transaction.atomic():
            write(number)
        connection.close()

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check = verify_chain()
    assert (check.entries, check.broken_at) == (8, None)


@pytest.mark.django_db(transaction=True)
def test_nobody_adds_an_entry_while_the_log_is_held_and_it_is_given_back_before_the_transaction_ends():
    with transaction.atomic():
        first = write(1)
    added = threading.Event()

    def writer() -> None:
        with transaction.atomic():
            write(2)
        added.set()
        connection.close()

    thread = threading.Thread(target=writer)
    with transaction.atomic():
        with none_recorded() as through:
            thread.start()
            assert not added.wait(0.3)
            assert through == first.pk
            assert AuditEntry.objects.count() == 1
        assert added.wait(30)
    thread.join()


@pytest.mark.django_db(transaction=True)
def test_the_log_is_given_back_when_the_reading_fails():
    with transaction.atomic():
        with pytest.raises(DatabaseError, match="division by zero"), none_recorded(), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        write(1)
    assert verify_chain().entries == 1


@pytest.mark.django_db(transaction=True)
def test_the_log_is_held_only_inside_a_transaction():
    with pytest.raises(transaction.TransactionManagementError, match="inside a transaction"), none_recorded():
        pass


def test_changes_names_only_what_differs():
    assert changes({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ({"b": 2}, {"b": 3})
