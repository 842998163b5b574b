"""A client that says "my request was refused, why" gets an answer, also where no explanation was kept."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.agent.request_ids import new_request_id
from controlplane.audit.actors import Actor
from controlplane.core.admission import CHECK_REASONS
from controlplane.core.period import to_us
from controlplane.core.reasons import Reason
from controlplane.live.check_labels import LABELS, readable
from controlplane.tenants import key_actions
from controlplane.usage.models import DecisionSample, RefusalMinute
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def minute(installation):
    return (timezone.now() - timedelta(minutes=5)).replace(second=0, microsecond=0)


@pytest.fixture
def place(minute):
    """A pool, a class and two tenants of which requests are refused."""

    class Place:
        pool, chat = factories.pool(), factories.workload_class()
        acme, globex = factories.tenant("acme"), factories.tenant("globex")

    return Place


def request_id(at) -> uuid.UUID:
    return uuid.UUID(new_request_id(to_us(at)))


def refused(place, minute, tenant, count, *, reason=Reason.RATE_LIMIT, explained=0):
    RefusalMinute.objects.create(
        minute=minute, pool_id=place.pool.pk, tenant_id=tenant.pk, class_id=place.chat.pk, reason=reason.code,
        count=count,
    )  # fmt: skip
    ids = [request_id(minute + timedelta(seconds=1 + number)) for number in range(explained)]
    for one in ids:
        DecisionSample.objects.create(
            request_id=one, at=minute + timedelta(seconds=30), agent_id=1, pool_id=place.pool.pk, tenant_id=tenant.pk,
            key_id=1, class_id=place.chat.pk, decision="reject", reason=reason.code,
            checks=[["class_rate", "0.3", "1", False]],
        )  # fmt: skip
    return ids


def page(person, one):
    return person.get(reverse("request", args=[one]))


def rest(person, one):
    return person.get(f"/api/v1/requests/{one}/")


def test_an_id_without_an_explanation_tells_the_kinds_of_its_minute(place, minute):
    explained = refused(place, minute, place.acme, 130, explained=3)
    unexplained = request_id(minute + timedelta(seconds=59.9))
    oncall = factories.person("oncall")
    text = page(oncall, unexplained).content.decode()
    assert "one of 127 such refusals" in text and "rate_limit" in text and "its explanation was not kept" in text
    assert all(str(one) in text for one in explained)
    said = rest(oncall, unexplained).json()
    assert (said["state"], said["request_id"]) == ("counted", str(unexplained))
    (kind,) = said["refusals"]
    assert (kind["tenant"], kind["class"], kind["reason"], kind["status"]) == ("acme", "chat", "rate_limit", 429)
    assert (kind["count"], kind["unexplained"]) == (130, 127)
    assert kind["explained_examples"] == [str(one) for one in explained]


def test_an_explained_one_is_told_in_full(place, minute):
    (one,) = refused(place, minute, place.acme, 1, explained=1)
    said = rest(factories.person("viewer"), one).json()
    assert (said["state"], said["reason"], said["tenant"]) == ("refused", "rate_limit", "acme")
    assert said["checks"] == [{"name": LABELS["class_rate"], "value": "0.3", "limit": "1", "held": False}]


def test_a_kind_of_which_every_refusal_is_explained_is_none_of_them(place, minute):
    refused(place, minute, place.acme, 2, explained=2)
    assert page(factories.person("oncall"), request_id(minute)).status_code == 404


def test_another_minute_a_later_time_and_another_kind_of_id_are_nothing(place, minute):
    refused(place, minute, place.acme, 9)
    oncall = factories.person("oncall")
    for one in (
        request_id(minute - timedelta(milliseconds=1)),
        request_id(minute + timedelta(minutes=1)),
        request_id(timezone.now() + timedelta(hours=1)),
        uuid.uuid4(),
    ):
        assert (page(oncall, one).status_code, rest(oncall, one).status_code) == (404, 404)


def test_a_tenants_member_sees_its_own_counts_only(place, minute):
    refused(place, minute, place.acme, 9, explained=1)
    refused(place, minute, place.globex, 500, reason=Reason.QUEUE_FULL)
    member = factories.person("tenant", tenant_row=place.acme)
    text = page(member, request_id(minute)).content.decode()
    assert "one of 8 such refusals" in text
    assert "globex" not in text and "queue_full" not in text
    said = rest(member, request_id(minute)).json()
    assert [kind["tenant"] for kind in said["refusals"]] == ["acme"]


def test_a_key_looks_its_own_tenants_requests_up(place, minute):
    (own,) = refused(place, minute, place.acme, 9, explained=1)
    (foreign,) = refused(place, minute, place.globex, 7, explained=1)
    made = key_actions.create_key(
        tenant_id=place.acme.pk, name="nightly", classes=[place.chat.slug], default_class=place.chat.slug,
        actor=Actor(id=None, name="ada", role="admin"), now=timezone.now(),
    )  # fmt: skip
    client = Client(headers={"Authorization": f"Bearer {made.secret}"})
    assert rest(client, own).json()["state"] == "refused"
    assert rest(client, foreign).json().get("state") != "refused"
    assert rest(Client(headers={"Authorization": "Bearer fb_nobody"}), own).status_code == 401


def test_a_foreign_request_reads_like_an_id_that_never_was(place, minute):
    (foreign,) = refused(place, minute, place.globex, 7, explained=1)
    member = factories.person("tenant", tenant_row=place.acme)
    never = request_id(minute + timedelta(seconds=2))
    assert (page(member, foreign).status_code, page(member, never).status_code) == (404, 404)
    refused(place, minute, place.acme, 4)
    theirs, none = page(member, foreign), page(member, never)
    assert (theirs.status_code, none.status_code) == (200, 200)
    assert "globex" not in theirs.content.decode()
    first, second = rest(member, foreign).json(), rest(member, never).json()
    first.pop("request_id"), second.pop("request_id")
    assert first == second


def test_every_check_has_a_name_for_people():
    assert set(LABELS) == set(CHECK_REASONS)


def test_money_is_read_in_the_currency():
    assert readable("budget_nanos", "1500000000") == "1.50"
    assert readable("budget_nanos", "") == ""
    assert readable("queue_depth", "1500000000") == "1500000000"
