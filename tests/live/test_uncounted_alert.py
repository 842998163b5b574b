"""More than 0.1 % of the records or of the spend in no total is an alert, until it falls or people decided on it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.alerts.models import Alert
from controlplane.audit.actors import Actor
from controlplane.live import alerting, readings
from controlplane.usage.actions import decide_set_aside
from controlplane.usage.models import Quarantine, RollupDelta

FIN = Actor(id=None, name="fin", role="finance")
LOOK = timedelta(seconds=20)


@pytest.fixture
def counted(scene, moment):
    """Sets how many records count in the last day, at 1 nano each."""

    def count(requests: int) -> None:
        RollupDelta.objects.all().delete()
        RollupDelta.objects.create(
            minute=moment.replace(second=0, microsecond=0) - timedelta(hours=2), pool_id=scene.pool.pk,
            tenant_id=scene.acme.pk, class_id=scene.chat.pk, model_id=scene.pool.model_id, rate_version=0, outcome=1,
            requests=requests, prompt_tokens=0, cached_tokens=0, output_tokens=0, gpu_us=0, charge_prompt_nanos=0,
            charge_cached_nanos=0, charge_output_nanos=requests, charge_gpu_nanos=0, stages=b"",
        )  # fmt: skip

    return count


def aside(scene, moment, records: int, nanos: int | None, reason="unknown_tenant", **given) -> Quarantine:
    return Quarantine.objects.create(
        at=moment - timedelta(minutes=5), agent_id=scene.agents[0].pk, epoch=1, seq=1, reason=reason,
        **{"payload": {"records": []}, "records": records, "nanos": nanos, **given},
    )  # fmt: skip


def look(at) -> Alert | None:
    alerting.look(readings.read(at))
    return Alert.objects.filter(kind="uncounted", resolved_at=None).first()


def test_it_is_raised_over_a_thousandth_and_ends_when_the_share_falls(scene, moment, counted):
    counted(9_990)
    aside(scene, moment, 10, 10)
    assert look(moment) is None, "10 of 10,000 are 0.1 %, not more"
    counted(9_989)
    alert = look(moment)
    assert (alert.severity, alert.group, alert.pool) == ("ticket", "records", "")
    assert alert.title.startswith("0.10 % of the last day") and "10 records beside 9,989" in alert.text
    assert alert.url == "/finance/set-aside/"
    assert [cause["label"] for cause in alert.causes] == ["Unknown tenant"]
    assert alert.causes[0]["value"] == f"10 records from {scene.agents[0].name}"
    counted(9_990)
    assert look(moment + LOOK) is None
    alert.refresh_from_db()
    assert alert.resolved_at == moment + LOOK


def test_few_records_of_much_spend_are_enough(scene, moment, counted):
    counted(100_000)
    aside(scene, moment, 1, 100)
    assert look(moment) is None
    aside(scene, moment, 1, 1)
    alert = look(moment)
    assert "of the last day's spend" in alert.title and alert.severity == "ticket"


def test_over_one_per_cent_wakes_somebody(scene, moment, counted):
    counted(99)
    aside(scene, moment, 1, None)
    assert look(moment).severity == "ticket"
    aside(scene, moment, 1, None)
    alert = look(moment)
    assert (alert.severity, alert.word) == ("page", "Page")
    assert "What 2 of them cost is not known" in alert.text


def test_what_people_decided_on_ends_it(scene, moment, counted):
    counted(100)
    last = aside(scene, moment, 5, 5)
    assert look(moment) is not None
    decide_set_aside(
        reason=last.reason, agent_id=last.agent_id, through_id=last.pk, why="booked by hand", actor=FIN, now=moment
    )
    assert look(moment + LOOK) is None


def test_a_loss_of_which_nobody_knows_the_size_is_told_too(scene, moment, counted):
    counted(10**9)
    aside(scene, moment, 0, None, "reports_lost", payload={"first_seq": 1, "last_seq": 1, "records": None})
    alert = look(moment)
    assert alert.title == "Nobody knows how much usage of the last day was lost"
    assert alert.causes[0]["value"].startswith("unknown records")


def test_an_installation_at_rest_has_none(scene, moment, counted):
    counted(100)
    assert look(moment) is None
