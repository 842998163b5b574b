"""A passkey is offered only where a browser can use it, with why and what to do elsewhere."""

import pytest
from django.core.cache import cache
from django.test import Client, RequestFactory

from controlplane.access.passkeys import passkey_obstacle
from tests.access.walking import PASSWORD, person

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def everywhere(settings):
    settings.ALLOWED_HOSTS = ["*"]
    cache.clear()
    yield
    cache.clear()


@pytest.mark.parametrize("host,secure,said", [
    ("localhost:8000", False, ""),
    ("demo.localhost", False, ""),
    ("flexband.example", True, ""),
    ("flexband.example", False, "need https"),
    ("127.0.0.1:8000", False, "open http://localhost:8000/."),
    ("127.0.0.1", True, "open https://localhost/."),
    ("[::1]:8000", False, "open http://localhost:8000/."),
    ("10.0.0.7", True, "not an address in figures"),
])  # fmt: skip
def test_where(host, secure, said):
    request = RequestFactory().get("/", headers={"host": host}, secure=secure)
    found = passkey_obstacle(request)
    assert said in found and bool(found) == bool(said)


def test_the_installations_own_address_is_named_where_it_is_known(settings):
    settings.PUBLIC_URL = "https://flexband.example"
    request = RequestFactory().get("/", headers={"host": "10.0.0.7"})
    assert passkey_obstacle(request).endswith("Open https://flexband.example.")


def signed_in(installation, host):
    user = person("ada")
    client = Client(headers={"host": host})
    client.post("/sign-in/", {"username": user.username, "password": PASSWORD})
    client.post("/account/confirm/", {"password": PASSWORD, "next": "/account/"})
    return client


def test_pages_offer_none_by_an_address_in_figures(installation):
    client = signed_in(installation, "127.0.0.1:8000")
    for url in ("/sign-in/", "/account/"):
        page = client.get(url).content.decode()
        assert "open http://localhost:8000/." in page
        assert 'id="passkey"' not in page and "/account/passkeys/add/" not in page
    response = client.get("/account/passkeys/add/", follow=True)
    assert response.redirect_chain[-1][0] == "/account/"


def test_pages_offer_them_by_name(installation):
    client = signed_in(installation, "localhost:8000")
    assert 'id="passkey"' in client.get("/sign-in/").content.decode()
    assert "/account/passkeys/add/" in client.get("/account/").content.decode()
