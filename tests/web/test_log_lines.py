"""Log lines carry the request's id, and never what people and agents keep secret."""

import logging

import pytest
import structlog
from django.conf import settings
from django.test import Client

from controlplane.web.log_lines import RequestIdFilter
from tests import factories

PASSWORD = "correct horse battery"


def line(message: str) -> str:
    """The message as the configured formatter prints it."""
    record = logging.LogRecord("controlplane.test", logging.WARNING, __file__, 1, message, (), None)
    assert RequestIdFilter().filter(record)
    return logging.Formatter(settings.LOGGING["formatters"]["line"]["format"]).format(record)


def test_a_line_names_its_request_and_a_dash_without_one():
    assert line("outside").endswith("WARNING controlplane.test - outside")
    with structlog.contextvars.bound_contextvars(request_id="6f1c"):
        assert line("inside").endswith("WARNING controlplane.test 6f1c inside")
    assert settings.LOGGING["handlers"]["stderr"]["filters"] == ["request_id"]


@pytest.mark.django_db
def test_signing_in_and_a_key_leave_no_secret_in_the_log(caplog):
    caplog.set_level(logging.DEBUG)
    factories.installation()
    factories.person("viewer")
    client = Client()
    assert client.post("/sign-in/", {"username": "viewer", "password": "wrong horse battery"}).status_code == 400
    assert client.post("/sign-in/", {"username": "viewer", "password": PASSWORD}).status_code == 302
    answer = client.get("/api/v1/jobs/", headers={"authorization": "Bearer fb_test_not-a-known-key"})
    assert answer.status_code == 401
    for secret in (PASSWORD, "wrong horse battery", "fb_test_not-a-known-key", client.cookies["sessionid"].value):
        assert secret not in caplog.text
