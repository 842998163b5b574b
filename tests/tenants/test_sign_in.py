"""Signing in and out: limits on tries, what happens without a cache, passwords, where a person begins."""

import socket
import time

import pytest
from django.core.cache import cache
from django.test import Client

from controlplane.tenants import throttle
from tests import factories
from tests.windows import begin_in_one_window

PASSWORD = "correct horse battery"


@pytest.fixture(autouse=True)
def clean_cache():
    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def no_cache(settings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings.CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": f"redis://127.0.0.1:{port}/0",
        }
    }


def sign_in(name: str = "viewer", password: str = PASSWORD, address: str = "192.0.2.1", client: Client | None = None):
    return (client or Client(REMOTE_ADDR=address)).post("/sign-in/", {"username": name, "password": password})


@pytest.fixture
def one_window():
    begin_in_one_window(throttle.WINDOW_S, 15)


@pytest.mark.django_db
@pytest.mark.usefixtures("one_window")
class TestTries:
    def test_the_right_password_leads_to_the_start(self, people):
        response = sign_in()
        assert (response.status_code, response.url) == (302, "/start/")

    def test_a_wrong_one_says_so_and_keeps_the_name(self, people):
        response = sign_in(password="wrong")
        page = response.content.decode()
        assert response.status_code == 400 and 'value="viewer"' in page and "There is a problem" in page

    def test_after_five_tries_the_password_is_not_looked_at(self, people):
        for _ in range(5):
            assert sign_in(password="wrong").status_code == 400
        response = sign_in()
        page = response.content.decode()
        assert response.status_code == 429 and "Try again at" in page
        assert 1 <= int(response.headers["Retry-After"]) <= throttle.WINDOW_S

    def test_the_same_name_from_elsewhere_and_other_names_from_here_still_work(self, people):
        for _ in range(6):
            sign_in(password="wrong")
        assert sign_in(address="192.0.2.2").status_code == 302
        assert sign_in("oncall").status_code == 302

    def test_spelling_a_name_otherwise_is_no_way_around(self, people):
        for name in ("viewer", "VIEWER", " viewer", "Viewer ", "vIEWER"):
            sign_in(name, password="wrong")
        assert sign_in().status_code == 429

    def test_full_width_letters_and_spaces_are_no_other_name(self, people):
        names = ["\uff56iewer", "v\uff49ewer", "\uff56\uff49\uff45\uff57\uff45\uff52", " " * 148 + "viewer", "viewer"]
        assert sign_in(names[2]).status_code == 302, "the form takes it for the name"
        for name in names:
            assert sign_in(name, password="wrong").status_code == 400
        assert sign_in().status_code == 429

    def test_many_addresses_together_are_stopped_by_name(self, people):
        for number in range(throttle.LIMITS["name"]):
            assert throttle.enter("viewer", f"198.51.100.{number}", factories.NOW).open
        assert not throttle.enter("viewer", "203.0.113.9", factories.NOW).open

    def test_many_names_together_are_stopped_by_address(self, people):
        for number in range(throttle.LIMITS["address"]):
            assert throttle.enter(f"name-{number}", "198.51.100.1", factories.NOW).open
        gate = throttle.enter("viewer", "198.51.100.1", factories.NOW)
        assert not gate.open and gate.try_again_at > factories.NOW

    def test_signing_in_clears_the_count(self, people):
        for _ in range(4):
            sign_in(password="wrong")
        assert sign_in().status_code == 302
        for _ in range(4):
            assert sign_in(password="wrong").status_code == 400


@pytest.mark.django_db
def test_without_a_cache_tries_are_slow_and_the_right_password_still_works(people, no_cache, monkeypatch):
    monkeypatch.setattr(throttle, "SLOW_S", 0.3)
    for password, status in (("wrong", 400), (PASSWORD, 302)):
        started = time.monotonic()
        assert sign_in(password=password).status_code == status
        assert time.monotonic() - started >= 0.3


@pytest.mark.django_db
class TestSession:
    def test_it_gets_a_new_id_at_sign_in_and_ends_at_sign_out(self, people):
        client = Client()
        client.get("/sign-in/")
        sign_in(client=client)
        first = client.cookies["sessionid"].value
        assert client.get("/settings/").status_code == 200
        assert client.get("/sign-out/").status_code == 405, "a link must not sign anybody out"
        assert client.post("/sign-out/").url == "/sign-in/"
        client.cookies["sessionid"] = first
        assert client.get("/settings/").status_code == 302

    def test_a_page_of_elsewhere_is_no_place_to_go_next(self, people):
        response = Client().post(
            "/sign-in/", {"username": "viewer", "password": PASSWORD, "next": "https://evil.example/"}
        )
        assert response.url == "/start/"
        response = Client().post("/sign-in/", {"username": "viewer", "password": PASSWORD, "next": "/budgets/"})
        assert response.url == "/budgets/"

    def test_the_cookie_is_not_for_scripts(self, people):
        client = Client()
        sign_in(client=client)
        cookie = client.cookies["sessionid"]
        assert cookie["httponly"] and cookie["samesite"] == "Lax"

    @pytest.mark.parametrize("person,url", [("tenant", "/tenants/acme/"), ("admin", "/")])
    def test_where_a_person_begins(self, person, url, people):
        assert people[person].get("/start/").url == url

    def test_changing_the_password_keeps_this_session_and_ends_the_others(self, people):
        client = people["viewer"]
        other = Client()
        sign_in(client=other)
        new = "another long password 7"
        form = {"old_password": PASSWORD, "new_password1": new, "new_password2": new}
        assert client.post("/account/password/", form).status_code == 302
        assert client.get("/settings/").status_code == 200
        assert other.get("/settings/").status_code == 302
        assert sign_in(password=new).status_code == 302

    def test_the_old_password_must_be_right(self, people):
        form = {"old_password": "wrong", "new_password1": "another long 77", "new_password2": "another long 77"}
        response = people["viewer"].post("/account/password/", form)
        assert response.status_code == 400 and "There is a problem" in response.content.decode()
