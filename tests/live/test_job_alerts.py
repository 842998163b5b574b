"""Alerts about batch and about drift: raised with what explains them, resolved, raised again."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from controlplane.alerts import actions
from controlplane.alerts.models import Alert
from controlplane.audit.actors import Actor
from controlplane.budgets.models import Budget
from controlplane.core.batch_items import ItemState
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.fleet.models import AgentLive, Pool
from controlplane.flex.models import PoolSample
from controlplane.jobs.item_partitions import create_day
from controlplane.jobs.models import Item, Job
from controlplane.live import alerting, readings
from controlplane.policy.models import Delivery, PolicyBundle, Revision, Rollout
from tests.live import scene as scenes

ADA = Actor(id=None, name="ada", role="oncall")
SOON = timedelta(seconds=20)


def look(at, kind) -> Alert | None:
    alerting.look(readings.read(at))
    return Alert.objects.filter(kind=kind, resolved_at=None).first()


@pytest.fixture
def job(scene, moment):
    """Makes a job of so many GPU hours, due in so many hours; the pool's two batch slots and one loan serve it."""

    def make(gpu_h: float, hours: float, **values) -> Job:
        per_item_us = 1_000 * scene.pool.prefill_us_per_token + 200 * scene.pool.decode_us_per_token
        return Job.objects.create(
            tenant=scene.acme, workload_class=scene.bulk, pool=scene.pool, name=values.pop("name", "nightly"),
            items=max(1, round(gpu_h * 3_600e6 / per_item_us)), prompt_tokens=1_000, expected_output_tokens=200,
            created_by="test", created_at=moment - timedelta(minutes=5), deadline=moment + timedelta(hours=hours),
            **values,
        )  # fmt: skip

    return make


def test_a_job_that_no_loan_can_save_is_a_ticket_with_its_causes(scene, moment, job):
    fits = job(3.0, 4.0, name="fits")
    assert look(moment, "deadline") is None
    late = job(100.0, 5.0, name="too much")
    alert = look(moment, "deadline")
    assert (alert.severity, alert.pool, alert.group) == ("ticket", "chat-70b", "pool:chat-70b")
    assert alert.title == "chat-70b: 1 job too slow for the deadline"
    causes = {cause["label"]: cause["value"] for cause in alert.causes}
    assert causes["Lent"] == "1 of 2 flex slots"
    assert causes["too much of acme"].startswith("slack −") and "GPU time left" in causes["too much of acme"]
    assert "fits of acme" not in causes and fits.pk != late.pk
    Job.objects.filter(pk=late.pk).update(state="cancelled")
    assert look(moment + SOON, "deadline") is None
    Job.objects.filter(pk=late.pk).update(state="running")
    assert look(moment + 2 * SOON, "deadline").pk != alert.pk, "seen again it is another alert"


def test_what_a_loan_would_mend_is_no_alert_until_the_loan_has_not_come(scene, moment, job):
    Pool.objects.filter(pk=scene.pool.pk).update(lend_hold_s=120)
    job(14.0, 4.0)  # three slots are too few, four are enough
    assert look(moment, "deadline") is None
    for second in range(0, 200, 10):
        scenes.sample(scene, moment + timedelta(seconds=second))
    PoolSample.objects.update(slack=-0.2)
    at = moment + timedelta(seconds=200)
    assert look(at - timedelta(seconds=30), "deadline") is None, "the loan may still come"
    assert look(at, "deadline") is not None, "short for its hold time and a loan's time beyond it"
    PoolSample.objects.filter(at__gt=moment + timedelta(seconds=100)).update(slack=0.1)
    assert look(at + SOON, "deadline") is None


def test_a_frozen_band_cannot_mend_it_and_is_named_first(scene, moment, job):
    job(14.0, 4.0)
    Pool.objects.filter(pk=scene.pool.pk).update(
        frozen_since=moment, frozen_until=moment + timedelta(hours=1), frozen_by="grace"
    )
    alert = look(moment, "deadline")
    assert alert.causes[0]["label"] == "Lending is frozen"
    assert alert.causes[0]["value"] == f"by grace, until {moment + timedelta(hours=1):%H:%M} UTC"


def test_a_job_short_of_money_is_at_risk_before_its_deadline_and_the_budget_is_named(scene, moment, job):
    one = job(1.0, 30.0)
    Job.objects.filter(pk=one.pk).update(admission={"bound_nanos": 1_000 * one.items})
    assert look(moment, "deadline") is None
    paid = one.items // 4
    budget = Budget.objects.create(
        tenant=scene.acme, name="spring", period="month", zone="UTC", limit_nanos=1_000 * paid, hard=True,
        created_at=moment, updated_at=moment,
    )  # fmt: skip
    Job.objects.filter(pk=one.pk).update(deadline=window_at(load_zone("UTC"), Calendar.MONTH, moment).end)
    alert = look(moment, "deadline")
    assert alert.title == "chat-70b: 1 job short of money for the deadline"
    assert "slots" not in alert.text
    causes = {cause["label"]: cause["value"] for cause in alert.causes}
    assert list(causes) == ["Budget", "nightly of acme"], "slots are no cause"
    assert causes["Budget"].startswith("spring (month from") and "of acme: its next window begins" in causes["Budget"]
    assert causes["nightly of acme"].startswith(f"budget pays for {paid:,} of {one.items:,} items, due ")
    # with days left after the next window begins there is no risk; with minutes left there is
    Job.objects.filter(pk=one.pk).update(deadline=moment + timedelta(days=62))
    assert look(moment + SOON, "deadline") is None
    month = window_at(load_zone("UTC"), Calendar.MONTH, moment).end
    Job.objects.filter(pk=one.pk).update(deadline=month + timedelta(minutes=1))
    assert look(moment + 2 * SOON, "deadline") is not None
    Budget.objects.filter(pk=budget.pk).update(limit_nanos=1_000 * one.items)
    assert look(moment + 3 * SOON, "deadline") is None


