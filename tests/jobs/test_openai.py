"""The official client, unchanged, against the real web application: files, batches, and what it must not reach."""

from __future__ import annotations

import contextlib
import io
import json
import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import openai
import pytest
from django.conf import settings as django_settings
from django.db import IntegrityError, InterfaceError, OperationalError
from django.test import Client
from django.utils import timezone

from controlplane.jobs import assembly, batch_import, batch_sweep, tasks, upload_door
from controlplane.jobs.models import Batch, ItemHolder, Job, StoredFile
from controlplane.jobs.openai_api import openai_error
from controlplane.tenants import key_actions
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.usage.models import RollupDelta, UsageRecord
from tests import factories
from tests.jobs.batches import ADA, empty_items, jsonl, line
from tests.jobs.settling import run_all
from tests.jobs.web_server import serving
from tests.world import build_world


@pytest.fixture
def world(transactional_db, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    settings.INSECURE_LOOPBACK = True
    settings.SECURE_SSL_REDIRECT = False
    empty_items()
    ItemHolder.objects.all().delete()
    return build_world()


@pytest.fixture
def server(world):
    with serving() as address:
        yield address


def issue(tenant, classes=("bulk",)) -> str:
    return key_actions.create_key(
        tenant_id=tenant.pk, name="nightly", classes=list(classes), default_class=classes[0], actor=ADA,
        now=timezone.now(),
    ).secret  # fmt: skip


@pytest.fixture
def secret(world):
    return issue(world.tenant)


@pytest.fixture
def client(server, secret):
    return openai.OpenAI(api_key=secret, base_url=f"{server}/v1", max_retries=0, timeout=60)


def upload(client, content: bytes, name="night.jsonl"):
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch")


def imported(batch_id: str) -> Batch:
    batch = Batch.objects.get(uuid=batch_id.removeprefix("batch_"))
    batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    return batch


def test_a_night_with_the_official_client(client, world):
    content = jsonl([line(n) for n in range(1, 21)])
    uploaded = upload(client, content)
    assert (uploaded.bytes, uploaded.purpose, uploaded.filename) == (len(content), "batch", "night.jsonl")
    assert client.files.retrieve(uploaded.id).id == uploaded.id
    assert client.files.content(uploaded.id).read() == content
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"name": "invoices", "deadline": "06:00 Europe/Berlin"},
    )  # fmt: skip
    assert (batch.status, batch.request_counts.total) == ("validating", 0)
    imported(batch.id)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.total, batch.model) == ("in_progress", 20, "llama-70b")
    run_all(world, parked={7: "no such tool"})
    tasks.sweep()
    row = Batch.objects.get()
    assembly.begin(row.pk, timezone.now())
    assembly.assemble(row.pk, timezone.now())
    batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 19, 1)
    answers = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert [each["custom_id"] for each in answers] == [f"doc-{n}" for n in range(1, 21) if n != 7]
    assert answers[0]["response"]["status_code"] == 200
    assert answers[0]["response"]["body"] == {"line": 1}
    assert answers[0]["error"] is None
    (failure,) = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
    assert (failure["custom_id"], failure["error"]["message"]) == ("doc-7", "no such tool")
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at


def test_files_and_batches_are_listed_page_by_page_newest_first(client):
    files = [upload(client, jsonl([line(n)]), f"{n}.jsonl") for n in range(5)]
    assert [row.id for row in client.files.list(limit=2)] == [row.id for row in reversed(files)]
    batches = [
        client.batches.create(input_file_id=row.id, endpoint="/v1/chat/completions", completion_window="24h")
        for row in files
    ]
    first = client.batches.list(limit=2)
    assert ([row.id for row in first.data], first.has_more) == ([batches[4].id, batches[3].id], True)
    assert [row.id for row in client.batches.list(limit=2)] == [row.id for row in reversed(batches)]


