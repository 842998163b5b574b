"""Sessions: listed with device, address and last use; ended one by one, all others, or by an administrator; a live
socket ends with its session.
"""

import time
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from controlplane.access.models import Session
from controlplane.access.templatetags.access import device, sign_in_method
from controlplane.audit.models import AuditEntry
from controlplane.live.consumers import REVOKED
from tests import factories
from tests.live.test_socket import closed_with, socket

PASSWORD = "correct horse battery"
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
PHONE = "Mozilla/5.0 (iPhone; CPU iPhone OS 19_0 like Mac OS X) AppleWebKit/605.1 (KHTML) Version/19.0 Safari/604.1"


@pytest.fixture(autouse=True)
def clean_cache():
    cache.clear()
    yield
    cache.clear()


def browser(name="viewer", agent=FIREFOX, address="192.0.2.7"):
    client = Client(headers={"user-agent": agent}, REMOTE_ADDR=address)
    assert client.post("/sign-in/", {"username": name, "password": PASSWORD}).status_code == 302
    return client


def is_in(client):
    return client.get("/account/").status_code == 200


def row_of(client):
    return Session.objects.get(session_key=client.cookies["sessionid"].value)


@pytest.mark.django_db
class TestOwn:
    def test_the_list_says_device_address_and_way_in(self, people):
        here, phone = browser(), browser(agent=PHONE, address="198.51.100.4")
        page = here.get("/account/").content.decode()
        for told in ("Firefox on Linux", "Safari on iPhone", "192.0.2.7", "198.51.100.4", "this one", "password"):
            assert told in page
        assert is_in(phone)
        assert here.cookies["sessionid"].value not in page, "a session's key is a secret"

    def test_ending_one_leaves_the_others(self, people):
        here, phone = browser(), browser(agent=PHONE)
        here.post(f"/account/sessions/{row_of(phone).public_id}/end/")
        assert (is_in(here), is_in(phone)) == (True, False)
        entry = AuditEntry.objects.get(action="session.end")
        assert entry.object_id == "viewer" and "iPhone" in str(entry.before)

    def test_ending_the_others_leaves_this_one(self, people):
        here, phone, other = browser(), browser(agent=PHONE), browser("oncall")
        here.post("/account/sessions/end-others/")
        assert (is_in(here), is_in(phone), is_in(other)) == (True, False, True)

    def test_somebody_elses_cannot_be_ended(self, people):
        here, other = browser(), browser("oncall")
        here.post(f"/account/sessions/{row_of(other).public_id}/end/")
        assert is_in(other) and not AuditEntry.objects.filter(action="session.end").exists()

    def test_it_keeps_its_id_when_its_key_changes(self, people):
        here = browser()
        before = row_of(here)
        new = "another long password 7"
        here.post("/account/password/", {"old_password": PASSWORD, "new_password1": new, "new_password2": new})
        after = row_of(here)
        assert after.session_key != before.session_key
        assert (after.public_id, after.agent, after.began_at) == (before.public_id, before.agent, before.began_at)

    def test_last_use_is_written_once_a_minute(self, people):
        here = browser()
        old = timezone.now() - timedelta(minutes=3)
        Session.objects.filter(pk=row_of(here).pk).update(last_used_at=old)
        here.get("/account/")
        used = row_of(here).last_used_at
        assert used > old + timedelta(minutes=2)
        here.get("/account/")
        assert row_of(here).last_used_at == used


@pytest.mark.django_db
def test_an_administrator_ends_somebodys_sessions_and_nobody_else_does(people):
    here = browser()
    member = people["admin"].get("/settings/members/").content.decode()
    number = factories.Member.objects.get(user__username="viewer").pk
    assert f"/settings/members/{number}/edit/" in member
    page = people["admin"].get(f"/settings/members/{number}/access/").content.decode()
    assert "Firefox on Linux" in page
    assert people["finance"].post(f"/settings/members/{number}/access/sessions/end/").status_code == 403
    assert is_in(here)
    people["admin"].post(f"/settings/members/{number}/access/sessions/end/")
    assert not is_in(here) and is_in(people["admin"])


@pytest.mark.parametrize(
    ("agent", "said"),
    [(FIREFOX, "Firefox on Linux"), (PHONE, "Safari on iPhone"), ("curl/8.1", "curl/8.1"), ("", "Not told")],
)
def test_devices_in_words(agent, said):
    assert device(agent) == said
    assert sign_in_method("password + mfa") == "password + second factor" and sign_in_method("") == "—"


@pytest.mark.django_db(transaction=True)
async def test_live_sockets_close_within_five_seconds_of_the_end_of_their_session(capsys):
    def begin():
        factories.installation()
        factories.people()
        here, phone = browser(), browser(agent=PHONE)
        return here, phone, row_of(phone).public_id

    here, phone, public_id = await sync_to_async(begin)()
    ended, kept = socket(phone.cookies["sessionid"].value), socket(here.cookies["sessionid"].value)
    assert (await ended.connect())[0] and (await kept.connect())[0]
    await sync_to_async(here.post)(f"/account/sessions/{public_id}/end/")
    began = time.monotonic()
    assert await closed_with(ended, 6) == REVOKED
    took_s = time.monotonic() - began
    with capsys.disabled():
        print(f"\n  a live socket closed {took_s:.2f} s after its session was ended (promised: 5 s)")
    assert took_s <= 5
    assert await kept.receive_nothing(timeout=0.2)
    await kept.disconnect()
