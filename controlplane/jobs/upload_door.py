"""POST /v1/files beside Django: the key is checked before a byte is read, and bytes go to the store as they come.

Django would first put the whole body on the disk of the web process, for anybody. Here an upload is bounded by
JOB_FILE_LIMIT_BYTES and by time, and memory by a few parts, whatever is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from django.conf import settings
from django.db import OperationalError, close_old_connections
from django.utils import timezone
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from controlplane.jobs import uploads
from controlplane.jobs.key_authentication import actor_of_key, key_of
from controlplane.jobs.models import StoredFile
from controlplane.jobs.openai_form import error_form, file_form
from controlplane.jobs.storage import StorageError, Writing, Written
from controlplane.tenants.models import ApiKey, Tenant

log = logging.getLogger(__name__)

PATH: Final = "/v1/files"
FIELD_BYTES_MOST: Final = 1_000
STALL_S: Final = 60.0
BYTES_PER_S_LEAST: Final = 16 * 1024
"""On average, after STALL_S: who sends a byte now and then would keep one of the few places for ever."""
UPLOADS_MOST: Final = 8
UPLOADS_OF_TENANT_MOST: Final = 4
"""Half of the places: a tenant that takes all it gets leaves room for the others."""

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


class Refusal(Exception):
    """An upload that is not taken, as the client is told."""

    def __init__(self, status: int, message: str, *, code: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind


@dataclass
class _Part:
    name: str = ""
    filename: str = ""


class Form:
    """Reads a form of the fields `purpose` and `file`, in any order; the file's bytes go to `sink` as they come."""

    def __init__(self, boundary: bytes, sink: Callable[[bytes], None]) -> None:
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.ended = False
        self._sink = sink
        self._part = _Part()
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_begin": self._header_begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Raises Refusal for what is no such form."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise Refusal(400, f"The form cannot be read: {error}.", code="invalid_form") from None

    def _begin(self) -> None:
        self._part = _Part()

    def _header_begin(self) -> None:
        self._header = (b"", b"")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._bounded(self._header[0] + data[start:end]), self._header[1])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._bounded(self._header[1] + data[start:end]))

    @staticmethod
    def _bounded(text: bytes) -> bytes:
        if len(text) > FIELD_BYTES_MOST:
            raise Refusal(400, "A field of the form is too long.", code="invalid_form")
        return text

    def _header_end(self) -> None:
        if self._header[0].lower() != b"content-disposition":
            return
        _, options = parse_options_header(self._header[1])
        self._part.name = options.get(b"name", b"").decode("utf-8", "replace")
        self._part.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _headers_end(self) -> None:
        if self._part.name != "file":
            return
        if self.filename is not None:
            raise Refusal(400, "Send one file.", code="invalid_form")
        self.filename = self._part.filename

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == "file":
            self._sink(data[start:end])
        elif len(self.fields) < 20:
            self.fields[self._part.name] = self._bounded(self.fields.get(self._part.name, b"") + data[start:end])

    def _end(self) -> None:
        self.ended = True


