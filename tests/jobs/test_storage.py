"""Files in an object store: a real S3-compatible server, with keys it checks, that goes away and comes back."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import boto3
import obstore
import pytest
from django.utils import timezone
from moto import settings as moto_settings
from moto.server import ThreadedMotoServer

from controlplane.jobs import assembly, batch_import, storage
from controlplane.jobs.storage import StorageError, Writing
from tests import factories
from tests.bodies import body_of
from tests.jobs.batches import empty_items, jsonl, line, submit
from tests.jobs.settling import run_all
from tests.world import build_world

BUCKET = "jobs"
PIECE = b"x" * 1_048_575 + b"\n"


@dataclass
class S3:
    """The server, the user that may use the bucket, and what the environment of a process says."""

    server: ThreadedMotoServer
    url: str
    environment: pytest.MonkeyPatch
    key: dict = field(default_factory=dict)

    def client(self, name: str, **key: str):
        return boto3.client(name, endpoint_url=self.url, region_name="eu-central-1", **key)

    def use(self, secret: str | None = None, bucket: str = BUCKET) -> None:
        """A process that starts with this secret, the right one by default."""
        settings = {
            "AWS_ACCESS_KEY_ID": self.key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": secret or self.key["SecretAccessKey"],
            "AWS_REGION": "eu-central-1", "AWS_ENDPOINT": self.url, "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        for name, value in settings.items():
            self.environment.setenv(name, value)
        storage._opened.cache_clear()


def names() -> list[str]:
    return sorted(row["path"] for page in obstore.list(storage.opened()) for row in page)


@pytest.fixture
def s3(settings, monkeypatch) -> Iterator[S3]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = S3(server, f"http://{host}:{port}", monkeypatch)
    urllib.request.urlopen(urllib.request.Request(f"{found.url}/moto-api/reset", method="POST")).close()
    first = {"aws_access_key_id": "first", "aws_secret_access_key": "first"}
    iam = found.client("iam", **first)
    iam.create_user(UserName="flexband")
    found.key = iam.create_access_key(UserName="flexband")["AccessKey"]
    allowed = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
    iam.put_user_policy(UserName="flexband", PolicyName="files", PolicyDocument=allowed)
    where = {"LocationConstraint": "eu-central-1"}
    found.client("s3", **first).create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
    # from here on every request needs a key that the server knows, and a signature that fits
    octets = {"content-type": "application/octet-stream"}
    reset = urllib.request.Request(f"{found.url}/moto-api/reset-auth", data=b"0", headers=octets)
    urllib.request.urlopen(reset).close()
    settings.JOB_STORAGE = f"s3://{BUCKET}/files"
    found.use()
    yield found
    server.stop()
    storage._opened.cache_clear()
    # the server's settings are those of the process: the next one starts open again
    moto_settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")


def test_a_file_of_several_parts_appears_whole_and_never_before(s3):
    with Writing("7/night") as writing:
        for _ in range(13):
            writing.write(PIECE)
        assert names() == [], "parts are there, no file is"
        written = writing.finish()
    assert (written.size_bytes, written.lines, names()) == (13 * len(PIECE), 13, ["7/night"])
    assert b"".join(storage.read("7/night")) == PIECE * 13
    assert sum(map(len, storage.read("7/night", 6_000_000))) == written.size_bytes - 6_000_000
    storage.erase("7/night")
    storage.erase("7/night")
    with pytest.raises(FileNotFoundError):
        list(storage.read("7/night"))


def test_a_writer_that_is_left_publishes_nothing(s3):
    with pytest.raises(RuntimeError), Writing("7/half") as writing:
        for _ in range(7):
            writing.write(PIECE)
        raise RuntimeError("killed")
    assert names() == []


def test_a_wrong_key_or_bucket_is_told_as_such(s3, settings):
    with Writing("7/there") as writing:
        writing.write(b"1\n")
        writing.finish()
    s3.use(secret="of last year")
    for attempt in (lambda: list(storage.read("7/there")), lambda: storage.look_for("7/there"), _write):
        with pytest.raises(StorageError, match=r"refuses its credentials.*(SignatureDoesNotMatch|403)"):
            attempt()
    s3.use()
    settings.JOB_STORAGE = "s3://elsewhere"
    with pytest.raises(StorageError, match=r"no such bucket.*FLEXBAND_JOB_STORAGE"):
        _write()


def _write() -> None:
    with Writing("7/new") as writing:
        writing.write(b"1\n")
        writing.finish()


@pytest.mark.django_db(transaction=True)
def test_a_batch_goes_through_the_store_and_over_a_time_in_which_it_is_away(s3):
    """Imported, run and assembled; while nobody answers the batch waits, a page says so, and nothing is lost."""
    empty_items()
    world = build_world()
    batch = submit(world.tenant, jsonl([line(n) for n in range(1, 31)]))
    host, port = s3.server.get_host_and_port()
    s3.server.stop()
    with pytest.raises(StorageError, match="cannot be used now"):
        batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert (batch.state, batch.errors) == ("validating", [])
    s3.server = ThreadedMotoServer(ip_address=host, port=port, verbose=False)
    s3.server.start()
    assert not batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    run_all(world)
    assembly.begin(batch.pk, timezone.now())
    assembly.assemble(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert batch.state == "completed" and batch.output_file.lines == 30
    content = b"".join(storage.read(batch.output_file.path))
    assert content.count(b"\n") == 30 and len(content) == batch.output_file.size_bytes

    viewer = factories.person("viewer")
    url = f"/jobs/{batch.job.uuid}/files/results/"
    assert body_of(viewer.get(url)) == content
    s3.server.stop()
    refused = viewer.get(url)
    assert refused.status_code == 503 and "is not lost" in refused.content.decode()
    s3.server.start()
    assert body_of(viewer.get(url)) == content
