"""Asking an agent for a new key: the action, the page, REST and the command line, by role."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.fleet import keys
from controlplane.fleet.models import Agent
from controlplane.wire.signing import key_id
from tests import factories

ADA = Actor(id=None, name="ada", role="admin")
NEW, OTHER = b"n" * 32, b"o" * 32


@pytest.fixture
def agent(installation):
    return factories.agent(factories.pool("chat"))


def ask(agent, now):
    return keys.ask_for_new_key(agent_id=agent.pk, actor=ADA, now=now, reason="yearly")


def test_asking_twice_is_asking_once(agent, now):
    assert ask(agent, now).key_rotation_asked_at == now
    assert ask(agent, now + timedelta(hours=1)).key_rotation_asked_at == now
    assert AuditEntry.objects.filter(action="agent.rotate_key").count() == 1


def test_a_reason_is_needed_and_a_retired_agent_has_no_key(agent, now):
    with pytest.raises(ValidationError):
        keys.ask_for_new_key(agent_id=agent.pk, actor=ADA, now=now, reason=" ")
    Agent.objects.update(state="retired")
    with pytest.raises(ValidationError, match="retired"):
        ask(agent, now)


def test_the_posted_key_is_kept_beside_the_present_one_until_it_has_signed(agent, now):
    old = bytes(agent.public_key)
    with pytest.raises(keys.KeyRefused, match="No new key was asked for"):
        keys.take_new_key(agent_id=agent.pk, public_key=NEW, now=now)
    ask(agent, now)
    until = keys.take_new_key(agent_id=agent.pk, public_key=NEW, now=now)
    assert until == now + timedelta(hours=24)
    later = now + timedelta(hours=2)
    assert keys.take_new_key(agent_id=agent.pk, public_key=NEW, now=later) == until, "posted again: the same window"
    with pytest.raises(keys.KeyRefused, match="Another key"):
        keys.take_new_key(agent_id=agent.pk, public_key=OTHER, now=later)
    assert not keys.complete_rotation(agent_id=agent.pk, public_key=OTHER, now=later)
    assert bytes(Agent.objects.get().public_key) == old
    assert keys.complete_rotation(agent_id=agent.pk, public_key=NEW, now=later)
    assert not keys.complete_rotation(agent_id=agent.pk, public_key=NEW, now=later), "once"
    state = keys.key_state(Agent.objects.get())
    assert (state.key_id, state.since, state.asked_at, state.next_key_id) == (key_id(NEW), later, None, None)


def test_only_an_admin_rotates_and_everybody_sees_how_far_it_is(agent, people):
    url, page = reverse("agent-rotate-key", args=[agent.pk]), reverse("agent", args=[agent.pk])
    for role in ("oncall", "finance", "viewer", "tenant"):
        assert people[role].post(url, {"reason": "x"}).status_code == 403, role
    assert "Rotate key" not in people["oncall"].get(page).content.decode()
    assert "Rotate key" in people["admin"].get(page).content.decode()
    people["admin"].post(url, {"reason": ""})
    assert Agent.objects.get().key_rotation_asked_at is None, "it needs a reason"
    assert people["admin"].post(url, {"reason": "yearly"}).status_code == 302
    assert Agent.objects.get().key_rotation_asked_at is not None
    assert AuditEntry.objects.get(action="agent.rotate_key").reason == "yearly"
    seen = people["viewer"].get(page).content.decode()
    assert key_id(bytes(agent.public_key)) in seen and "has not posted its new key yet" in seen
    keys.take_new_key(agent_id=agent.pk, public_key=NEW, now=timezone.now())
    seen = people["viewer"].get(page).content.decode()
    assert key_id(NEW) in seen and "Both keys are good" in seen


def test_every_form_of_the_page_can_be_sent(agent, people):
    page = people["admin"].get(reverse("agent", args=[agent.pk])).content.decode()
    forms = [form.partition("</form>")[0] for form in page.split('<form method="post"')[1:]]
    assert len(forms) >= 3
    assert [form[:40] for form in forms if 'name="csrfmiddlewaretoken"' not in form] == []


def test_rest_asks_and_tells(agent, people):
    url = f"/api/v1/agents/{agent.pk}/rotate-key/"
    assert people["oncall"].post(url, {"reason": "x"}, content_type="application/json").status_code == 403
    assert people["admin"].post(url, {}, content_type="application/json").status_code == 400
    answer = people["admin"].post(url, {"reason": "yearly"}, content_type="application/json")
    assert answer.status_code == 200, answer.content
    key = answer.json()["key"]
    assert key["id"] == key_id(bytes(agent.public_key)) and key["rotation_asked_at"] and key["next_id"] is None


def test_the_command_line_asks_too(agent, capsys):
    call_command("agent", "rotate-key", agent.name, "--reason", "yearly", "--json")
    assert '"key_rotation_asked_at"' in capsys.readouterr().out
    call_command("agent", "rotate-key", agent.name, "--reason", "yearly")
    assert "makes a new key with its next report" in capsys.readouterr().out
    assert Agent.objects.get().key_rotation_asked_at is not None
