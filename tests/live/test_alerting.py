"""What a reading shows becomes alerts: with causes, kept open while nobody sees, annotated for pages and sockets."""

from datetime import timedelta

import pytest

from controlplane.alerts import actions
from controlplane.alerts.models import Alert
from controlplane.audit.actors import Actor
from controlplane.contracts.models import Contract, ObjectiveMinute
from controlplane.fleet.models import AgentLive
from controlplane.flex.models import Grant
from controlplane.live import alerting, readings, topics

ADA = Actor(id=None, name="ada", role="oncall")


@pytest.fixture
def burning(scene, moment):
    """The scene's first latency contract with most of its last hour bad."""
    contract = Contract.objects.filter(versions__objective="latency").order_by("pk").first()
    version = contract.versions.order_by("-number").first()
    ObjectiveMinute.objects.filter(contract_version_id=version.pk).delete()
    start = moment.replace(second=0, microsecond=0)
    ObjectiveMinute.objects.bulk_create(
        ObjectiveMinute(
            contract_version_id=version.pk, pool_id=scene.pool.pk, minute=start - timedelta(minutes=ago),
            offered=400, admitted=400, successful=400, good=80, neutral=0, bad={"slow": 320},
        )
        for ago in range(370)
    )  # fmt: skip
    return contract


def burns(contract) -> list[Alert]:
    return list(Alert.objects.filter(contract=contract.slug, kind="burn", resolved_at=None).order_by("key"))


def test_a_burn_is_raised_with_its_likeliest_causes(scene, moment, burning):
    found = alerting.look(readings.read(moment))
    assert {alert.kind for alert in found.raised} >= {"burn"}
    alert = next(row for row in burns(burning) if row.severity == "page")
    assert alert.group == f"contract:{burning.slug}"
    labels = [cause["label"] for cause in alert.causes]
    assert labels[0] == "Worst stage"
    assert alert.causes[0]["value"].startswith("Queue, ")


def test_a_burn_stays_open_while_its_agents_are_silent(scene, moment, burning):
    alerting.look(readings.read(moment))
    before = {alert.pk for alert in burns(burning)}
    assert before
    AgentLive.objects.update(reported_at=moment - timedelta(hours=1))
    later = moment + timedelta(minutes=30)
    reading = readings.read(later)
    assert not [row for row in alerting.conditions(reading) if row["kind"] == "burn"], "nobody can judge it"
    alerting.look(reading)
    assert {alert.pk for alert in burns(burning)} == before


def test_an_overdue_slot_is_raised_and_ends_with_it(scene, moment):
    grant = Grant.objects.filter(slot=scene.slots["f2"])
    before = grant.get().state
    grant.update(state="overdue")
    alerting.look(readings.read(moment))
    alert = Alert.objects.get(kind="overdue")
    assert (alert.pool, alert.severity) == ("chat-70b", "page")
    grant.update(state=before)
    alerting.look(readings.read(moment + timedelta(seconds=20)))
    alert.refresh_from_db()
    assert alert.resolved_at == moment + timedelta(seconds=20)


def test_pages_say_who_looks_after_an_alert_and_put_it_last(scene, moment):
    Grant.objects.filter(slot__in=[scene.slots["f1"], scene.slots["f2"]]).update(state="overdue")
    alerting.look(readings.read(moment))
    first = Alert.objects.filter(kind="overdue").order_by("key").first()
    actions.acknowledge(alert_id=first.pk, note="on it", actor=ADA, now=moment)
    state = topics.alerts(readings.read(moment))
    overdue = [row for row in state["alerts"] if row["kind"] == "overdue"]
    assert [row["id"] for row in overdue][-1] == first.pk
    assert overdue[-1]["note"] == f"Acknowledged by ada at {moment:%H:%M} UTC."
    assert overdue[-1]["url"] == f"/alerts/{first.pk}/"
    assert state["pages"] == sum(row["grade"] == "bad" and not row["note"] for row in state["alerts"])


def test_a_contract_is_told_of_once_the_silence_of_its_agents_could_have_burned_enough(scene, moment):
    reading = readings.read(moment)
    evaluation, homes = reading.evaluations[scene.contract.pk], reading.homes(scene.chat.slug)
    key = f"absence-{scene.contract.slug}"

    def told(silent_us: int) -> list[str]:
        later = readings.read(homes.heard + timedelta(microseconds=silent_us))
        return [row["grade"] for row in alerting.conditions(later) if row["key"] == key]

    assert told(evaluation.absence.warn_us - 1_000_000) == []
    assert told(evaluation.absence.warn_us + 1_000_000) == ["risk"]
    assert told(evaluation.absence.page_us + 1_000_000) == ["bad"]
