"""Bodies of REST requests: none is read without an end, wherever it is sent."""

import io
import json

import pytest
from django.conf import settings as project
from django.urls import get_resolver
from rest_framework.parsers import JSONParser

from controlplane.tenants.models import Tenant
from controlplane.web.parsers import BodyTooLarge, BoundedJSONParser

pytestmark = pytest.mark.django_db
MOST = project.DATA_UPLOAD_MAX_MEMORY_SIZE


def rest_views():
    def walk(patterns, above):
        for entry in patterns:
            path = above + str(entry.pattern)
            if hasattr(entry, "url_patterns"):
                yield from walk(entry.url_patterns, path)
            elif view := getattr(entry.callback, "cls", None):
                yield path, view

    return [(path, view) for path, view in walk(get_resolver().url_patterns, "") if path.startswith("api/v1/")]


def test_every_view_reads_json_up_to_the_limit():
    views = rest_views()
    assert len(views) > 50
    readers = [(path, parser) for path, view in views for parser in view.parser_classes]
    assert [found for found in readers if issubclass(found[1], JSONParser)]
    unbounded = [
        found for found in readers if issubclass(found[1], JSONParser) and not issubclass(found[1], BoundedJSONParser)
    ]
    assert unbounded == []


def sent(client, size, content_type="application/json", path="/api/v1/tenants/"):
    body = json.dumps({"slug": "large", "name": ""})[:-2].encode()
    return client.post(path, body + b"x" * (size - len(body) - 2) + b'"}', content_type=content_type)


def test_a_body_of_the_limit_is_read_and_one_byte_more_is_a_413(people):
    client = people["admin"]
    assert sent(client, MOST).status_code == 400, "read, and its name is too long"
    refused = sent(client, MOST + 1)
    assert (refused.status_code, refused.headers["Content-Type"]) == (413, "application/problem+json")
    assert refused.json()["code"] == "body_too_large" and f"{MOST:,} bytes" in refused.json()["title"]
    assert not Tenant.objects.filter(slug="large").exists()


@pytest.mark.parametrize("text", [r'{"slug": "a", "outage_posture": "\ud800"}', r'{"\uDFFF": 1}', r'["\ude00\ud83d"]'])
def test_half_a_character_is_refused_before_anybody_repeats_it(people, text):
    refused = people["admin"].post("/api/v1/tenants/", text, content_type="application/json")
    assert refused.status_code == 400 and "surrogate" in refused.json()["title"]


def test_a_whole_character_may_be_written_in_two_halves(people):
    body = r'{"slug": "smile", "name": "\ud83d\ude00", "classes": []}'
    assert people["admin"].post("/api/v1/tenants/", body, content_type="application/json").status_code == 201
    assert Tenant.objects.get(slug="smile").name == "\U0001f600"


@pytest.mark.parametrize("content_type", ["application/json", "application/cloudevents-batch+json"])
def test_events_of_other_gateways_too(people, content_type):
    refused = sent(people["admin"], MOST + 1, content_type, "/api/v1/usage/events/")
    assert refused.status_code == 413


def test_fields_of_a_form_too(people):
    fields = {"period": "2026-10", "note": "x" * (MOST + 1)}
    refused = people["admin"].post("/api/v1/invoices/", fields)
    assert (refused.status_code, refused.headers["Content-Type"]) == (413, "application/problem+json")
    many = {f"f{number}": "x" for number in range(project.DATA_UPLOAD_MAX_NUMBER_FIELDS + 1)}
    refused = people["admin"].post("/api/v1/invoices/", many)
    assert (refused.status_code, refused.headers["Content-Type"]) == (400, "application/problem+json")


def test_who_may_not_write_is_told_so_before_anything_is_read(people):
    assert sent(people["viewer"], MOST + 1).status_code == 403


def test_a_stream_that_nobody_measured_is_read_no_further_than_the_limit(settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 20
    body = io.BytesIO(b'{"a": "' + b"x" * 11 + b'"}')
    assert BoundedJSONParser().parse(body) == {"a": "x" * 11}
    body = io.BytesIO(b'{"a": "' + b"x" * 99 + b'"}')
    with pytest.raises(BodyTooLarge, match="more than 20 bytes"):
        BoundedJSONParser().parse(body)
    assert body.tell() == 21
