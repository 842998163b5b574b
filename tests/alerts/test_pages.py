"""Pages and REST of alerts, as on-call and admins use them."""

import json
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.alerts import actions, messages
from controlplane.alerts.models import Alert, Delivery, Receiver, Severity, Silence
from controlplane.alerts.observing import observe
from controlplane.audit.models import AuditEntry
from controlplane.live import readings
from tests.alerts.test_observing import ADA, receiver, seen

pytestmark = pytest.mark.django_db


@pytest.fixture
def row(installation):
    observe([seen(causes=[{"label": "Worst stage", "value": "queue 62 %", "url": ""}])], timezone.now())
    return Alert.objects.get()


def post(client, url, **values):
    return client.post(url, values, follow=True)


def test_on_call_acknowledges_with_a_note_that_everybody_sees(people, row):
    page = people["oncall"].get("/alerts/")
    assert b"chat burns over 14.4" in page.content
    assert f"/alerts/{row.pk}/acknowledge/".encode() in page.content
    assert b"/acknowledge/" not in people["viewer"].get("/alerts/").content
    assert post(people["oncall"], f"/alerts/{row.pk}/acknowledge/").status_code == 422
    page = post(people["oncall"], f"/alerts/{row.pk}/acknowledge/", reason="rolling back 41")
    assert b"rolling back 41" in page.content
    assert b"oncall looks after it" in page.content
    entry = AuditEntry.objects.latest("id")
    assert (entry.action, entry.reason) == ("alert.acknowledge", "rolling back 41")
    page = post(people["oncall"], f"/alerts/{row.pk}/rearm/", reason="not mine")
    assert b"Rearmed" in page.content


def test_an_alert_shows_its_causes_its_runbook_and_who_was_told(people, installation):
    now = timezone.now()
    receiver(now, name="pager")
    observe([seen(causes=[{"label": "Worst stage", "value": "queue 62 %", "url": "/pools/a/"}])], now)
    page = people["viewer"].get(f"/alerts/{Alert.objects.get().pk}/").content.decode()
    assert "queue 62 %" in page
    assert "Read the worst stage." in page  # docs/runbooks/burn.md
    assert "pager" in page
    assert "<script>alert" not in page


@pytest.mark.parametrize("kind", actions.KINDS)
def test_every_kind_has_a_runbook(people, installation, kind):
    observe([seen(kind=kind)], timezone.now())
    page = people["oncall"].get(f"/alerts/{Alert.objects.get().pk}/").content.decode()
    assert "<ol>" in page


def test_a_resolved_alert_takes_no_acknowledgement_and_says_so(people, row):
    now = timezone.now()
    observe([], now + timedelta(minutes=1))
    page = people["oncall"].post(f"/alerts/{row.pk}/acknowledge/", {"reason": "x"})
    assert page.status_code == 422
    assert b"The alert ended at" in page.content
    answer = people["oncall"].post(
        f"/api/v1/alerts/{row.pk}/ack", json.dumps({"reason": "x"}), content_type="application/json"
    )
    assert answer.status_code == 409


def test_an_acknowledgement_asks_for_a_note_and_bounds_it(people, row):
    for note, said in (("", "Enter a note."), ("x" * 401, "at most 400 characters")):
        page = people["oncall"].post(f"/alerts/{row.pk}/acknowledge/", {"reason": note})
        assert page.status_code == 422 and said in page.content.decode()
    assert Alert.objects.get().acknowledged_at is None


def test_ack_over_rest_is_idempotent_and_visible_in_the_list(people, row):
    url = f"/api/v1/alerts/{row.pk}/ack/"
    for note in ("first", "second"):
        answer = people["oncall"].post(url, json.dumps({"reason": note}), content_type="application/json")
        assert answer.status_code == 200
        assert answer.json()["acknowledged_by"] == "oncall"
    assert Alert.objects.get().note == "first"
    assert people["viewer"].post(url, "{}", content_type="application/json").status_code == 403
    assert people["oncall"].post(url, "{}", content_type="application/json").status_code == 400