class UploadDoor:
    """An ASGI application for uploads; every other request goes to `fallback`."""

    def __init__(self, fallback: Application) -> None:
        self._fallback = fallback
        self._threads = ThreadPoolExecutor(UPLOADS_MOST, thread_name_prefix="upload")
        self._running = 0
        self._of_tenant: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        upload = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].rstrip("/") == PATH
        if not upload:
            await self._fallback(scope, receive, send)
            return
        status, document = await self._answer(scope, receive)
        body = msgspec.json.encode(document)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-content-type-options", b"nosniff"),
            # what was refused is not read to its end, so the connection cannot be used again
            *([(b"connection", b"close")] if status >= 400 else []),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        try:
            if self._running >= UPLOADS_MOST:
                raise Refusal(503, "Too many uploads at once. Try again in a moment.", code="busy", kind="server_error")
            self._running += 1
            try:
                return 200, await self._take(scope, receive)
            finally:
                self._running -= 1
        except Refusal as refusal:
            return refusal.status, error_form(str(refusal), kind=refusal.kind, code=refusal.code)
        except (OperationalError, TimeoutError, StorageError) as error:
            log.warning("an upload was not taken: %s", error)
            return 503, error_form("The file was not stored. Send it again.", kind="server_error", code="busy")
        except Exception:
            log.exception("an upload failed")
            return 500, error_form("A fault of the control plane, which is in its log.", kind="server_error")

    async def _take(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        headers = {name.lower(): value for name, value in scope["headers"]}
        boundary = _boundary(headers)
        key = await self._blocking(_key, headers.get(b"authorization", b"").decode("latin-1"))
        limit = settings.JOB_FILE_LIMIT_BYTES
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit + 65_536:
            raise _too_large(limit)
        with self._place_of(key.tenant):
            row = await self._blocking(_begin, key)
            writing = await self._blocking(Writing, row.path)
            with writing:
                form = await self._read(receive, boundary, writing, limit)
                _check(form)
                written = await self._blocking(writing.finish)
            return await self._blocking(_publish, row, written, form.filename or "", key)

    @contextmanager
    def _place_of(self, tenant: Tenant) -> Iterator[None]:
        """One of the places of a tenant in this process."""
        if self._of_tenant[tenant.pk] >= UPLOADS_OF_TENANT_MOST:
            message = f"{UPLOADS_OF_TENANT_MOST} uploads of {tenant.slug} run already. Wait until one of them ends."
            raise Refusal(429, message, code="too_many_uploads", kind="rate_limit_error")
        self._of_tenant[tenant.pk] += 1
        try:
            yield
        finally:
            self._of_tenant[tenant.pk] -= 1

    async def _read(self, receive: Receive, boundary: bytes, writing: Writing, limit: int) -> Form:
        pieces: list[bytes] = []
        form = Form(boundary, pieces.append)
        clock, received = asyncio.get_running_loop().time, 0
        began = clock()
        while True:
            async with asyncio.timeout(STALL_S):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "The connection ended inside the body.", code="invalid_form")
            received += len(message.get("body", b""))
            if (passed_s := clock() - began) > STALL_S and received < passed_s * BYTES_PER_S_LEAST:
                raise Refusal(408, f"Send at least {BYTES_PER_S_LEAST:,} bytes a second.", code="too_slow")
            form.feed(message.get("body", b""))
            more = message.get("more_body", False)
            if pieces and (not more or sum(map(len, pieces)) >= 1024 * 1024):
                await self._blocking(writing.write, b"".join(pieces))
                pieces.clear()
            if writing.size_bytes > limit:
                raise _too_large(limit)
            if not more:
                return form

    async def _blocking(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _fresh, function, *arguments)


def _fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    close_old_connections()
    try:
        return function(*arguments)
    finally:
        close_old_connections()


def _boundary(headers: dict[bytes, bytes]) -> bytes:
    kind, options = parse_options_header(headers.get(b"content-type", b""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        raise Refusal(400, "Send a form (multipart/form-data) with purpose and file.", code="invalid_form")
    return bytes(boundary)


def _key(authorization: str) -> ApiKey:
    scheme, _, secret = authorization.partition(" ")
    key = key_of(secret.strip(), timezone.now()) if scheme.lower() == "bearer" else None
    if key is None:
        message = "This API key is unknown, revoked or expired. Use a key that is in force."
        raise Refusal(401, message, code="invalid_api_key", kind="authentication_error")
    if key.tenant.state != Tenant.State.ACTIVE:
        raise Refusal(403, f"The tenant {key.tenant.slug} is {key.tenant.state}.", code="tenant_suspended")
    return key


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"The file may have at most {limit:,} bytes. Split it into several.", code="file_too_large")


def _check(form: Form) -> None:
    if not form.ended:
        raise Refusal(400, "The form breaks off.", code="invalid_form")
    purpose = form.fields.get("purpose", b"").decode("utf-8", "replace")
    if purpose != StoredFile.Purpose.BATCH:
        raise Refusal(400, f"The purpose {purpose!r} is not one of ours: use batch.", code="invalid_purpose")
    if form.filename is None:
        raise Refusal(400, "The form has no file.", code="invalid_form")


def _begin(key: ApiKey) -> StoredFile:
    return uploads.begin(tenant=key.tenant, actor=actor_of_key(key), now=timezone.now())


def _publish(row: StoredFile, written: Written, filename: str, key: ApiKey) -> dict[str, Any]:
    return file_form(uploads.publish(row, written, filename=filename, actor=actor_of_key(key), now=timezone.now()))