@pytest.mark.parametrize("limit", ["²", "0", "-1", "", "101", "0000000010" + "0" * 30, "9" * 5_000])
def test_a_limit_that_is_none_is_refused(world, secret, limit):
    answer = Client(headers={"Authorization": f"Bearer {secret}"}).get("/v1/batches", {"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_a_file_whose_lines_cannot_be_run_fails_with_their_numbers(client):
    lines = [
        line(1), line(2, method="GET"), "not json", line(4, body={"model": "other"}), line(5, url="/v1/embeddings"),
        line(6, body={"stream": True}), line(7, body={"max_tokens": 10_000_000}), "", {"custom_id": "x"},
    ]  # fmt: skip
    uploaded = upload(client, jsonl(lines))
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    imported(batch.id)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "failed"
    found = [(error.line, error.code) for error in batch.errors.data]
    assert found == [
        (2, "invalid_method"), (3, "invalid_json_line"), (4, "mismatched_model"), (5, "invalid_url"),
        (6, "invalid_request"), (7, "output_too_long"), (9, "invalid_request"),
    ]  # fmt: skip
    assert all(error.message for error in batch.errors.data)


def test_a_doubled_custom_id_and_a_model_nobody_serves_fail(client):
    for content, code in (
        (jsonl([line(1), line(2), line(1)]), "duplicate_custom_id"),
        (jsonl([line(1, body={"model": "gpt-9"})]), "invalid_model"),
    ):
        batch = client.batches.create(
            input_file_id=upload(client, content).id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        imported(batch.id)
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", code)


def test_cancelling_ends_in_files_of_what_was_done(client, world):
    batch = client.batches.create(
        input_file_id=upload(client, jsonl([line(n) for n in range(1, 6)])).id, endpoint="/v1/chat/completions",
        completion_window="24h",
    )  # fmt: skip
    imported(batch.id)
    run_all(world, only=[1, 2])
    before = Job.objects.get().version
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert Job.objects.get().version > before, "who wrote what it was before is told by its ETag"
    tasks.sweep()
    row = Batch.objects.get()
    assembly.begin(row.pk, timezone.now())
    assembly.assemble(row.pk, timezone.now())
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "cancelled"
    assert len(client.files.content(batch.output_file_id).text.splitlines()) == 2
    undone = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
    assert [(each["custom_id"], each["error"]["code"]) for each in undone] == [
        (f"doc-{n}", "batch_cancelled") for n in (3, 4, 5)
    ]


def test_a_batch_cancelled_before_its_import_is_over(client):
    batch = client.batches.create(
        input_file_id=upload(client, jsonl([line(1)])).id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    client.batches.cancel(batch.id)
    tasks.sweep()
    assert client.batches.retrieve(batch.id).status == "cancelled"
    assert imported(batch.id).job is None


def test_a_batch_that_ran_out_of_time_expires_with_what_was_done(client, world):
    batch = client.batches.create(
        input_file_id=upload(client, jsonl([line(1), line(2)])).id, endpoint="/v1/chat/completions",
        completion_window="24h",
    )  # fmt: skip
    imported(batch.id)
    run_all(world, only=[1])
    later = timezone.now() + timedelta(hours=25)
    assert batch_sweep.expire(later) == 1
    tasks.sweep()
    row = Batch.objects.get()
    assembly.begin(row.pk, later)
    assembly.assemble(row.pk, later)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("expired", 1)
    assert json.loads(client.files.content(batch.error_file_id).text)["error"]["code"] == "batch_expired"


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"deadline": "tomorrow"}, "metadata.deadline"),
        ({"deadline": "2020-01-01T00:00:00+00:00"}, "metadata.deadline"),
        ({"deadline": "06:00 Mars/Olympus"}, "metadata.deadline"),
        ({"best_effort": "maybe"}, "metadata.best_effort"),
        ({"best_effort": "true", "deadline": "06:00 UTC"}, "metadata.deadline"),
        ({"class": "chat"}, "metadata.class"),
    ],
)
def test_an_order_that_cannot_be_used_names_its_field(client, metadata, param):
    uploaded = upload(client, jsonl([line(1)]))
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", metadata=metadata
        )
    assert refused.value.param == param
    assert not Batch.objects.exists()