def test_a_silence_for_an_alert_is_filled_in_and_ends_by_hand(people, row):
    page = people["oncall"].get(f"/alerts/silences/new/?alert={row.pk}").content.decode()
    assert 'value="chat"' in page
    values = {"kinds": ["burn"], "contract": "chat", "hours": "1.5", "reason": "deploy"}
    page = people["oncall"].post("/alerts/silences/new/", values, follow=True)
    assert b"In force" in page.content
    silence = Silence.objects.get()
    assert timedelta(hours=1.49) < silence.ends_at - silence.starts_at <= timedelta(hours=1.5)
    assert "silenced until" in people["viewer"].get("/alerts/").content.decode()
    page = post(people["oncall"], f"/alerts/silences/{silence.pk}/end/", reason="done early")
    assert b"Over" in page.content
    page = people["oncall"].post(f"/alerts/silences/{silence.pk}/end/", {"reason": "again"})
    assert b"The silence is over." in page.content


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hours": "1"}, "would hide every incident"),
        ({"pool": "a", "hours": "10000"}, "less than or equal to 720"),
        ({"pool": "a", "hours": "nan"}, "Enter a number"),
        ({"pool": "a", "hours": "1", "starts_at": "2001-01-01T00:00"}, ""),
        ({"pool": "a", "hours": "1", "starts_at": "2999-01-01T00:00"}, "It may begin within a year."),
        ({"kinds": ["nonsense"], "hours": "1"}, "not one of the available choices"),
    ],
)
def test_a_silence_that_makes_no_sense_is_refused_with_the_reason(people, installation, values, said):
    page = people["oncall"].post("/alerts/silences/new/", {**values, "reason": "x"})
    if said:
        assert page.status_code == 422
        assert said in page.content.decode()
        assert Silence.objects.count() == 0
    else:
        assert Silence.objects.get().ends_at > timezone.now()  # a beginning in the past is now


def test_silences_over_rest(people, installation):
    ends_at = (timezone.now() + timedelta(hours=2)).isoformat()
    body = {"pool": "a", "ends_at": ends_at, "reason": "rack 4 is moved"}
    answer = people["oncall"].post("/api/v1/silences/", json.dumps(body), content_type="application/json")
    assert answer.status_code == 201, answer.content
    assert people["viewer"].get("/api/v1/silences/").json()["results"][0]["pool"] == "a"
    url = f"/api/v1/silences/{answer.json()['id']}/end/"
    for status in (200, 409):
        answer = people["oncall"].post(url, json.dumps({"reason": "moved"}), content_type="application/json")
        assert answer.status_code == status
    bad = people["oncall"].post("/api/v1/silences/", json.dumps({"reason": "x"}), content_type="application/json")
    assert bad.status_code == 400


def test_an_admin_adds_a_receiver_sees_its_secret_and_nobody_else_does(people, installation):
    values = {
        "name": "pager", "kind": "webhook", "target": "https://hooks.example.com/T0/secret-path", "severity": "page",
        "enabled": "on", "reason": "wake us",
    }  # fmt: skip
    page = people["admin"].post("/alerts/receivers/new/", values, follow=True)
    row = Receiver.objects.get()
    assert messages.secret_text(row.secret_id) in page.content.decode()
    assert page["Cache-Control"] == "no-store"
    for role in ("oncall", "viewer", "finance", "tenant"):
        assert people[role].get(f"/alerts/receivers/{row.pk}/secret/").status_code == 403
    seen_by_oncall = people["oncall"].get(f"/alerts/receivers/{row.pk}/").content.decode()
    assert "https://hooks.example.com/…" in seen_by_oncall
    assert "secret-path" not in seen_by_oncall
    assert "secret-path" not in json.dumps(list(AuditEntry.objects.values("before", "after")))
    before = messages.secret_text(row.secret_id)
    page = post(people["admin"], f"/alerts/receivers/{row.pk}/rotate/", reason="leaked")
    assert before not in page.content.decode()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"target": "http://example.com/x"}, "Use https"),
        ({"target": "https://10.0.0.1/x"}, "not a public address"),
        ({"target": "https://[::1]/x"}, "not a public address"),
        ({"target": "https://ada:pw@example.com/x"}, "Leave user name and password"),
        ({"target": "nonsense"}, "Write an address"),
        ({"kind": "email", "target": "nonsense"}, "Enter an e-mail address"),
        ({"name": " "}, "This field is required"),
        ({"severity": "loud"}, "not one of the available choices"),
    ],
)
def test_a_receiver_that_cannot_be_told_is_refused_by_field(people, installation, values, said):
    good = {"name": "a", "kind": "webhook", "target": "https://example.com/", "severity": "page", "reason": "x"}
    page = people["admin"].post("/alerts/receivers/new/", {**good, **values})
    assert page.status_code == 422
    assert said in page.content.decode()
    assert Receiver.objects.count() == 0


