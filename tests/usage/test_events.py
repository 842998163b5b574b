"""CloudEvents of other gateways: a result for each, once by source and id, by whom it may be sent."""

import copy
from datetime import timedelta

import pytest
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from controlplane.usage.events import EVENTS_MOST, EventResult, event_row
from controlplane.usage.models import ImportedUsage
from tests import factories

ADDRESS = "/api/v1/usage/events/"


def event(id="e-1", **changes):
    base = {
        "specversion": "1.0", "id": id, "source": "gateway/eu-1", "type": "llm.request", "subject": "acme",
        "time": "2026-10-01T10:00:00Z", "data": {"prompt_tokens": 10, "output_tokens": 4, "model": "m"},
    }  # fmt: skip
    return {**base, **changes}


@pytest.fixture
def send(people):
    return lambda events, **more: people["admin"].post(
        ADDRESS, events, content_type=more.pop("content_type", "application/cloudevents-batch+json"), **more
    )


def test_each_event_has_a_result_and_counts_once(send):
    first = send([event(), event("e-2"), event()]).json()
    assert [row["result"] for row in first["results"]] == ["stored", "stored", "duplicate"]
    again = send([event(), event("e-2", data={"prompt_tokens": 11, "output_tokens": 4, "model": "m"})]).json()
    assert (again["stored"], again["duplicate"], again["conflict"]) == (0, 1, 1)
    assert ImportedUsage.objects.get(external_id="e-2").prompt_tokens == 10
    assert send([event(source="gateway/us-1")]).json()["stored"] == 1


def test_one_tenants_event_never_hides_another_tenants_of_the_same_id(send):
    factories.tenant("globex")
    other = event(subject="globex", data={"prompt_tokens": 99, "output_tokens": 1, "model": "m"})
    answer = send([event(), other, event()]).json()
    assert [row["result"] for row in answer["results"]] == ["stored", "stored", "duplicate"]
    kept = ImportedUsage.objects.values_list("tenant_slug", "prompt_tokens").order_by("tenant_slug")
    assert list(kept) == [("acme", 10), ("globex", 99)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"specversion": "0.3"}, "specversion"),
        ({"id": ""}, '"id"'),
        ({"id": "x\u0000"}, '"id"'),
        ({"source": 7}, '"source"'),
        ({"subject": "nobody"}, "no tenant"),
        ({"subject": "a\u0000b"}, '"subject"'),
        ({"time": "yesterday"}, "time"),
        ({"time": None}, "time"),
        ({"data": None}, '"data"'),
        ({"data": {"prompt_tokens": -1, "output_tokens": 1}}, "tokens"),
        ({"data": {"prompt_tokens": 1.5, "output_tokens": 1}}, "whole"),
        ({"data": {"prompt_tokens": True, "output_tokens": 1}}, "whole"),
        ({"data": {"prompt_tokens": None, "output_tokens": 1}}, ""),
        ({"data": {"prompt_tokens": 1}}, "output_tokens"),
        ({"data": {"prompt_tokens": 1, "output_tokens": 1, "cached_tokens": 2}}, "cached"),
        ({"data": {"prompt_tokens": 1, "output_tokens": 1, "cost": 2}}, "cost"),
        ({"id": "\ud800"}, '"id"'),
        ({"subject": "\ud800"}, '"subject"'),
        ({"data": {"prompt_tokens": 1, "output_tokens": 1, "\ud800": 2}}, "unknown fields: ?"),
        ({"data": {"prompt_tokens": 1, "output_tokens": 1, "model": "\ud800"}}, "printable"),
        ({"data": {"prompt_tokens": 1, "output_tokens": 1, "model": "a\u0000"}}, "printable"),
    ],
)
def test_a_bad_event_is_refused_alone(send, changes, words):
    body = send([event("good"), event(**changes)]).json()
    assert body["stored"] == 1 and body["refused"] == 1
    assert words in body["results"][1]["reason"]


def test_events_from_the_future_are_refused(send):
    ahead = (timezone.now() + timedelta(hours=1)).isoformat()
    assert "future" in send([event(time=ahead)]).json()["results"][0]["reason"]


def test_what_is_no_batch_is_refused_whole(send):
    assert send([]).status_code == 400
    assert send([event(str(n)) for n in range(EVENTS_MOST + 1)]).status_code == 400
    assert send("{broken", content_type="application/json").status_code == 400
    assert send([event()], content_type="text/plain").status_code == 415
    assert send(event("single"), content_type="application/cloudevents+json").json()["stored"] == 1
    assert send([None, 3]).json()["refused"] == 2


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda c: st.lists(c, max_size=3)))
def test_no_value_of_a_field_is_more_than_a_refusal(value):
    now = timezone.now()
    for field in ("id", "source", "type", "subject", "time", "data", "specversion"):
        changed = copy.deepcopy(event(**{field: value}))
        try:
            event_row(changed, frozenset({"acme"}), index=0, now=now)
        except ValueError:
            continue
    assert EventResult("refused")


def test_only_who_may_write_usage_sends_it(client, people):
    for role, status in (("viewer", 403), ("finance", 403), ("oncall", 403), ("tenant", 403), ("admin", 200)):
        assert people[role].post(ADDRESS, [event(role)], content_type="application/json").status_code == status
    assert client.post(ADDRESS, [event("nobody")], content_type="application/json").status_code in (401, 403)
    assert ImportedUsage.objects.count() == 1


def test_a_call_that_two_layers_of_a_gateway_told_counts_once(send):
    """A bridge logs the call under its own type and the call behind it under another: one id, one use, one linked."""
    told = send([event(type="llm.responses"), event(type="llm.chat"), event(type="llm.chat")]).json()
    assert [row["result"] for row in told["results"]] == ["stored", "duplicate", "duplicate"]
    assert (told["stored"], ImportedUsage.objects.count()) == (1, 1)
    assert ImportedUsage.objects.get().external_id == "e-1"
