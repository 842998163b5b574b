"""Conditions that are seen become alerts: raised once, followed, escalated, resolved, and told once each."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.alerts import actions, observing, queries
from controlplane.alerts.models import Alert, AlertChange, Delivery, Severity
from controlplane.alerts.observing import HOLD, Seen, observe
from controlplane.audit.actors import Actor
from tests import factories
from tests.threads import at_once

ADA = Actor(id=None, name="ada", role="oncall")


def seen(key="burn-chat", **values) -> Seen:
    given_values = {
        "kind": "burn", "severity": Severity.PAGE, "grade": "bad", "word": "Page", "group": "contract:chat",
        "title": "chat burns over 14.4×", "text": "20.0× over 1 h.", "url": "/contracts/chat/", "contract": "chat",
    }  # fmt: skip
    return Seen(key=key, **{**given_values, **values})


def receiver(now, **values):
    given_values = {
        "name": "pager", "kind": "webhook", "target": "https://93.184.216.34/hook", "severity": Severity.TICKET,
        "enabled": True,
    }  # fmt: skip
    return actions.create_receiver(values={**given_values, **values}, reason="tell us", actor=ADA, now=now)


def story(alert) -> list[str]:
    return list(AlertChange.objects.filter(alert=alert).order_by("id").values_list("kind", flat=True))


def told() -> list[tuple[str, str]]:
    return list(Delivery.objects.order_by("id").values_list("event", "subject"))


@pytest.mark.django_db
def test_a_condition_is_raised_once_followed_and_resolved_when_it_has_been_gone_for_the_hold(now):
    receiver(now)
    for second in (0, 4, 8):
        observe([seen(text=f"{second}")], now + timedelta(seconds=second))
    (alert,) = Alert.objects.all()
    assert (alert.text, alert.raised_at, alert.seen_at) == ("8", now, now + timedelta(seconds=8))
    assert told() == [("raised", "chat burns over 14.4×")]
    observe([], now + timedelta(seconds=12))  # one look that misses it ends nothing
    alert.refresh_from_db()
    assert alert.resolved_at is None
    gone = now + timedelta(seconds=8) + HOLD
    observe([], gone)
    alert.refresh_from_db()
    assert alert.resolved_at == gone
    assert story(alert) == ["raised", "resolved"]
    assert told()[1:] == [("resolved", "Resolved: chat burns over 14.4×")]
    observe([seen()], gone + timedelta(minutes=1))
    assert Alert.objects.count() == 2  # armed again: another incident
    assert len(told()) == 3


@pytest.mark.django_db
def test_what_cannot_be_judged_has_not_ended(now):
    observe([seen(), seen(key="overdue-a", group="pool:a")], now)
    later = now + timedelta(hours=1)
    observe([], later, unknown={"contract:chat"})
    assert [alert.key for alert in queries.open_alerts()] == ["burn-chat"]


@pytest.mark.django_db
def test_a_ticket_that_becomes_a_page_is_told_again_and_needs_somebody_again(now):
    receiver(now, severity=Severity.PAGE)
    observe([seen(severity=Severity.TICKET, grade="risk")], now)
    assert told() == []
    (alert,) = Alert.objects.all()
    actions.acknowledge(alert_id=alert.pk, note="on it", actor=ADA, now=now)
    observe([seen()], now + timedelta(seconds=4))
    alert.refresh_from_db()
    assert (alert.acknowledged_at, alert.severity) == (None, "page")
    assert story(alert) == ["raised", "acknowledged", "escalated"]
    assert told() == [("escalated", "Now a page: chat burns over 14.4×")]
    observe([seen(severity=Severity.TICKET)], now + timedelta(seconds=8))
    assert len(told()) == 1


@pytest.mark.django_db
def test_one_message_for_all_that_changes_together(now):
    receiver(now)
    slots = [
        seen(key=f"overdue-{n}", kind="overdue", group="pool:a", title=f"s{n} is past its bound") for n in range(40)
    ]
    observe([*slots, seen()], now)
    assert told() == [("raised", "s0 is past its bound and 39 more"), ("raised", "chat burns over 14.4×")]
    assert Delivery.objects.order_by("id").first().alerts.count() == 40


@pytest.mark.django_db
def test_a_silence_hides_from_receivers_until_it_ends(now):
    receiver(now)
    silence = actions.create_silence(
        kinds=["burn"], pool="", contract="chat", starts_at=now, ends_at=now + timedelta(hours=1), reason="deploy",
        actor=ADA, now=now,
    )  # fmt: skip
    observe([seen(), seen(key="burn-other", contract="other", group="contract:other", title="other burns")], now)
    assert told() == [("raised", "other burns")]
    assert queries.marks(now)["burn-chat"].silenced_until == silence.ends_at
    assert queries.marks(now)["burn-other"].silenced_until is None
    observe([seen()], now + timedelta(minutes=59, seconds=59))
    assert len(told()) == 2  # the other one was resolved
    observe([seen()], now + timedelta(hours=1))
    assert told()[2:] == [("raised", "chat burns over 14.4×")]


def silence_chat(now):
    return actions.create_silence(
        kinds=[], pool="", contract="chat", starts_at=now, ends_at=now + timedelta(hours=1), reason="x", actor=ADA,
        now=now,
    )  # fmt: skip


@pytest.mark.django_db
def test_a_ticket_that_becomes_a_page_under_a_silence_is_told_at_its_end(now):
    receiver(now, severity=Severity.PAGE)
    observe([seen(severity=Severity.TICKET, grade="risk")], now)
    silence_chat(now)
    observe([seen()], now + timedelta(seconds=4))
    assert told() == []
    observe([seen()], now + timedelta(hours=1))
    assert told() == [("raised", "chat burns over 14.4×")]


@pytest.mark.django_db
def test_what_somebody_looks_after_wakes_nobody_when_its_silence_ends(now):
    receiver(now)
    silence_chat(now)
    observe([seen()], now)
    actions.acknowledge(alert_id=Alert.objects.get().pk, note="on it", actor=ADA, now=now)
    observe([seen()], now + timedelta(hours=1))
    assert told() == []


@pytest.mark.django_db
def test_what_ended_under_a_silence_is_never_told(now):
    receiver(now)
    actions.create_silence(
        kinds=[], pool="", contract="chat", starts_at=now, ends_at=now + timedelta(hours=1), reason="x", actor=ADA,
        now=now,
    )  # fmt: skip
    observe([seen()], now)
    observe([], now + timedelta(minutes=5))
    assert told() == []
    assert Alert.objects.get().resolved_at is not None


@pytest.mark.django_db
def test_an_acknowledgement_taken_back_is_told_as_new(now):
    receiver(now)
    observe([seen()], now)
    (alert,) = Alert.objects.all()
    actions.acknowledge(alert_id=alert.pk, note="mine", actor=ADA, now=now)
    assert actions.acknowledge(alert_id=alert.pk, note="mine too", actor=ADA, now=now).note == "mine"
    actions.rearm(alert_id=alert.pk, note="cannot reach it", actor=ADA, now=now)
    observe([seen()], now + timedelta(seconds=4))
    assert [event for event, _ in told()] == ["raised", "acknowledged", "raised"]
    assert story(alert) == ["raised", "acknowledged", "rearmed"]
    observe([], now + timedelta(minutes=1))
    with pytest.raises(actions.AlreadyEnded, match="ended at 20:01:00 UTC"):
        actions.acknowledge(alert_id=alert.pk, note="late", actor=ADA, now=now)


@pytest.mark.django_db(transaction=True)
def test_two_leaders_at_once_raise_an_alert_once(now):
    receiver(now)
    outcomes = at_once([lambda: len(observe([seen()], now).raised)] * 6)
    assert sorted(outcomes) == [0, 0, 0, 0, 0, 1]
    assert told() == [("raised", "chat burns over 14.4×")]


@pytest.mark.django_db
@settings(max_examples=40, deadline=None)
@given(
    looks=st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abc"), st.sampled_from([Severity.PAGE, Severity.TICKET])),
            st.integers(1, 30),
            st.sets(st.sampled_from("abc")),
        ),
        max_size=12,
    )
)
def test_any_looks_leave_each_condition_open_once_and_its_story_in_order(looks):
    """Open exactly while seen (and for the hold, and while it cannot be judged); raised and resolved take turns."""
    Delivery.objects.all().delete()
    AlertChange.objects.all().delete()
    Alert.objects.all().delete()
    at, last = factories.NOW, {}
    for conditions, step_s, unknown in looks:
        at += timedelta(seconds=step_s)
        rows = [seen(key=key, severity=severity, group=f"g:{key}") for key, severity in conditions.items()]
        observe(rows, at, unknown={f"g:{key}" for key in unknown})
        for key in list(last):
            if key not in conditions and key not in unknown and at - last[key] >= HOLD:
                del last[key]
        last |= dict.fromkeys(conditions, at)
        assert {alert.key for alert in queries.open_alerts()} == set(last)
    for key in "abc":
        kinds = [
            kind
            for kind in AlertChange.objects.filter(alert__key=key).order_by("id").values_list("kind", flat=True)
            if kind != "escalated"
        ]
        assert kinds == (["raised", "resolved"] * len(kinds))[: len(kinds)]


def test_the_hold_is_longer_than_a_look():
    assert timedelta(seconds=10) < observing.HOLD
