"""Draining an agent and suspending a tenant: their effect first, their measure afterwards, by role."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse

from controlplane.audit.models import AuditEntry
from controlplane.core.reasons import Reason
from controlplane.fleet.models import Agent, AgentLive
from controlplane.jobs.models import Job
from controlplane.live import acts, effects
from controlplane.tenants.models import Tenant
from controlplane.usage.models import RefusalMinute
from tests.factories import person


def lines(effect) -> dict[str, tuple[str, ...]]:
    return {figure.label: figure.values for figure in effect.figures}


def told(entry, now) -> dict[str, str]:
    return {line.label: line.measured for line in acts.story(entry, now).lines}


def test_a_drain_is_shown_against_load_floor_and_slack(scene, moment):
    found = effects.of_drain(scene.agents[0], moment)
    said = lines(found)
    assert said["Requests that run on it"] == ("36", "0") and said["Requests that wait on it"] == ("431", "0")
    assert said["Interactive floor, slots"] == ("4", "2")
    assert said["Slots that serve interactive"] == ("4", "2")
    assert said["Interactive load, limit 0.70"] == ("0.59", "1.19")
    assert next(row for row in found.figures if row.label.startswith("Interactive load")).grade == "risk"
    assert "Left in chat-70b: chat-a2." in found.said
    assert "Its lent slots are recalled: f1." in found.said
    AgentLive.objects.filter(agent=scene.agents[1]).update(reported_at=moment - timedelta(minutes=1))
    assert "No other agent of chat-70b serves" in effects.of_drain(scene.agents[0], moment).said[-1]


def test_a_drain_is_done_audited_and_measured(scene, moment):
    oncall = person("oncall")
    url = reverse("act-drain", args=[scene.agents[0].pk])
    assert oncall.post(url, {"reason": ""}).status_code == 422
    answer = oncall.post(url, {"reason": "kernel"})
    entry = AuditEntry.objects.filter(action="agent.drain").latest("id")
    assert answer.url.startswith(f"/acts/{entry.pk}/")
    assert entry.after["running"] == 36 and entry.after["load_expected"] == pytest.approx(9.5 / 8.0, abs=0.01)
    assert Agent.objects.get(pk=scene.agents[0].pk).drain_requested_at is not None
    assert told(entry, moment)["Told to the agent"] == "not yet"
    later = entry.at + timedelta(seconds=2)
    figures = {"slots": [], "classes": [{"running": 4, "depth": 0, "arrivals_per_s": 0.0}], "tenants": []}
    AgentLive.objects.filter(agent=scene.agents[0]).update(reported_at=later, figures=figures)
    found = told(entry, later)
    assert (found["Told to the agent"], found["Requests that run on it"]) == ("yes", "4")
    assert acts.story(entry, later).open
    page = person("viewer").get(answer.url).content.decode()
    assert "from 36 to 0" in page and "kernel" in page


def test_a_suspension_counts_what_runs_waits_and_is_due(scene, moment):
    Job.objects.create(
        tenant=scene.acme, workload_class=scene.bulk, pool=scene.pool, items=500, items_completed=100,
        prompt_tokens=10, expected_output_tokens=10, created_by="test", created_at=moment,
        deadline=moment + timedelta(hours=3),
    )  # fmt: skip
    said = lines(effects.of_suspend(scene.acme, moment))
    assert said["Requests that run"] == ("22", "finished") and said["Requests that wait"] == ("415", "finished")
    assert said["Arriving, requests/s over 5 min"] == ("2.7", "refused")
    assert said["Open jobs"] == ("1", "1 held") and said["Their unfinished items"] == ("400", "400 held")
    assert "2 of 3 agents were heard" in effects.of_suspend(scene.acme, moment).said[1]


def test_a_suspension_is_done_audited_and_measured(scene, moment):
    oncall = person("oncall")
    answer = oncall.post(reverse("act-suspend", args=["acme"]), {"reason": "runaway loop", "next": "/tenants/acme/"})
    entry = AuditEntry.objects.filter(action="tenant.suspend").latest("id")
    assert answer.url.startswith(f"/acts/{entry.pk}/") and entry.after["running"] == 22
    tenant = Tenant.objects.get(slug="acme")
    assert tenant.state == "suspended"
    AgentLive.objects.filter(agent__in=scene.agents[:2]).update(live_number=tenant.live_number)
    RefusalMinute.objects.create(
        minute=entry.at.replace(second=0, microsecond=0), pool_id=scene.pool.pk, tenant_id=tenant.pk,
        class_id=scene.chat.pk, reason=Reason.TENANT_SUSPENDED.code, count=81,
    )  # fmt: skip
    found = told(entry, entry.at + timedelta(seconds=5))
    assert found["Agents that have it"] == "2 of 3"
    assert found["Refused since, by minute of arrival"] == "81"
    back = oncall.get(reverse("act-resume", args=["acme"])).content.decode()
    assert "Refused as suspended, last 15 min" in back and ">81<" in back
    oncall.post(reverse("act-resume", args=["acme"]), {"reason": "mended"})
    assert Tenant.objects.get(slug="acme").state == "active"


@pytest.mark.parametrize("name", ["act-drain", "act-undrain", "act-suspend", "act-resume"])
def test_everybody_of_the_staff_sees_the_effect_and_responders_act(scene, name):
    url = reverse(name, args=[scene.agents[0].pk if "drain" in name else "acme"])
    for role, sees, does in (("viewer", 200, 403), ("finance", 200, 403), ("oncall", 200, 422), ("admin", 200, 422)):
        client = person(role)
        page = client.get(url)
        assert page.status_code == sees
        assert (b"An admin or on-call does it" in page.content) == (does == 403)
        assert client.post(url, {"reason": " "}).status_code == does
    own = person("tenant", tenant_row=scene.acme)
    assert own.get(url).status_code == 403


def test_what_is_no_act_has_no_page(scene):
    viewer = person("viewer")
    assert viewer.get(reverse("act", args=[10**6])).status_code == 404
    person("oncall").post(reverse("act-drain", args=[scene.agents[0].pk]), {"reason": "x"})
    AuditEntry.objects.latest("id")
    assert viewer.get(reverse("act-drain", args=[10**6])).status_code == 404
