"""Static files under ASGI: sent as they are read, and what needs no file takes no thread."""

import asyncio
import warnings
from pathlib import Path

import pytest
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.test import RequestFactory

from controlplane.web import static_files
from controlplane.web.static_files import FileAnswer, StaticFilesMiddleware
from tests.bodies import body_of

NAME = "vendor/plotly-cartesian.min.js"
FILE = Path(settings.BASE_DIR) / "static" / NAME


def nothing(request):
    raise AssertionError(f"{request.path} is no static file")


@pytest.fixture(scope="module")
def files():
    return StaticFilesMiddleware(nothing)


@pytest.fixture
def ask(files):
    return lambda **headers: files(RequestFactory().get(f"{settings.STATIC_URL}{NAME}", headers=headers))


async def test_the_first_piece_goes_out_before_the_rest_is_read(ask):
    answer = ask()
    pieces = aiter(answer)
    first = await anext(pieces)
    assert len(first) == answer.file_to_stream.tell() == FileAnswer.block_size < FILE.stat().st_size
    assert first + b"".join([piece async for piece in pieces]) == FILE.read_bytes()
    answer.close()


def test_it_is_the_same_under_wsgi(ask):
    answer = ask()
    assert body_of(answer) == FILE.read_bytes()
    assert int(answer["Content-Length"]) == FILE.stat().st_size
    assert answer["Content-Type"].startswith("text/javascript") and "Content-Disposition" not in answer


async def test_what_did_not_change_is_told_without_a_file_or_a_thread(ask, monkeypatch):
    whole = ask()
    monkeypatch.setattr(static_files, "pulled", None)
    answer = ask(if_modified_since=whole["Last-Modified"])
    assert (answer.status_code, [piece async for piece in answer]) == (304, [])
    whole.close()


async def test_a_part_is_that_part(ask):
    answer = ask(range="bytes=100000-299999")
    assert answer.status_code == 206
    assert b"".join([piece async for piece in answer]) == FILE.read_bytes()[100_000:300_000]
    answer.close()


async def test_the_web_process_streams_it():
    """Through all middleware, as a server asks; Django warns of what it has to read whole."""
    scope = {
        "type": "http", "method": "GET", "path": f"{settings.STATIC_URL}{NAME}", "query_string": b"", "headers": [],
        "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    asked, sent = asyncio.Event(), []

    async def receive():
        if not asked.is_set():
            asked.set()
            return {"type": "http.request", "body": b"", "more_body": False}
        return await asyncio.Future()

    async def send(message):
        sent.append(message)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await get_asgi_application()(scope, receive, send)
    head, *bodies = sent
    assert head["status"] == 200
    assert b"".join(message.get("body", b"") for message in bodies) == FILE.read_bytes()
