"""The audit page: filters, entries, CSV, and the command that checks the chain."""

import csv
import io
import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.audit.queries import vocabulary
from tests import factories

ADA, BOB = (Actor(id=None, name=name, role="admin", request_id="r-1") for name in ("ada", "bob"))


@pytest.fixture
def entries(people):
    made = []
    for number, (actor, noun, tenant) in enumerate(
        [(ADA, "tenant", "acme"), (BOB, "budget", "acme"), (ADA, "key", "x")]
    ):
        made.append(
            record(
                actor=actor,
                action=f"{noun}.edit",
                noun=noun,
                object_id=number,
                tenant_slug=tenant,
                now=factories.NOW.replace(day=20 + number),
                before={"limit_nanos": 1_500_000_000},
                after={"limit_nanos": 2_000_000_000, "name": "=1+1"},
                reason=f"reason {number}",
            )
        )
    return made


@pytest.mark.parametrize(
    "query,found",
    [
        ("", ["reason 0", "reason 1", "reason 2"]),
        ("actor=AD", ["reason 0", "reason 2"]),
        ("noun=budget", ["reason 1"]),
        ("action=key.edit", ["reason 2"]),
        ("tenant=acme", ["reason 0", "reason 1"]),
        ("since=2026-11-21", ["reason 1", "reason 2"]),
        ("until=2026-11-21", ["reason 0", "reason 1"]),
        ("since=2026-11-21&until=2026-11-21", ["reason 1"]),
        ("noun=nothing", []),
    ],
)
def test_filters(query, found, people, entries):
    page = people["viewer"].get(f"/audit/?{query}").content.decode()
    assert [text for text in ("reason 0", "reason 1", "reason 2") if text in page] == found


def test_a_date_that_is_none_is_a_clear_error(people, entries):
    response = people["viewer"].get("/audit/?since=yesterday")
    assert response.status_code == 400 and "From is not a date" in response.content.decode()


def test_an_entry_shows_before_and_after_as_money(people, entries):
    page = people["viewer"].get(f"/audit/{entries[1].pk}/").content.decode()
    assert "1.50" in page and "2.00" in page and "bob" in page and bytes(entries[1].hash).hex() in page
    assert people["viewer"].get("/audit/999999/").status_code == 404


def test_the_csv_has_a_line_a_field_and_no_formula(people, entries):
    text = b"".join(people["viewer"].get("/audit/?noun=budget&format=csv").streaming_content).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["field"], row["before"], row["after"]) for row in rows] == [
        ("limit", "1.50", "2.00"), ("name", "", "'=1+1")
    ]  # fmt: skip


def test_the_lists_queries_do_not_grow(people, entries, django_assert_num_queries):
    with django_assert_num_queries(6):
        people["viewer"].get("/audit/")
    for number in range(30):
        record(actor=ADA, action="tenant.edit", noun="tenant", object_id=number, now=factories.NOW, after={"a": 1})
    with django_assert_num_queries(6):
        people["viewer"].get("/audit/")


def test_the_filters_offer_what_occurs(people, entries):
    for number in range(3):
        record(actor=ADA, action="a.first", noun="zebra", object_id=number, now=factories.NOW, after={"a": 1})
    pairs = set(AuditEntry.objects.values_list("noun", "action"))
    assert vocabulary() == {"nouns": sorted({n for n, _ in pairs}), "actions": sorted({a for _, a in pairs})}
    assert len(pairs) == 4


@pytest.mark.django_db
def test_an_empty_log_offers_nothing():
    assert vocabulary() == {"nouns": [], "actions": []}


@pytest.mark.django_db
def test_verify_says_that_the_chain_holds(people, entries):
    out = StringIO()
    call_command("audit", "verify", stdout=out)
    assert "The chain holds: 3 entries." in out.getvalue()
    out = StringIO()
    call_command("audit", "verify", "--json", stdout=out)
    told = json.loads(out.getvalue())
    assert told == {
        "entries": 3, "broken_at": None, "holds": True, "anchor_found": None,
        "last_id": entries[-1].pk, "last_hash": bytes(entries[-1].hash).hex(),
    }  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_verify_fails_where_the_log_was_changed(people):
    with transaction.atomic():
        entry = record(actor=ADA, action="a.b", noun="a", object_id=1, now=factories.NOW)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE audit_auditentry DISABLE TRIGGER USER")
        cursor.execute("UPDATE audit_auditentry SET actor_name = 'nobody'")
        cursor.execute("ALTER TABLE audit_auditentry ENABLE TRIGGER USER")
    with pytest.raises(CommandError, match=f"breaks at entry {entry.pk}") as caught:
        call_command("audit", "verify", stdout=StringIO())
    assert caught.value.returncode == 1
