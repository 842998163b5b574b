"""Second factors without a browser: roles that must have one, tries, lost phones, secrets at rest."""

import time

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP
from django.contrib.auth.models import User
from django.core.cache import cache
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from controlplane.access.adapters import FactorAdapter
from controlplane.access.token_actions import create_token
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.tenants.access import lacks_second_factor
from controlplane.tenants.key_actions import create_key
from controlplane.tenants.models import Tenant
from tests.access.test_page_forms import just_confirmed
from tests.access.walking import code_of

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"
SECRET = "JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP"


@pytest.fixture(autouse=True)
def clean_cache():
    cache.clear()
    yield
    cache.clear()


def with_app(name):
    user = User.objects.get(username=name)
    TOTP.activate(user, SECRET)
    RecoveryCodes.activate(user)
    return user


def password_given(name, client=None):
    client = client or Client()
    answer = client.post("/sign-in/", {"username": name, "password": PASSWORD, "next": "/settings/"})
    return client, answer.url


def code_given(client, code):
    return client.post("/sign-in/second-factor/", {"code": code})


def test_the_password_alone_is_not_in(people):
    with_app("viewer")
    client, url = password_given("viewer")
    assert url == "/sign-in/second-factor/"
    assert client.get("/settings/").status_code == 302 and client.get("/api/v1/tenants/").status_code == 401
    assert code_given(client, code_of(SECRET)).url == "/settings/"
    assert client.get("/settings/").status_code == 200


def test_the_form_of_the_code_needs_its_token(people):
    with_app("viewer")
    client = Client(enforce_csrf_checks=True)
    token = client.get("/sign-in/").content.decode().split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]
    form = {"username": "viewer", "password": PASSWORD, "csrfmiddlewaretoken": token}
    assert client.post("/sign-in/", form).url == "/sign-in/second-factor/"
    assert code_given(client, code_of(SECRET)).status_code == 403


def test_a_code_works_once(people):
    with_app("viewer")
    code = code_of(SECRET)
    client, _ = password_given("viewer")
    assert code_given(client, code).status_code == 302
    other, _ = password_given("viewer")
    assert code_given(other, code).status_code == 400
    assert code_given(other, code_of(SECRET, 1)).status_code == 302


def test_after_five_wrong_codes_the_right_one_waits_too(people):
    with_app("viewer")
    wrong = "000000" if code_of(SECRET) != "000000" else "111111"
    client, _ = password_given("viewer")
    for _ in range(5):
        assert code_given(client, wrong).status_code == 400
    answer = code_given(client, code_of(SECRET))
    assert answer.status_code == 400 and "Wait five minutes" in answer.content.decode()
    elsewhere, _ = password_given("viewer", Client(REMOTE_ADDR="192.0.2.77"))
    assert code_given(elsewhere, code_of(SECRET)).status_code == 400, "another address is no way around"


@pytest.fixture
def admins_need_one(settings):
    settings.SECOND_FACTOR_ROLES = frozenset({"admin"})


def test_a_role_that_must_have_one_reaches_only_its_account(people, admins_need_one):
    client, _ = password_given("admin")
    for url in ("/settings/", "/", "/tenants/", "/settings/members/", "/account/tokens/new/"):
        answer = client.get(url)
        assert (answer.status_code, answer.url) == (302, "/account/"), url
    assert client.get("/api/v1/tenants/").status_code == 403
    assert "Your role needs a second factor." in client.get("/account/").content.decode()
    viewer, _ = password_given("viewer")
    assert viewer.get("/settings/").status_code == 200
    just_confirmed(client)
    secret, again = (
        client.get("/account/app/add/").content.decode().split('id="secret">')[1].split("<")[0] for _ in range(2)
    )
    assert secret == again, "a page that is loaded again keeps what the phone has scanned"
    assert client.post("/account/app/add/", {"code": code_of(secret)}).url == "/account/recovery-codes/"
    assert client.get("/settings/").status_code == 200
    just_confirmed(client)
    client.post("/account/app/remove/")
    assert client.get("/settings/").url == "/account/"
    told = AuditEntry.objects.filter(object_id="admin").order_by("id").values_list("action", flat=True)
    assert list(told) == ["factor.add", "factor.remove"]


