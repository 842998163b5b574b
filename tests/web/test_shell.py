"""The frame around pages: navigation by role, headers, error pages, the style guide."""

import io
import re
import uuid

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import include, path
from rest_framework.exceptions import ParseError

from controlplane.web import navigation, views
from controlplane.web.parsers import BoundedJSONParser


def page(request):
    return HttpResponse("ok")


def forbid(request):
    raise PermissionDenied("Your role does not include pool.write.")


def fail(request):
    raise RuntimeError("boom")


def slow_down(request):
    return views.too_many_requests(request, retry_after=30)


NAMES = ("pools", "agents", "policy", "contracts", "tenants", "members", "finance", "budgets", "audit", "settings")
urlpatterns = [
    path("", page, name="home"),
    *(path(f"{name}/", page, name=name) for name in NAMES),
    path("forbid/", forbid),
    path("fail/", fail),
    path("api/v1/fail/", fail),
    path("slow/", slow_down),
    path("", include("controlplane.web.urls")),
]
handler400 = "controlplane.web.views.bad_request"
handler403 = "controlplane.web.views.permission_denied"
handler404 = "controlplane.web.views.page_not_found"
handler500 = "controlplane.web.views.server_error"

own_urls = override_settings(ROOT_URLCONF=__name__)
calm = Client(raise_request_exception=False)


@own_urls
def test_primary_row_by_role():
    def labels(role):
        return [link.label for link in navigation.primary_links(role, "/")]

    assert labels("admin") == ["Live", "Pools", "Policy", "Tenants", "Finance", "Audit", "Settings"]
    assert "Settings" in labels("viewer")
    assert labels("tenant") == ["Tenants"]
    assert labels("") == []


@own_urls
@pytest.mark.parametrize(
    ("where", "section"),
    [
        ("/", "live"),
        ("/contracts/chat/", "policy"),
        ("/budgets/", "finance"),
        ("/tenants/acme/", "tenants"),
        ("/x/", None),
    ],
)
def test_the_section_follows_the_address(where, section):
    assert navigation.section_of("admin", where) == section
    current = [link.key for link in navigation.primary_links("admin", where, current_key=section) if link.current]
    assert current == ([section] if section else [])


@own_urls
def test_sub_row_marks_one_and_hides_itself_when_alone():
    links = navigation.sub_links("policy", "admin", "/contracts/chat/edit/")
    assert [link.label for link in links if link.current] == ["Contracts"]
    assert navigation.sub_links("live", "admin", "/") == []
    assert navigation.sub_links("tenants", "viewer", "/tenants/") == []


@own_urls
def test_headers_on_every_answer():
    response = calm.get("/")
    assert uuid.UUID(response.headers["X-Request-Id"])
    assert response.headers["X-Request-Id"] != calm.get("/").headers["X-Request-Id"]
    policy = response.headers["Content-Security-Policy"]
    assert "script-src 'self';" in policy + ";"
    assert "unsafe-eval" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "private, no-cache"


@own_urls
def test_a_request_id_of_the_client_is_not_taken_over():
    sent = str(uuid.uuid4())
    assert calm.get("/", headers={"x-request-id": sent}).headers["X-Request-Id"] != sent


@own_urls
@pytest.mark.parametrize(
    ("where", "status", "word"),
    [
        ("/nowhere/", 404, "not yours to see"),
        ("/forbid/", 403, "pool.write"),
        ("/fail/", 500, "Something failed"),
        ("/slow/", 429, "Wait 30 s"),
    ],
)
def test_error_pages_say_what_to_do_and_name_the_request(where, status, word):
    response = calm.get(where, headers={"accept": "text/html"})
    assert response.status_code == status
    text = response.content.decode()
    assert word in text
    assert response.headers["X-Request-Id"] in text
    assert "boom" not in text


@own_urls
def test_programs_get_a_problem_document():
    response = calm.get("/api/v1/fail/")
    assert response.status_code == 500
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json()["request_id"] == response.headers["X-Request-Id"]
    assert calm.get("/nowhere/", headers={"accept": "application/json"}).json()["status"] == 404
    assert calm.get("/slow/").headers["Retry-After"] == "30"


def test_csrf_failure_says_what_to_do():
    response = views.csrf_failure(RequestFactory().post("/x/", headers={"accept": "text/html"}))
    assert response.status_code == 403
    assert "security token is missing or old" in response.content.decode()


@own_urls
def test_style_guide_is_for_staff_users(db):
    assert calm.get("/styleguide/").status_code == 404
    client = Client()
    user = User.objects.create_user("plain", password="correct horse battery")
    client.force_login(user)
    assert client.get("/styleguide/").status_code == 404
    user.is_staff = True
    user.save(update_fields=["is_staff"])
    response = client.get("/styleguide/")
    assert response.status_code == 200
    html = response.content.decode()
    nonce = re.search(r"'nonce-([^']+)'", response.headers["Content-Security-Policy"])[1]
    assert f'nonce="{nonce}"' in html
    assert "<title>(1 breached) Style guide" in html
    assert "favicon-bad.svg" in html
    inline = re.findall(r"<script(?![^>]*(?:src=|application/json))[^>]*>", html)
    assert inline == []
    assert not re.search(r"\son[a-z]+=", html)


@own_urls
@pytest.mark.parametrize(
    ("cookie", "attribute"), [("dark", ' data-theme="dark"'), ("light", ' data-theme="light"'), ("x", "")]
)
def test_the_theme_cookie_is_written_into_the_page(cookie, attribute):
    client = Client(raise_request_exception=False)
    client.cookies["flexband_theme"] = cookie
    html = client.get("/nowhere/", headers={"accept": "text/html"}).content.decode()
    assert f'<html lang="en"{attribute}>' in html


@own_urls
def test_an_address_with_a_zero_character_is_the_askers_mistake():
    answer = calm.get("/tenants/?q=%00")
    assert answer.status_code == 400
    assert "zero character" in answer.content.decode()
    assert answer.headers["X-Request-Id"]
    assert calm.get("/tenants/?q=100%25").status_code == 200
    assert calm.get("/api/v1/fail/?q=a%00b").json()["status"] == 400


def test_json_that_is_nested_without_end_is_the_senders_mistake():
    with pytest.raises(ParseError, match="nested too deeply"):
        BoundedJSONParser().parse(io.BytesIO(b"[" * 100_000 + b"]" * 100_000))
    assert BoundedJSONParser().parse(io.BytesIO(b'{"a": [1]}')) == {"a": [1]}
