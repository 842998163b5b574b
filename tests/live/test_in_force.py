"""What is remembered of contracts: the same as is read, until a row of it changes, and never past an instant."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.contracts.queries import standings
from controlplane.live.in_force import in_force
from tests import factories
from tests.live.scene import contract_row

pytestmark = pytest.mark.django_db


@pytest.fixture
def chat(installation):
    return factories.workload_class()


@pytest.fixture
def acme(installation):
    return factories.tenant("acme")


@pytest.fixture
def row(chat, acme, now):
    return contract_row("chat-acme", chat, now, tenant=acme)[0]


def read(now):
    """What nobody remembered."""
    return standings(Contract.objects.filter(archived_at=None).order_by("slug"), now)


def said(rows):
    return [
        (
            row.contract.slug, row.contract.name, row.contract.workload_class.slug,
            row.contract.tenant and (row.contract.tenant.slug, row.contract.tenant.name),
            row.in_force and (row.in_force.number, row.in_force.target_ppm), row.next and row.next.number,
        )
        for row in rows
    ]  # fmt: skip


def renamed(row, chat, acme, now):
    Contract.objects.filter(pk=row.pk).update(name="Another")


def archived(row, chat, acme, now):
    Contract.objects.filter(pk=row.pk).update(archived_at=now)


def added(row, chat, acme, now):
    contract_row("another", chat, now)


def promised_anew(row, chat, acme, now):
    ContractVersion.objects.create(
        contract=row, number=2, effective_from=now - timedelta(days=1), target_ppm=950_000, created_by="x",
        created_at=now,
    )  # fmt: skip


def promised_twice(row, chat, acme, now):
    """In one transaction, whose rows all have its number."""
    for target in (960_000, 970_000):
        ContractVersion.objects.filter(contract=row).update(target_ppm=target)
        assert said(in_force(now)) == said(read(now))


def taken_back(row, chat, acme, now):
    ContractVersion.objects.filter(contract=row).delete()


def of_another_class(row, chat, acme, now):
    type(chat).objects.filter(pk=chat.pk).update(slug="renamed")


def of_another_tenant(row, chat, acme, now):
    type(acme).objects.filter(pk=acme.pk).update(name="Acme of the north")


CHANGES = [
    renamed, archived, added, promised_anew, promised_twice, taken_back, of_another_class, of_another_tenant,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen_at_once(row, chat, acme, now, change):
    before = said(in_force(now))
    assert before == said(read(now))
    change(row, chat, acme, now)
    assert said(in_force(now)) == said(read(now)) != before


def test_rows_that_did_not_change_are_looked_at_by_one_statement(row, now):
    first = in_force(now)
    with CaptureQueriesContext(connection) as statements:
        again = in_force(now + timedelta(seconds=1))
    assert said(again) == said(first)
    assert len(statements) == 1


def test_a_version_comes_into_force_at_its_instant_and_not_before(row, now):
    begins = now + timedelta(seconds=5)
    ContractVersion.objects.create(
        contract=row, number=2, effective_from=begins, target_ppm=950_000, created_by="x", created_at=now
    )
    for at in (now, begins - timedelta(microseconds=1), begins, now, begins + timedelta(days=1)):
        assert said(in_force(at)) == said(read(at)), at


def test_only_those_that_were_asked_for_are_answered(row, chat, now):
    contract_row("another", chat, now)
    assert [one.contract.slug for one in in_force(now)] == ["another", "chat-acme"]
    assert [one.contract.slug for one in in_force(now, Contract.objects.filter(tenant=None))] == ["another"]
    in_force(now).clear()
    assert len(in_force(now)) == 2, "what was answered is the caller's own list"
