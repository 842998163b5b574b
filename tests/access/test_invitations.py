"""Invitations by link: shown once, taken once, ended; passwords that are too weak are refused."""

import re
from datetime import timedelta

import pytest
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from controlplane.access.models import Invitation
from controlplane.audit.models import AuditEntry
from controlplane.tenants import throttle
from controlplane.tenants.models import Member
from tests.windows import begin_in_one_window

pytestmark = pytest.mark.django_db
GOOD = {"username": "grace", "password": "a quiet harbour 17", "again": "a quiet harbour 17"}


@pytest.fixture(autouse=True)
def clean_cache():
    cache.clear()
    yield
    cache.clear()


def invite(people, **given):
    form = {"email": "grace@example.com", "role": "viewer", "tenant": "", "days": "7", **given}
    page = people["admin"].post("/settings/invitations/new/", form).content.decode()
    found = re.search(r'id="link">http://testserver(/invitation/[^<]+/)<', page)
    return (found.group(1) if found else None), page


def test_without_a_mail_server_the_link_is_shown_and_makes_a_member(people):
    link, page = invite(people)
    assert "No mail server is set up here" in page
    assert link not in people["admin"].get("/settings/invitations/").content.decode()
    visitor = Client()
    assert "grace@example.com as viewer" in visitor.get(link).content.decode()
    assert visitor.post(link, GOOD).url == "/sign-in/"
    assert visitor.post("/sign-in/", {"username": "grace", "password": GOOD["password"]}).url == "/start/"
    member = Member.objects.get(user__username="grace")
    assert (member.role, member.user.email) == ("viewer", "grace@example.com")
    entry = AuditEntry.objects.get(action="member.create", object_id="grace")
    assert entry.after["invited_by"] == "admin"
    assert Client().get(link).status_code == 404, "a link works once"


def test_a_tenants_member_by_link_sees_its_own_tenant(people):
    link, _ = invite(people, role="tenant", tenant="acme")
    visitor = Client()
    visitor.post(link, GOOD)
    visitor.post("/sign-in/", {"username": "grace", "password": GOOD["password"]})
    assert visitor.get("/tenants/acme/").status_code == 200 and visitor.get("/tenants/stranger/").status_code == 404


@pytest.mark.parametrize("end", ["withdrawn", "over", "replaced"])
def test_a_link_ends(people, end):
    link, _ = invite(people)
    row = Invitation.objects.get()
    if end == "withdrawn":
        people["admin"].post(f"/settings/invitations/{row.pk}/withdraw/")
    elif end == "over":
        Invitation.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    else:
        other, _ = invite(people)
        assert Client().get(other).status_code == 200
    assert Client().get(link).status_code == 404
    assert Client().post(link, GOOD).status_code == 404 and not Member.objects.filter(user__username="grace").exists()


@pytest.mark.parametrize(
    ("password", "said"),
    [
        ("short 1", "too short"),
        ("password1234", "too common"),
        ("123456789012", "entirely numeric"),
        ("grace@example.com", "too similar"),
    ],
)
def test_weak_passwords_are_refused_and_nothing_is_used_up(people, password, said):
    link, _ = invite(people)
    answer = Client().post(link, {"username": "grace", "password": password, "again": password})
    assert answer.status_code == 400 and said in answer.content.decode()
    assert Client().post(link, {**GOOD, "again": "another"}).status_code == 400
    assert Client().post(link, {**GOOD, "username": "VIEWER"}).status_code == 400
    assert Client().post(link, GOOD).status_code == 302


def test_who_is_a_member_is_not_invited_and_a_role_needs_its_tenant(people):
    Member.objects.get(user__username="viewer").user.__class__.objects.filter(username="viewer").update(email="v@x.io")
    for given in ({"email": "V@x.io"}, {"role": "tenant"}, {"role": "viewer", "tenant": "acme"}):
        link, page = invite(people, **given)
        assert link is None and "There is a problem" in page
    assert people["finance"].post("/settings/invitations/new/", {"email": "x@x.io"}).status_code == 403


def test_guessing_links_is_stopped(people):
    begin_in_one_window(throttle.WINDOW_S, 20)
    statuses = [Client(REMOTE_ADDR="192.0.2.9").get(f"/invitation/guess-{n}/").status_code for n in range(62)]
    assert statuses[:60] == [404] * 60 and statuses[-1] == 429
