"""Signing in with an OpenID provider that runs as a process of its own: walks in a browser, and what is refused."""

import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from allauth.socialaccount.models import SocialAccount
from django.contrib.auth.models import User
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from controlplane.access.invitation_actions import invite
from controlplane.access.provider_file import OpenIdProvider
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.embedded.ports import free_port
from controlplane.web.outbound import networks
from tests import factories
from tests.access.openid_provider import CLIENT_ID, CLIENT_SECRET
from tests.access.openid_provider import PASSWORD as PROVIDER_PASSWORD
from tests.access.walking import elsewhere, person, picture, visitor
from tests.jobs.page_site import chromium, web

pytestmark = [
    pytest.mark.browser, pytest.mark.slow, pytest.mark.processes, pytest.mark.django_db(transaction=True),
]  # fmt: skip

SCRIPT = Path(__file__).with_name("openid_provider.py")
ACTOR = Actor(id=None, name="ada", role="admin")


class ProviderProcess:
    def __init__(self, folder, callback):
        self.address = f"http://127.0.0.1:{free_port()}"
        port = self.address.rpartition(":")[2]
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), port, str(folder), callback], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self.process.stdout.readline().strip() == b"ready", self.process.stdout.read()

    def stop(self):
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def site(transactional_db, settings, tmp_path):
    """(address of the web process, the provider); `ada` is a member, `invited` was invited, the others are nobody."""
    cache.clear()
    factories.installation()
    person("ada", "oncall")
    invite(email="invited@example.com", role="viewer", tenant_id=None, days=7, actor=ACTOR, now=timezone.now())
    with web() as address:
        address = address.replace("127.0.0.1", "localhost")
        provider = ProviderProcess(tmp_path, f"{address}/sign-in/with/work/back/")
        settings.OUTBOUND_ALLOW = networks(["127.0.0.0/8"])
        settings.OPENID_PROVIDERS = (
            OpenIdProvider("work", "Work account", f"{provider.address}/o", CLIENT_ID, CLIENT_SECRET),
        )
        yield address, provider
        provider.stop()
    cache.clear()


def go(page, name):
    """Clicks through: our page, the provider's sign-in, its consent, and back."""
    page.goto("/sign-in/?next=/account/")
    page.click("text=Sign in with Work account")
    page.fill("[name=username]", name)
    page.fill("[name=password]", PROVIDER_PASSWORD)
    page.click("button")
    page.wait_for_selector("text=Consent")
    page.click("button")
    page.wait_for_url(lambda url: "localhost" in url)


def standing():
    links = sorted(SocialAccount.objects.values_list("user__username", "provider"))
    roles = sorted(User.objects.values_list("username", "member__role"))
    return links, roles, list(AuditEntry.objects.order_by("id").values_list("action", "object_id"))


def test_a_member_comes_in_by_verified_address_and_everybody_else_is_refused(site, capsys):
    address, provider = site
    began = time.monotonic()
    with chromium() as browser:
        with visitor(browser, address) as page:
            go(page, "ada")
            page.wait_for_selector("h1:has-text('Your account')")
            text = page.inner_text("main")
            assert "Linked" in text and "as ada@example.com" in text and "provider" in text
        with visitor(browser, address) as page:  # a second time: by the link, without a look at the address
            elsewhere(lambda: (User.objects.filter(username="ada").update(email="other@example.com"), 1))
            go(page, "ada")
            page.wait_for_selector("h1:has-text('Your account')")
        for name, said in (
            ("unknown", "No member has the e-mail address unknown@example.com"),
            ("unverified", "does not vouch for your e-mail address"),
            ("liar", "could not be checked. Nothing was changed."),
        ):
            with visitor(browser, address) as page:
                go(page, name)
                assert said in page.inner_text("[role=alert]")
                picture(page, f"refused-{name}")
                page.goto("/account/")
                assert "/sign-in/" in page.url, "nobody came in"
        with visitor(browser, address) as page:
            go(page, "invited")
            page.wait_for_selector("h1:has-text('Your account')")
        links, roles, audit = elsewhere(standing)
        assert links == [("ada", "work"), ("invited@example.com", "work")]
        assert roles == [("ada", "oncall"), ("invited@example.com", "viewer")]
        assert audit == [
            ("invitation.create", "invited@example.com"), ("member.link", "ada"),
            ("member.create", "invited@example.com"), ("member.link", "invited@example.com"),
        ]  # fmt: skip
        provider.stop()
        with visitor(browser, address) as page:
            page.goto("/sign-in/")
            page.click("text=Sign in with Work account")
            assert "Work account does not answer." in page.inner_text("[role=alert]")
            picture(page, "provider-down")
    with capsys.disabled():
        print(f"\n  six walks through the provider's process in {time.monotonic() - began:.1f} s")


def test_states_and_addresses_that_are_not_its_own(site, settings):
    """What a browser walk cannot send: a state of another browser, a replay, and a provider inside the network."""
    address, provider = site
    host = address.removeprefix("http://")
    client, other = Client(headers={"host": host}), Client(headers={"host": host})
    leaving = client.post("/sign-in/with/work/", {"next": "https://evil.example/"}).content.decode()
    asked = parse_qs(urlsplit(leaving.split('href="' + provider.address)[1].split('"')[0].replace("&amp;", "&")).query)
    assert asked["code_challenge_method"] == ["S256"] and len(asked["nonce"][0]) >= 32
    back = {"code": "made-up", "state": asked["state"][0]}
    for one, given in ((other, back), (client, {**back, "state": "guessed"}), (client, back), (client, back)):
        answer = one.get("/sign-in/with/work/back/", given)
        assert answer.status_code == 400 and "does not belong to a sign-in" in answer.content.decode()
    assert client.get("/sign-in/with/nobody/back/").status_code == 404
    assert client.get("/sign-in/with/work/").status_code == 405, "a link elsewhere must not begin a sign-in"
    settings.OUTBOUND_ALLOW = ()
    answer = client.post("/sign-in/with/work/")
    assert answer.status_code == 502 and "does not answer" in answer.content.decode()
    assert not SocialAccount.objects.exists()