def test_the_same_idempotency_key_makes_one_batch(client):
    uploaded = upload(client, jsonl([line(1)]))
    order = {
        "input_file_id": uploaded.id, "endpoint": "/v1/chat/completions", "completion_window": "24h",
        "extra_headers": {"Idempotency-Key": "night-1"},
    }  # fmt: skip
    assert client.batches.create(**order).id == client.batches.create(**order).id
    with pytest.raises(openai.UnprocessableEntityError):
        client.batches.create(**order, metadata={"best_effort": "true"})
    assert Batch.objects.count() == 1


def test_another_tenants_files_and_batches_do_not_exist(client, server, world):
    uploaded = upload(client, jsonl([line(1)]))
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    stranger = factories.tenant("stranger", classes=["bulk"])
    other = openai.OpenAI(api_key=issue(stranger), base_url=f"{server}/v1", max_retries=0, timeout=60)
    for act in (
        lambda: other.files.retrieve(uploaded.id),
        lambda: other.files.content(uploaded.id),
        lambda: other.files.delete(uploaded.id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.retrieve("batch_nonsense"),
    ):
        with pytest.raises(openai.NotFoundError):
            act()
    assert not list(other.files.list()) and not list(other.batches.list())
    with pytest.raises(openai.BadRequestError) as refused:
        other.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert refused.value.param == "input_file_id"


def test_bad_keys_and_suspended_tenants_are_told_so(client, server, world, secret):
    nobody = openai.OpenAI(api_key="fb_nobody", base_url=f"{server}/v1", max_retries=0, timeout=60)
    for act in (lambda: nobody.files.list(), lambda: upload(nobody, b"{}\n"), lambda: nobody.batches.list()):
        with pytest.raises(openai.AuthenticationError):
            act()
    uploaded = upload(client, jsonl([line(1)]))
    Tenant.objects.filter(pk=world.tenant.pk).update(state="suspended")
    with pytest.raises(openai.PermissionDeniedError):
        upload(client, b"{}\n")
    with pytest.raises(openai.BadRequestError):
        client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    ApiKey.objects.filter(tenant=world.tenant).update(expires_at=timezone.now())
    with pytest.raises(openai.AuthenticationError):
        client.files.list()


def test_a_lost_file_is_told_from_a_store_that_does_not_answer(client, settings, tmp_path):
    uploaded = upload(client, jsonl([line(1)]))
    (tmp_path / "no-folder").touch()
    settings.JOB_STORAGE = str(tmp_path / "no-folder" / "files")
    with pytest.raises(openai.InternalServerError) as away:
        client.files.content(uploaded.id)
    settings.JOB_STORAGE = str(tmp_path / "emptied")
    with pytest.raises(openai.NotFoundError) as lost:
        client.files.content(uploaded.id)
    assert (away.value.code, lost.value.code) == ("storage", "file_lost")


def test_a_deleted_file_is_gone_and_its_bytes_are_erased(client):
    uploaded = upload(client, jsonl([line(1)]))
    assert client.files.delete(uploaded.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(uploaded.id)
    assert batch_sweep.erase_files(timezone.now()) == 1
    row = StoredFile.objects.get()
    assert row.erased_at is not None
    assert not [path for path in Path(django_settings.JOB_STORAGE).rglob("*") if path.is_file()]


def test_a_file_over_the_limit_is_refused_and_leaves_nothing(client, settings):
    settings.JOB_FILE_LIMIT_BYTES = 200_000
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, b"x" * 400_000)
    assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
    assert not list(client.files.list())


def test_another_purpose_is_refused(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.jsonl", io.BytesIO(b"{}\n")), purpose="fine-tune")
    assert refused.value.code == "invalid_purpose"


def raw(address: str, request: bytes, *, breaks_off: bool = False) -> bytes:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        if breaks_off:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while data := connection.recv(65_536):
            parts.append(data)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"multipart/form-data; boundary=xx", b"--xx\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nabc"),
        (b"multipart/form-data; boundary=xx", b"no form at all"),
        (b"multipart/form-data", b""),
        (b"application/json", b"{}"),
        (b"multipart/form-data; boundary=xx", b"--xx\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n"
         + b"p" * 50_000 + b"\r\n--xx--\r\n"),
    ],
)  # fmt: skip
def test_a_form_that_is_none_is_refused_and_publishes_nothing(server, secret, kind, body):
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secret.encode() + b"\r\n"
    head += (
        b"Connection: close\r\nContent-Type: " + kind + b"\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n"
    )
    answer = raw(server, head + body)
    assert answer.startswith(b"HTTP/1.1 400"), answer[:300]
    assert not StoredFile.objects.filter(ready_at__isnull=False).exists()


