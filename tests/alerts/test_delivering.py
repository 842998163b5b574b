"""Messages reach their receiver at least once, signed, with growing pauses, and a slow one holds up nobody."""

import asyncio
import base64
import hashlib
import hmac
import http.server
import json
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.test import override_settings

from controlplane.alerts import actions, delivering, messages
from controlplane.alerts.delivering import CLAIM, PAUSES, send_due
from controlplane.alerts.models import Delivery, DeliveryAttempt, Receiver, Severity
from controlplane.alerts.observing import observe
from controlplane.web import outbound
from tests.alerts.test_observing import ADA, receiver, seen

LOOPBACK = outbound.networks(["127.0.0.0/8"])


@contextmanager
def hook(*statuses: int, hold: threading.Event | None = None):
    """A receiver on loopback that answers with these statuses, then 200: (its address, [(headers, body)])."""
    heard: list[tuple[dict[str, str], bytes]] = []
    answers = list(statuses)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append((dict(self.headers), self.rfile.read(int(self.headers["content-length"]))))
            if hold is not None:
                hold.wait(60)
            self.send_response(answers.pop(0) if answers else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook", heard
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def allowed(settings):
    settings.OUTBOUND_ALLOW = LOOPBACK


def verified(headers: dict[str, str], body: bytes, secret: str) -> bool:
    """What a receiver does with the secret that was shown to it, written down from the scheme's text."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return expected in headers["webhook-signature"].split(" ")


@pytest.mark.django_db
def test_a_message_is_signed_and_says_what_happened(allowed, settings, now):
    settings.PUBLIC_URL = "https://flexband.example.com"
    with hook() as (url, heard):
        row = receiver(now, target=url)
        observe([seen(causes=[{"label": "Worst stage", "value": "queue 62 %", "url": ""}])], now)
        assert send_due(now) == 1
        assert send_due(now) == 0
    ((headers, body),) = heard
    headers = {name.lower(): value for name, value in headers.items()}
    assert verified(headers, body, messages.secret_text(row.secret_id))
    assert not verified(headers, body + b" ", messages.secret_text(row.secret_id))
    assert headers["webhook-timestamp"] == str(int(now.timestamp()))
    said = json.loads(body)
    assert said["type"] == "alert.raised"
    (alert,) = said["data"]["alerts"]
    assert (alert["severity"], alert["state"], alert["contract"]) == ("page", "open", "chat")
    assert alert["url"] == f"https://flexband.example.com/alerts/{alert['id']}/"
    assert alert["causes"] == [{"label": "Worst stage", "value": "queue 62 %", "url": ""}]
    (delivery,) = Delivery.objects.all()
    assert (delivery.state, delivery.attempts, delivery.delivered_at) == ("delivered", 1, now)


@pytest.mark.django_db
def test_a_failed_try_is_repeated_under_the_same_id_with_growing_pauses_and_given_up_at_last(allowed, now):
    with hook(*[500] * (len(PAUSES) + 1)) as (url, heard):
        receiver(now, target=url)
        observe([seen()], now)
        at = now
        for pause in PAUSES:
            assert send_due(at) == 1
            (delivery,) = Delivery.objects.all()
            assert pause <= delivery.next_at - at <= pause * 1.2
            assert send_due(delivery.next_at - timedelta(microseconds=1)) == 0
            at = delivery.next_at
        assert send_due(at) == 1
        (delivery,) = Delivery.objects.all()
        assert (delivery.state, delivery.attempts) == ("given_up", len(PAUSES) + 1)
        assert send_due(at + timedelta(days=2)) == 0
        assert len({dict(headers)["webhook-id"] for headers, _ in heard}) == 1
        stamps = [int(dict(headers)["webhook-timestamp"]) for headers, _ in heard]
        assert stamps == sorted(set(stamps))
        actions.resend(delivery_id=delivery.pk, actor=ADA, now=at)
        assert send_due(at) == 1
    log = DeliveryAttempt.objects.order_by("id")
    assert [row.status for row in log] == [500] * (len(PAUSES) + 1) + [200]
    assert log[0].error == "answered with status 500"
    assert Delivery.objects.get().state == "delivered"


@pytest.mark.django_db
def test_a_redirect_and_a_private_address_are_failures_that_say_so(settings, now):
    settings.OUTBOUND_ALLOW = LOOPBACK
    with hook(302) as (url, heard):
        receiver(now, target=url)
        observe([seen()], now)
        send_due(now)
        assert len(heard) == 1
        settings.OUTBOUND_ALLOW = ()
        send_due(now + timedelta(hours=1))
        assert len(heard) == 1
    errors = [row.error for row in DeliveryAttempt.objects.order_by("id")]
    assert errors[0] == "answered with status 302"
    assert errors[1].startswith("127.0.0.1 is not a public address.")


@pytest.mark.django_db
def test_after_a_rotation_both_secrets_verify_for_a_day(allowed, now):
    with hook() as (url, heard):
        row = receiver(now, target=url)
        old = messages.secret_text(row.secret_id)
        row = actions.rotate_secret(receiver_id=row.pk, reason="leaked", actor=ADA, now=now)
        new = messages.secret_text(row.secret_id)
        assert old != new
        for at in (now + messages.OVERLAP - timedelta(seconds=1), now + messages.OVERLAP):
            actions.send_test(receiver_id=row.pk, actor=ADA, now=at)
            send_due(at)
    found = [
        [verified({n.lower(): v for n, v in headers.items()}, body, secret) for secret in (old, new)]
        for headers, body in heard
    ]
    assert found == [[True, True], [False, True]]


@pytest.mark.django_db
def test_what_a_dead_sender_had_claimed_is_sent_by_the_next(allowed, now):
    with hook() as (url, heard):
        receiver(now, target=url)
        observe([seen()], now)
        assert len(delivering._claim(now)) == 1  # and then its process is killed
        assert send_due(now + CLAIM - timedelta(seconds=1)) == 0
        assert send_due(now + CLAIM) == 1
        assert len(heard) == 1


@pytest.mark.django_db
def test_a_receiver_that_hangs_takes_a_few_places_and_the_others_are_told(allowed, now):
    release = threading.Event()
    with hook(hold=release) as (slow, _), hook() as (quick, heard):
        receiver(now, name="slow", target=slow)
        receiver(now, name="quick", target=quick)
        for number in range(10):
            observe([seen(key=f"k{number}", group=f"g{number}")], now)
        sender = threading.Timer(1.0, release.set)
        sender.start()
        tried = send_due(now)
        sender.join()
    assert tried == 2 * delivering.PER_RECEIVER
    assert len(heard) == delivering.PER_RECEIVER


@pytest.mark.django_db
def test_an_odd_message_and_a_dead_receivers_backlog_hold_up_nobody(allowed, now):
    with hook() as (url, heard):
        dead = receiver(now, name="dead", target="http://127.0.0.1:9/")
        odd = receiver(now, name="odd", target=url)
        Receiver.objects.filter(pk=odd.pk).update(
            target="http://127.0.0.1:9/\u00e9\udcff".encode("utf-8", "replace").decode()
        )
        for number in range(200):
            Delivery.objects.create(
                receiver=dead, event="test", subject=f"{number}", body={}, created_at=now, next_at=now - timedelta(1)
            )
        actions.send_test(receiver_id=odd.pk, actor=ADA, now=now)
        receiver(now, name="good", target=url)
        actions.send_test(receiver_id=Receiver.objects.get(name="good").pk, actor=ADA, now=now)
        assert send_due(now) == delivering.PER_RECEIVER + 2
        assert len(heard) == 1
    assert Delivery.objects.get(receiver__name="good").state == "delivered"
    odd_try = DeliveryAttempt.objects.get(delivery__receiver=odd)
    assert odd_try.error


@pytest.mark.django_db
def test_a_receiver_is_told_what_it_wants_while_it_is_enabled(allowed, now):
    with hook() as (url, heard):
        pages = receiver(now, target=url, severity=Severity.PAGE)
        observe([seen(severity=Severity.TICKET, grade="risk")], now)
        assert Delivery.objects.count() == 0
        observe([seen(key="other")], now)
        actions.edit_receiver(receiver_id=pages.pk, values={"enabled": False}, reason="holiday", actor=ADA, now=now)
        assert send_due(now) == 0
        assert heard == []
    assert Delivery.objects.get().state == "given_up"
    assert Receiver.objects.get().version == 2


@contextmanager
def mail_server(refuse: bool = False):
    """A small SMTP server on loopback: (port, [message text])."""
    heard: list[str] = []
    started, loop = threading.Event(), asyncio.new_event_loop()
    places: list[int] = []

    async def serve(reader, writer):
        writer.write(b"220 test\r\n")
        while line := await reader.readline():
            word = line[:4].upper()
            if word == b"DATA":
                writer.write(b"354 go\r\n")
                text = await reader.readuntil(b"\r\n.\r\n")
                heard.append(text.decode())
                writer.write(b"250 ok\r\n")
            elif word == b"RCPT" and refuse:
                writer.write(b"550 no such mailbox\r\n")
            elif word == b"QUIT":
                writer.write(b"221 bye\r\n")
                break
            else:
                writer.write(b"250 ok\r\n")
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        places.append(server.sockets[0].getsockname()[1])
        started.set()
        async with server:
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    started.wait(60)
    try:
        yield places[0], heard
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.mark.django_db
def test_an_email_says_the_same_in_plain_text(now):
    with mail_server() as (port, heard), override_settings(
        EMAIL_BACKEND="django.core.mail.backends.smtp.EmailBackend", EMAIL_HOST="127.0.0.1", EMAIL_PORT=port,
        EMAIL_IS_SET=True, EMAIL_USE_TLS=False,
    ):  # fmt: skip
        receiver(now, kind="email", target="oncall@example.com")
        observe([seen(title="chat burns\nBcc: x@example.com")], now)
        assert send_due(now) == 1
    (text,) = heard
    assert "To: oncall@example.com" in text
    assert "\r\nBcc:" not in text.partition("\r\n\r\n")[0]
    assert "20.0=C3=97 over 1 h." in text or "20.0× over 1 h." in text or "MjAuMM" in text
    assert Delivery.objects.get().state == "delivered"


@pytest.mark.django_db
@pytest.mark.parametrize(("given", "said"), [(True, "no such mailbox"), (None, "FLEXBAND_SMTP_URL")])
def test_a_mail_that_is_refused_says_why(now, given, said):
    with mail_server(refuse=True) as (port, _), override_settings(
        EMAIL_BACKEND="django.core.mail.backends.smtp.EmailBackend", EMAIL_HOST="127.0.0.1", EMAIL_PORT=port,
        EMAIL_IS_SET=bool(given), EMAIL_USE_TLS=False,
    ):  # fmt: skip
        receiver(now, kind="email", target="oncall@example.com")
        observe([seen()], now)
        send_due(now)
    assert said in DeliveryAttempt.objects.get().error
