"""Two people for a posting by hand: the database holds it, through every door, and two checkers at once post once."""

from datetime import UTC, datetime

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.ledger import proposals
from controlplane.ledger.models import LedgerEvent, Proposal, Transfer
from controlplane.ledger.posting import balances
from tests import factories
from tests.tenants.test_api import send
from tests.threads import at_once

NOW = datetime(2026, 12, 2, 9, 0, tzinfo=UTC)
FIN = Actor(id=None, name="fin", role="finance")
BOSS = Actor(id=None, name="boss", role="finance")
CHIEF = Actor(id=None, name="chief", role="admin")
NOTE = {"period": "2026-11", "tenant": "acme", "class_": "chat", "amount_nanos": 5, "reason": "outage"}


def propose(**values):
    return proposals.propose_credit_note(**{**NOTE, **values}, actor=FIN, now=NOW)


def approve(row, actor):
    try:
        return proposals.approve(row.pk, actor=actor, now=NOW, reason=f"seen by {actor.name}")
    except ValidationError as error:
        return error


@pytest.fixture
def acme(db):
    factories.installation()
    return factories.tenant("acme")


@pytest.mark.parametrize(
    "values",
    [
        {"state": "posted"},
        {"state": "posted", "decided_by": "boss"},
        {"state": "posted", "decided_by": "fin"},
        {"decided_by": "fin"},
    ],
)
def test_the_database_takes_no_posting_without_a_second_person(values, acme):
    row = propose()
    with pytest.raises(IntegrityError), transaction.atomic():
        Proposal.objects.filter(pk=row.pk).update(**values)


def test_the_maker_may_take_it_back_and_not_post_it(acme):
    row = propose()
    assert isinstance(approve(row, FIN), ValidationError) and not LedgerEvent.objects.exists()
    done = proposals.reject(row.pk, actor=FIN, now=NOW, reason="mistake")
    assert (done.state, done.decided_by) == ("rejected", "")
    assert isinstance(approve(row, BOSS), ValidationError) and not LedgerEvent.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_two_checkers_at_once_post_once_and_one_of_them_is_named():
    factories.installation()
    factories.tenant("acme")
    row = propose()
    found = at_once([lambda who=who: approve(row, who) for who in (BOSS, CHIEF, BOSS, CHIEF)])
    assert {one.state for one in found} == {"posted"} and len({one.decided_by for one in found}) == 1
    assert balances() == {"billed:acme:chat": -5, "revenue:chat": 5} and Transfer.objects.count() == 1
    assert AuditEntry.objects.filter(action="credit_note.approve").count() == 1


@pytest.mark.django_db(transaction=True)
def test_of_a_checker_and_a_maker_who_takes_it_back_one_wins():
    factories.installation()
    factories.tenant("acme")
    for _ in range(4):
        row = propose()

        def take_back(row=row):
            try:
                return proposals.reject(row.pk, actor=FIN, now=NOW, reason="mistake")
            except ValidationError as error:
                return error

        at_once([lambda row=row: approve(row, BOSS), take_back])
        row.refresh_from_db()
        assert (row.state == "posted") == LedgerEvent.objects.filter(key=row.event_key).exists()
        assert row.decided_by == ("boss" if row.state == "posted" else "")


@pytest.mark.parametrize("door", ["page", "rest"])
def test_every_door_asks_for_another_person(door, acme):
    fin, boss = factories.person("finance", name="fin"), factories.person("finance", name="boss")
    row = propose()

    def through(client):
        if door == "page":
            return client.post(f"/finance/proposals/{row.pk}/", {"approve": "1", "reason": "seen"})
        return send(client, "post", f"/api/v1/proposals/{row.pk}/approve/", {"reason": "seen"})

    assert through(fin).status_code in (302, 400) and not LedgerEvent.objects.exists()
    assert through(factories.person("oncall")).status_code == 403
    assert through(boss).status_code in (200, 302) and LedgerEvent.objects.get().created_by == "boss"
    through(boss)
    assert Transfer.objects.count() == 1
