"""Second factors in a real browser: codes of an app, recovery codes, a passkey beside the password and alone."""

import re

import pytest
from allauth.mfa.models import Authenticator
from django.core.cache import cache

from controlplane.audit.models import AuditEntry
from tests import factories
from tests.access.walking import code_of, confirm, elsewhere, person, picture, sign_in, sign_out, visitor
from tests.jobs.page_site import chromium, web

# Not the sign-in page that names it as the next one.
ACCOUNT = re.compile(r":\d+/account/$")
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def site(transactional_db):
    cache.clear()
    factories.installation()
    person("ada", "admin")
    with web() as address:
        yield address
    cache.clear()


def actions_of(name):
    return list(AuditEntry.objects.filter(object_id=name).order_by("id").values_list("action", flat=True))


def secrets_in_clear(secret):
    return [row.pk for row in Authenticator.objects.all() if secret in str(row.data)]


def test_codes_of_an_app_and_recovery_codes(site):
    with chromium() as browser, visitor(browser, site) as page:
        page.goto("/sign-in/")
        picture(page, "sign-in")
        sign_in(page, "ada")
        page.wait_for_url(ACCOUNT)
        page.click("a:has-text('Set up')")
        page.wait_for_url("**/account/confirm/**")
        picture(page, "confirm")
        confirm(page, "not the password")
        assert "There is a problem" in page.content()
        confirm(page)
        page.wait_for_url("**/account/app/add/")
        secret = page.inner_text("#secret")
        picture(page, "app-add")
        page.fill("[name=code]", "000000" if code_of(secret) != "000000" else "111111")
        page.click("button:has-text('Set up')")
        assert "There is a problem" in page.content() and page.inner_text("#secret") == secret
        page.fill("[name=code]", code_of(secret))
        page.click("button:has-text('Set up')")
        page.wait_for_url("**/account/recovery-codes/")
        codes = page.inner_text("#recovery").split()
        assert len(codes) == len(set(codes)) == 10 and all(re.fullmatch(r"\d{10}", code) for code in codes)
        picture(page, "codes")
        page.reload()
        assert not any(code in page.content() for code in codes), "codes are shown once"
        page.goto("/account/")
        picture(page, "account")
        assert elsewhere(secrets_in_clear, secret) == []

        sign_out(page)
        sign_in(page, "ada")
        page.wait_for_url("**/sign-in/second-factor/")
        page.goto("/account/")
        page.wait_for_url("**/sign-in/?next=/account/"), "half way in is not in"
        page.goto("/sign-in/second-factor/")
        picture(page, "second-factor")
        page.fill("[name=code]", "123456")
        page.click("button:has-text('Sign in')")
        assert "There is a problem" in page.content()
        page.fill("[name=code]", code_of(secret, 1))
        page.click("button:has-text('Sign in')")
        page.wait_for_url(ACCOUNT)
        assert "password + second factor" in page.content()

        sign_out(page)
        sign_in(page, "ada")
        page.fill("[name=code]", codes[0])
        page.click("button:has-text('Sign in')")
        page.wait_for_url(ACCOUNT)
        assert "You used a recovery code. 9 left." in page.content()
        sign_out(page)
        sign_in(page, "ada")
        page.fill("[name=code]", codes[0])
        page.click("button:has-text('Sign in')")
        assert "There is a problem" in page.content(), "a recovery code works once"
    assert elsewhere(actions_of, "ada") == ["factor.add", "member.recovery_code"]


def test_a_passkey_beside_the_password_and_alone(site):
    with chromium() as browser, visitor(browser, site) as page:
        devtools = page.context.new_cdp_session(page)
        devtools.send("WebAuthn.enable")
        device = {
            "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
            "isUserVerified": True, "automaticPresenceSimulation": True,
        }  # fmt: skip
        made = devtools.send("WebAuthn.addVirtualAuthenticator", {"options": device})["authenticatorId"]
        sign_in(page, "ada")
        page.goto("/account/passkeys/add/")
        confirm(page)
        page.wait_for_url("**/account/passkeys/add/")
        page.fill("[name=name]", "Laptop")
        picture(page, "passkey-add")
        page.click("#add")
        page.wait_for_url("**/account/recovery-codes/")
        assert len(devtools.send("WebAuthn.getCredentials", {"authenticatorId": made})["credentials"]) == 1

        sign_out(page)
        page.goto("/sign-in/?next=/account/")
        page.click("#passkey")
        page.wait_for_url(ACCOUNT)
        assert "passkey</td>" in page.content()

        sign_out(page)
        sign_in(page, "ada")
        page.wait_for_url("**/sign-in/second-factor/")
        page.click("#passkey")
        page.wait_for_url(ACCOUNT)
        page.click("button:has-text('Remove'):has-text('Laptop')")
        page.click("a:has-text('Use a security key')")
        page.wait_for_url("**/account/confirm/passkey/**")
        picture(page, "confirm-passkey")
        page.click("#passkey")
        page.wait_for_url(ACCOUNT)
        page.click("button:has-text('Remove'):has-text('Laptop')")
        assert "Removed the passkey Laptop." in page.content()

        sign_out(page)
        page.click("#passkey")
        page.wait_for_selector("text=This passkey was not taken")
        devtools.send("WebAuthn.removeVirtualAuthenticator", {"authenticatorId": made})
    assert elsewhere(actions_of, "ada") == ["factor.add", "factor.remove"]