def test_keys_and_tokens_are_not_asked_for_one(people, settings):
    settings.SECOND_FACTOR_ROLES = frozenset({"tenant", "admin"})
    assert people["tenant"].get("/api/v1/tenants/").status_code == 403
    user = User.objects.get(username="admin")
    token = create_token(
        user_id=user.pk, name="x", permissions=["tenant.read"], days=1, actor=Actor(user.pk, "admin", "admin"),
        now=timezone.now(),
    )  # fmt: skip
    acme = Tenant.objects.get(slug="acme")
    key = create_key(
        tenant_id=acme.pk, name="k", classes=["chat"], default_class="chat", actor=Actor(None, "ada", "admin"),
        now=timezone.now(),
    )  # fmt: skip
    for secret, path in ((token.secret, "/api/v1/tenants/"), (key.secret, "/api/v1/jobs/")):
        assert Client().get(path, headers={"authorization": f"Bearer {secret}"}).status_code == 200


def test_the_rule_itself(settings):
    settings.SECOND_FACTOR_ROLES = frozenset({"admin"})
    assert lacks_second_factor("admin", {}) and not lacks_second_factor("admin", {"second_factor": True})
    assert not lacks_second_factor("viewer", {}) and not lacks_second_factor(None, {})


@pytest.mark.parametrize("path", ["app/remove", "recovery-codes/new"])
def test_what_was_confirmed_too_long_ago_is_asked_again(people, path):
    with_app("viewer")
    client = people["viewer"]
    just_confirmed(client)
    session = client.session
    session["account_authentication_methods"] = [
        {"method": "password", "at": time.time() - 301, "reauthenticated": True}
    ]
    session["second_factor"] = True
    session.save()
    assert client.post(f"/account/{path}/").url.startswith("/account/confirm/")
    assert Authenticator.objects.filter(type="totp").exists()
    assert client.get("/account/app/add/").status_code == 302


def test_an_administrator_removes_what_was_lost_with_a_reason(people):
    user = with_app("viewer")
    number = user.member.pk
    url = f"/settings/members/{number}/access/factors/remove/"
    people["admin"].post(url, {"reason": ""})
    assert Authenticator.objects.filter(user=user).count() == 2
    assert people["oncall"].post(url, {"reason": "x"}).status_code == 403
    people["admin"].post(url, {"reason": "phone lost, asked in person"})
    assert not Authenticator.objects.filter(user=user).exists()
    entry = AuditEntry.objects.get(action="factor.reset")
    assert entry.reason == "phone lost, asked in person" and entry.before == {"kinds": ["recovery_codes", "totp"]}
    assert people["viewer"].get("/settings/").status_code == 302, "all sessions ended"
    assert password_given("viewer")[1] == "/settings/"


def test_secrets_lie_encrypted_and_another_key_makes_no_guessable_one(people, settings):
    with_app("viewer")
    stored = Authenticator.objects.get(type="totp").data["secret"]
    assert SECRET not in stored and FactorAdapter().decrypt(stored) == SECRET
    settings.SECRET_KEY = "another"
    first, second = FactorAdapter().decrypt(stored), FactorAdapter().decrypt(stored)
    assert SECRET not in (first, second) and first != second


def test_the_command_is_the_last_way_back_in(people, capsys):
    with_app("admin")
    call_command("remove_factors", "ADMIN", "--reason", "phone lost")
    assert "removed 2 of admin" in capsys.readouterr().out
    assert AuditEntry.objects.get(action="factor.reset").reason == "phone lost"
    assert password_given("admin")[1] == "/settings/"
    with pytest.raises(CommandError, match="nobody signs in as grace"):
        call_command("remove_factors", "grace", "--reason", "x")


def test_a_session_from_before_the_factor_changes_nothing_about_how_one_gets_in(people):
    early, _ = password_given("viewer")
    user = with_app("viewer")
    for path in ("/account/app/remove/", "/account/recovery-codes/new/", "/account/passkeys/add/"):
        assert early.post(path).url == "/account/"
    for path in ("/account/recovery-codes/", "/account/passkeys/add/", "/account/tokens/new/"):
        assert early.get(path).url == "/account/"
    assert Authenticator.objects.filter(user=user).count() == 2
    late, _ = password_given("viewer")
    code_given(late, code_of(SECRET))
    assert late.post("/account/app/remove/").url.startswith("/account/confirm/"), "asked who it is, not turned away"
