"""The examples of docs/rest.md work as they stand there, and every noun of the REST description has one."""

import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils import timezone
from drf_spectacular.generators import SchemaGenerator

from controlplane.policy.applying import export_text
from tests.access.test_page_forms import just_confirmed
from tests.architecture.compose_file import ROOT
from tests.operations.rest_world import World, value_of

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
INVOICE = b"BilledCost,BillingCurrency,ChargePeriodStart\n1.5,EUR,2026-10-02T00:00:00Z\n"
BODY_OPTIONS = ("-d", "--data", "-F")
VALUE_OPTIONS = (*BODY_OPTIONS, "-H", "-X", "-b", "-o", "--request")


@dataclass
class Example:
    """A call of curl: `path` begins with /api/v1/, `query` has its question mark."""

    text: str
    method: str = "GET"
    path: str = ""
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    with_session: bool = False


def examples_of(text: str) -> list[Example]:
    """The calls to /api/v1/ of a document."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line.strip() for line in joined.splitlines()]
    found = [read(line) for line in lines if line.startswith("curl ") and ("$API" in line or "/api/v1/" in line)]
    return [example for example in found if example.path]


def read(line: str) -> Example:
    words, example, method = shlex.split(re.sub(r'"\$\((jq|uuidgen)[^"]*"', "FILLED", line))[1:], Example(line), ""
    while words:
        word = words.pop(0)
        value = words.pop(0) if word in VALUE_OPTIONS else ""
        if word in ("-X", "--request"):
            method = value
        elif word == "-H" and ":" in value:
            name, _, content = value.partition(":")
            example.headers |= {} if name == "Authorization" else {name: content.strip()}
        elif word in BODY_OPTIONS:
            example.parts.append(value)
        elif word == "-b":
            example.with_session = True
        elif "$API/" in word or "/api/v1/" in word:
            address = word.replace("$API/", "/api/v1/")
            path, mark, query = address[address.index("/api/v1/") :].partition("?")
            example.path, example.query = path, mark + query
    example.method = method or ("POST" if example.parts else "GET")
    return example


@pytest.fixture(scope="module")
def description():
    return SchemaGenerator().get_schema(request=None, public=True)


def operation_of(description, example):
    """(template, operation) of a call; the template with the fewest arguments, None where there is none."""
    fitting = [
        path
        for path, methods in description["paths"].items()
        if example.method.lower() in methods
        and re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", path).rstrip("/") + "/?", example.path)
    ]
    if not fitting:
        return None
    path = min(fitting, key=lambda one: one.count("{"))
    return path, description["paths"][path][example.method.lower()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_documents_call_is_in_the_description(document, description):
    for example in examples_of(document.read_text()):
        assert operation_of(description, example), f"{document.name}: {example.method} {example.path}"


def test_every_noun_has_an_example(description):
    nouns = {tag for methods in description["paths"].values() for one in methods.values() for tag in one["tags"]}
    told = {
        tag
        for example in examples_of((ROOT / "docs/rest.md").read_text())
        for tag in operation_of(description, example)[1]["tags"]
    }
    assert told == nouns


def test_operations_have_names_of_their_own(description):
    names = Counter(one["operationId"] for methods in description["paths"].values() for one in methods.values())
    assert [name for name, count in names.items() if count > 1] == []


def test_statuses_stand_with_their_reasons(description):
    told = set(re.findall(r"^\| (\d{3}) \|", (ROOT / "docs/rest.md").read_text(), flags=re.M))
    answered = {
        status
        for methods in description["paths"].values()
        for operation in methods.values()
        for status in operation["responses"]
        if status.startswith("4")
    }
    assert told == answered


def test_every_example_works(db, settings, tmp_path, description):
    settings.JOB_STORAGE = str(tmp_path)
    world, failed = World(), []
    caller, browser = Client(headers=world.headers), world.people["admin"]
    for example in examples_of((ROOT / "docs/rest.md").read_text()):
        world.begin(example.text)
        if example.with_session:
            just_confirmed(browser)
        template, operation = operation_of(description, example)
        response = send(browser if example.with_session else caller, example, real(template, example.path, operation))
        if response.status_code >= 300:
            failed.append(f"{response.status_code} {example.text}\n    {b''.join(response)[:300]!r}")
    assert not failed, "\n".join(failed)


def real(template, path, operation):
    """The address with the rows of the world in place of the document's."""
    parts = path.strip("/").split("/")
    for place, word in enumerate(template.strip("/").split("/")):
        if word.startswith("{"):
            parameter = next(one for one in operation["parameters"] if one["name"] == word.strip("{}"))
            known = value_of(template, parameter)
            parts[place] = parts[place] if known is None else str(known)
    return "/" + "/".join(parts) + "/"


def send(client, example, path):
    call = getattr(client, example.method.lower())
    if any(part.startswith("file=@") for part in example.parts):
        named = dict(part.split("=", 1) for part in example.parts)
        named["file"] = SimpleUploadedFile(named["file"].removeprefix("@"), INVOICE)
        return call(path, named, headers=example.headers)
    if example.method == "GET":
        return call(path + example.query, headers=example.headers)
    tomorrow = (timezone.now() + timedelta(days=1)).isoformat()
    body = re.sub(r"20\d\d-\d\d-\d\dT06:00:00Z", tomorrow, example.parts[0]) if example.parts else ""
    if body == "FILLED":
        body = json.dumps({"text": export_text(timezone.now())})
    return call(path, body, content_type="application/json", headers=example.headers)