def test_a_deadline_that_has_passed_is_told_until_the_job_ends(scene, moment, job):
    late = job(1.0, -0.5)
    alert = look(moment, "deadline")
    assert alert.title == "chat-70b: 1 job past the deadline and not done"
    assert alert.causes[-1]["value"].startswith("due 30") and "ago" in alert.causes[-1]["value"]
    Job.objects.filter(pk=late.pk).update(state="completed", finished_at=moment)
    assert look(moment + SOON, "deadline") is None


def test_parked_items_are_a_ticket_until_they_are_tried_again(scene, moment, job):
    one = job(1.0, 4.0, items_parked=12)
    alert = look(moment, "parked")
    assert alert.title == "12 items of 1 job parked in chat-70b"
    assert alert.causes[0]["value"].startswith("12 of ") and alert.url == f"/jobs/{one.uuid}/"
    actions.acknowledge(alert_id=alert.pk, note="asked the tenant", actor=ADA, now=moment)
    Job.objects.filter(pk=one.pk).update(items_parked=20)
    again = look(moment + SOON, "parked")
    assert again.pk == alert.pk and again.title.startswith("20 items") and again.acknowledged_at is not None
    actions.rearm(alert_id=alert.pk, note="not mine", actor=ADA, now=moment + SOON)
    assert look(moment + 2 * SOON, "parked").acknowledged_at is None
    Job.objects.filter(pk=one.pk).update(items_parked=0)
    assert look(moment + 3 * SOON, "parked") is None


def test_the_reason_that_parked_most_of_them_is_told(scene, moment, job):
    day = moment.date()
    with connection.cursor() as cursor:
        create_day(cursor, day)
    one = job(1.0, 4.0, items_parked=3, has_items=True, day=day)
    for line, reason in enumerate(("502 from the engine", "its lease ended", "502 from the engine"), start=1):
        Item.objects.create(
            day=day, job_id=one.pk, line=line, state=int(ItemState.PARKED), attempt=3, failures=3, prompt_tokens=1,
            fence=line, reason=reason,
        )  # fmt: skip
    assert look(moment, "parked").causes[0]["value"].endswith(": 502 from the engine")


@pytest.fixture
def asked(scene, moment):
    """Revision 42 went to both agents of the pool at `moment`; neither runs it yet."""
    revision = Revision.objects.create(
        number=42, digest="0" * 64, created_at=moment, created_by="ada", reason="test", configuration={},
        not_before=moment, accept_until=moment + timedelta(days=7),
    )  # fmt: skip
    PolicyBundle.objects.create(revision=revision, pool=scene.pool, digest="1" * 64, body=b"{}", signature=b"signed")
    rollout = Rollout.objects.create(revision=revision, state="running", requested_at=moment, requested_by="ada")
    for agent in scene.agents[:2]:
        Delivery.objects.create(rollout=rollout, agent=agent, digest="1" * 64, state="sent", sent_at=moment)
    return revision


def heard(scene, at, **values):
    AgentLive.objects.filter(agent__in=scene.agents[:2]).update(reported_at=at)
    AgentLive.objects.filter(agent=scene.agents[0]).update(**values)


def test_agents_that_do_not_run_what_they_were_asked_to_are_told_of_after_a_minute(scene, moment, asked):
    AgentLive.objects.filter(agent=scene.agents[1]).update(revision=42)
    before, at = moment + timedelta(seconds=59), moment + timedelta(seconds=60)
    heard(scene, before, revision=41)
    assert look(before, "drift") is None, "agents take some seconds"
    heard(scene, at)
    alert = look(at, "drift")
    assert (alert.severity, alert.word, alert.since) == ("ticket", "Drifting", moment)
    assert alert.title == "1 agent in chat-70b not on revision 42"
    assert alert.causes == [
        {"label": "chat-a1", "value": "runs revision 41, asked for 42", "url": f"/agents/{scene.agents[0].pk}/"}
    ]
    heard(scene, at + SOON, refused_revision=42, refused="wrong target")
    told = look(at + SOON, "drift")
    assert told.pk == alert.pk and told.word == "Refused"
    assert told.causes[0]["value"] == "runs revision 41, asked for 42; refused: wrong target"
    heard(scene, at + 2 * SOON, revision=42)
    assert look(at + 2 * SOON, "drift") is None
    heard(scene, at + 3 * SOON, revision=41)
    assert look(at + 3 * SOON, "drift").pk != alert.pk


def test_a_silent_agent_is_not_one_that_drifts(scene, moment, asked):
    AgentLive.objects.filter(agent__in=scene.agents[:2]).update(revision=41, reported_at=moment)
    assert look(moment + timedelta(minutes=5), "drift") is None