def test_two_people_editing_a_receiver_do_not_overwrite_each_other(people, installation):
    row = receiver(timezone.now(), severity=Severity.PAGE)
    values = {"name": "b", "target": row.target, "severity": "ticket", "enabled": "on", "reason": "x", "version": "1"}
    assert people["admin"].post(f"/alerts/receivers/{row.pk}/edit/", values).status_code == 302
    page = people["admin"].post(f"/alerts/receivers/{row.pk}/edit/", {**values, "name": "c"})
    assert page.status_code == 422
    assert "Somebody changed this" in page.content.decode()
    assert Receiver.objects.get().name == "b"


def test_a_test_message_and_one_sent_again(people, installation):
    row = receiver(timezone.now())
    assert people["admin"].get(f"/alerts/receivers/{row.pk}/test/").status_code == 405
    page = post(people["admin"], f"/alerts/receivers/{row.pk}/test/")
    assert b"Test message, asked for by admin" in page.content
    delivery = Delivery.objects.get()
    Delivery.objects.update(state="given_up", attempts=8)
    page = post(people["admin"], f"/alerts/deliveries/{delivery.pk}/resend/")
    assert b"Waiting" in page.content
    actions.archive_receiver(receiver_id=row.pk, reason="gone", actor=ADA, now=timezone.now())
    assert people["admin"].get(f"/alerts/receivers/{row.pk}/").status_code == 404


def test_forms_need_their_token(people, row):
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = people["oncall"].cookies
    assert strict.post(f"/alerts/{row.pk}/acknowledge/", {"reason": "x"}).status_code == 403
    assert Alert.objects.get().acknowledged_at is None


def test_a_deploy_is_posted_once_and_stands_among_what_changed(people, installation):
    body = json.dumps({"title": "gateway 4.2", "pool": "chat-70b", "url": "https://ci.example.com/81"})
    for _ in range(2):
        answer = people["oncall"].post(
            "/api/v1/events/", body, content_type="application/json", headers={"idempotency-key": "deploy-81"}
        )
        assert answer.status_code == 201, answer.content
    assert people["viewer"].post("/api/v1/events/", body, content_type="application/json").status_code == 403
    (event,) = people["viewer"].get("/api/v1/events/").json()["results"]
    assert (event["kind"], event["created_by"]) == ("deploy", "oncall")
    (change,) = [row for row in readings.read(timezone.now()).changes if row.kind == "deploy"]
    assert (change.who, change.what) == ("oncall", "gateway 4.2, pool chat-70b")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"title": " "}, "title"),
        ({"title": "x", "kind": "party"}, "kind"),
        ({"title": "x", "at": "2999-01-01T00:00:00Z"}, "at"),
        ({"title": "x", "at": "2001-01-01T00:00:00Z"}, "at"),
        ({"title": "x", "url": "javascript:alert(1)"}, "url"),
    ],
)
def test_an_event_that_makes_no_sense_is_refused_by_field(people, installation, values, field):
    answer = people["oncall"].post("/api/v1/events/", json.dumps(values), content_type="application/json")
    assert answer.status_code == 400
    assert list(answer.json()["errors"]) == [field]