def begun(secret: str) -> bytes:
    """An upload until the first byte of its file, of many more."""
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secret.encode() + b"\r\n"
    head += b"Content-Type: multipart/form-data; boundary=xx\r\nContent-Length: 1000000\r\n\r\n"
    return head + b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


def test_a_tenant_has_half_of_the_places_for_uploads(server, secret, client, world):
    other = factories.tenant("beta", classes=["bulk"])
    host, port = server.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for number in range(1, upload_door.UPLOADS_OF_TENANT_MOST + 1):
            slow = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            slow.sendall(begun(secret))
            assert eventually(lambda number=number: StoredFile.objects.count() == number)
        with pytest.raises(openai.RateLimitError) as refused:
            upload(client, jsonl([line(1)]))
        assert refused.value.code == "too_many_uploads" and "4 uploads of acme run already" in str(refused.value)
        theirs = openai.OpenAI(api_key=issue(other), base_url=f"{server}/v1", max_retries=0, timeout=60)
        assert upload(theirs, jsonl([line(1)])).filename == "night.jsonl"
    assert eventually(lambda: takes(client)), "whoever leaves gives the place back"


def takes(client) -> bool:
    with contextlib.suppress(openai.RateLimitError):
        return bool(upload(client, jsonl([line(1)])).id)
    return False


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


def test_an_upload_of_a_byte_now_and_then_loses_its_place(server, secret, monkeypatch):
    monkeypatch.setattr(upload_door, "STALL_S", 1.0)
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(begun(secret))
        readable: list = []
        until = time.monotonic() + 60
        while not readable and time.monotonic() < until:
            connection.sendall(b"x")
            readable = select.select([connection], [], [], 0.2)[0]
        answer = connection.recv(65_536) if readable else b"none"
    assert answer.startswith(b"HTTP/1.1 408"), answer[:300]
    assert not StoredFile.objects.filter(ready_at__isnull=False).exists()


def test_an_upload_that_breaks_off_is_never_seen(server, secret, client):
    raw(server, begun(secret) + b"x" * 300_000, breaks_off=True)
    deadline = time.monotonic() + 60
    while not StoredFile.objects.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(client.files.list())
    later = timezone.now() + batch_sweep.UPLOAD_MOST
    assert batch_sweep.erase_files(later) == StoredFile.objects.count()


def test_reading_a_stored_result_again_is_no_usage(client, world):
    """What was computed once is paid once: reads have neither records nor charges, however many there are."""
    uploaded = upload(client, jsonl([line(n) for n in range(1, 4)]))
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    imported(batch.id)
    run_all(world)
    tasks.sweep()
    row = Batch.objects.get()
    assembly.begin(row.pk, timezone.now())
    assembly.assemble(row.pk, timezone.now())
    batch = client.batches.retrieve(batch.id)

    def paid():
        return UsageRecord.objects.count(), RollupDelta.objects.count(), Job.objects.get(batch=row).charge_nanos

    before, first = paid(), client.files.content(batch.output_file_id).read()
    for _ in range(10):
        assert client.files.content(batch.output_file_id).read() == first
        assert client.batches.retrieve(batch.id).output_file_id == batch.output_file_id
    assert paid() == before


@pytest.mark.parametrize("away", [OperationalError("the database system is starting up"), InterfaceError("closed")])
def test_while_the_database_is_away_clients_are_told_to_try_again(away):
    answer = openai_error(away, {})
    assert (answer.status_code, answer.data["error"]["code"]) == (503, "busy")
    with pytest.raises(IntegrityError):
        openai_error(IntegrityError("a fault of ours"), {})
