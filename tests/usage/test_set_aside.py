"""The page of what was not counted: grouped, explained, linked, with examples that give no secret away."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.audit.models import AuditEntry
from controlplane.fleet.models import Agent
from controlplane.usage.models import AuditedHour, DuplicateRecord, Quarantine
from controlplane.usage.set_aside import CUT, MEANINGS, OTHER, aside_groups, shown
from controlplane.usage.validation import Fault
from tests import factories

NOW = datetime.now(UTC)
NUMBERS = count()
SLOT_FAULTS = ("unknown_slot", "foreign_slot", "over_a_minute", "negative_number", "unknown_tenant")
URL = "/finance/set-aside/"
SECRET = "sk-AbC123def456GHI789jkl012"


@pytest.fixture
def agent(world):
    return Agent.objects.create(
        name="gpu-7", pool=world.pool, state="active", public_key=b"k" * 32, epoch=1, enrolled_at=NOW
    )


def put_aside(agent, reason, *, ago=timedelta(minutes=5), records=1, payload=None):
    Quarantine.objects.create(
        at=NOW - ago, agent_id=agent and agent.pk, epoch=1, seq=1, reason=reason, records=records,
        payload=payload if payload is not None else {"records": [[1, 2, 3]]},
    )  # fmt: skip


def person(role):
    return factories.person(role, name=f"{role}-{next(NUMBERS)}")


def page(role, query=""):
    return person(role).get(URL + query)


def test_groups_are_by_reason_and_agent_with_the_latest_example(world, agent):
    put_aside(agent, "wrong_charge", ago=timedelta(days=2), records=3)
    put_aside(agent, "wrong_charge", records=4, payload={"records": [["latest"]]})
    put_aside(None, "wrong_charge", ago=timedelta(days=40))
    put_aside(None, "conflict", ago=timedelta(days=1))
    groups = aside_groups(NOW - timedelta(days=30))
    assert [(g.reason, g.agent, g.entries, g.records) for g in groups] == [
        ("wrong_charge", "gpu-7", 2, 7), ("conflict", "", 1, 1),
    ]  # fmt: skip
    assert groups[0].example == {"records": [["latest"]]}
    assert groups[0].last - groups[0].first > timedelta(days=1)
    assert aside_groups(NOW - timedelta(days=30), agent_id=agent.pk, reason="conflict") == []


def test_finance_sees_it_and_others_do_not(world, agent):
    put_aside(agent, "wrong_charge", payload={"token": SECRET, "note": f"Bearer {SECRET}", "records": [[1, "x"]]})
    for role in ("admin", "finance"):
        html = page(role).content.decode()
        assert "wrong_charge" in html and "gpu-7" in html
        assert MEANINGS["wrong_charge"].split(".")[0] in html
        assert SECRET not in html and CUT in html
    for role in ("oncall", "viewer"):
        assert page(role).status_code == 403


def test_nothing_and_no_match_say_so(world, agent):
    assert "Nothing was set aside" in page("finance").content.decode()
    put_aside(agent, "conflict")
    assert "Nothing fits these filters" in page("finance", "?reason=unreadable").content.decode()
    assert "gpu-7" in page("finance", f"?agent={agent.pk}&days=7").content.decode()


@pytest.mark.parametrize("query", ["?days=9999", "?agent=x", "?agent=99999999999999", "?days=-1"])
def test_filters_that_mean_nothing_are_passed_over(world, query):
    assert page("finance", query).status_code == 200


def test_copies_are_shown_with_their_amounts_and_a_late_audit_is_not_good_news(world, agent):
    AuditedHour.objects.create(hour=NOW - timedelta(hours=9), records=1, duplicates=0, audited_at=NOW)
    html = page("finance").content.decode()
    assert "The audit of copies is behind" in html and "Not known" in html and "Nothing was found twice" not in html
    AuditedHour.objects.create(hour=NOW - timedelta(minutes=90), records=1, duplicates=1, audited_at=NOW)
    DuplicateRecord.objects.create(
        request_id="01a227c5-9af1-7369-af9d-034add706e7c", attempt=1, hour=NOW, found_at=NOW, copies=2,
        agent_ids=[agent.pk, 999], same_content=False, first_received_at=NOW, ended_at=NOW, pool_id=world.pool.pk,
        tenant_id=world.tenant.pk, class_id=world.chat.pk, model_id=1, rate_version=1, outcome=1, prompt_tokens=1_000,
        cached_tokens=0, output_tokens=234, gpu_us=1, charge_prompt_nanos=1_000_000_000, charge_cached_nanos=0,
        charge_output_nanos=500_000_000, charge_gpu_nanos=0,
    )  # fmt: skip
    html = page("finance").content.decode()
    assert "is behind" not in html
    for text in ("01a227c5-9af1-7369-af9d-034add706e7c", "gpu-7, 999", "Differs", "1,234", "1.50"):
        assert text in html, text


def test_the_agents_page_links_to_it_for_those_who_may_see_it(world, agent):
    for role, sees in (("admin", True), ("finance", True), ("oncall", False)):
        html = person(role).get(f"/agents/{agent.pk}/").content.decode()
        assert (f"{URL}?agent={agent.pk}" in html) is sees


def test_a_decision_is_written_down_once_and_covers_what_was_seen(world, agent):
    put_aside(agent, "wrong_charge")
    put_aside(None, "wrong_charge")
    client = person("finance")
    [seen] = aside_groups(NOW - timedelta(days=1), agent_id=agent.pk)
    assert (seen.undecided, f'value="{seen.newest}"' in client.get(URL).content.decode()) == (1, True)
    put_aside(agent, "wrong_charge")  # comes after the page was read
    form = {"aside": "wrong_charge", "agent": agent.pk, "through": seen.newest, "reason": "agent updated"}
    for _ in range(2):
        assert client.post(URL, form).status_code == 302
    assert Quarantine.objects.filter(resolved_at__isnull=False).count() == 1
    entry = AuditEntry.objects.get(action="usage.decide")
    assert (entry.reason, entry.after["entries"]) == ("agent updated", 1)
    assert aside_groups(NOW - timedelta(days=1), agent_id=agent.pk)[0].undecided == 1


@pytest.mark.parametrize("form", [{"reason": " "}, {"through": "x"}, {"agent": "1;2"}, {"reason": "y" * 401}])
def test_a_decision_without_words_or_of_something_else_is_refused(world, agent, form):
    put_aside(agent, "conflict")
    given = {"aside": "conflict", "agent": agent.pk, "through": 2**40, "reason": "x"} | form
    assert person("finance").post(URL, given).status_code in (302, 400)
    assert not Quarantine.objects.filter(resolved_at__isnull=False).exists()
    assert person("oncall").post(URL, {**given, "reason": "x"}).status_code == 403


def test_the_list_asks_the_database_no_more_with_more_rows(world, agent, django_assert_max_num_queries):
    for number in range(30):
        put_aside(agent, f"reason_{number}")
    client = person("finance")
    client.get(URL)
    with django_assert_max_num_queries(18):
        client.get(URL)


def test_every_reason_of_the_code_has_a_sentence():
    texts = "".join(path.read_text() for path in Path("controlplane/exchange").glob("*.py"))
    known = "conflict|refused_by_database|reports_lost|lease_overspent|impossible_number|impossible_item"
    named = set(re.findall(f'"({known})"', texts))
    named |= set(re.findall(r'bad\["([a-z_]+)"\]', texts))
    named |= {
        f"slot_minute_{why}"
        for why in ("unknown_slot", "foreign_slot", "over_a_minute", "negative_number", "unknown_tenant")
    }
    named |= {fault.reason for fault in Fault if fault is not Fault.NONE}
    assert named == set(MEANINGS)
    assert OTHER not in MEANINGS.values()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"token": "x", "api_key": "y", "tokens": 3}, {"token": CUT, "api_key": CUT, "tokens": 3}),
        ({"Authorization": "z"}, {"Authorization": CUT}),
        ({"response": {"choices": ["private"]}, "body": None}, {"response": CUT, "body": None}),
        ([[1, 2], [3], [4], [5], [6]], [[1, 2], [3], [4], "(2 more)"]),
        (f"key {SECRET}, please", f"key {CUT}, please"),
        ("Basic dXNlcjpwYXNz", f"Basic {CUT}"),
        ("01a227c5-9af1-7369-af9d-034add706e7c", "01a227c5-9af1-7369-af9d-034add706e7c"),
        ("slot_minute_over_a_minute", "slot_minute_over_a_minute"),
        ("ab " * 100, ("ab " * 100)[:120] + "…"),
        ([7] * 50, [7] * 40 + ["(10 more)"]),
    ],
)
def test_examples_are_cut(given, expected):
    assert shown(given) == expected


_json = st.recursive(
    st.none() | st.integers() | st.text(max_size=160),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_json, st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP0123456789_-", min_size=24, max_size=60))
def test_no_example_shows_a_key_or_grows_without_bound(document, secret):
    secret = "K7" + secret
    told = repr(shown({"a": document, "b": f"x {secret} y", "c": [secret], "my_secret": secret}))
    assert secret not in told
    assert len(told) < 200_000
