"""REST of jobs whose items are run here: submitted inline or by file, read, retried, extended, cancelled."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.jobs import batch_import, queries
from controlplane.jobs.models import Batch, ItemHolder, Job
from controlplane.tenants import key_actions
from tests import factories
from tests.jobs.batches import ADA, empty_items, jsonl, line, running, stored_file
from tests.jobs.settling import run_all
from tests.world import build_world

JOBS = "/api/v1/jobs"


@pytest.fixture
def world(transactional_db, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    settings.SECURE_SSL_REDIRECT = False
    empty_items()
    ItemHolder.objects.all().delete()
    return build_world()


def issue(tenant):
    return key_actions.create_key(
        tenant_id=tenant.pk, name="n", classes=["bulk"], default_class="bulk", actor=ADA, now=timezone.now()
    ).secret


@pytest.fixture
def client(world):
    return Client(headers={"Authorization": f"Bearer {issue(world.tenant)}"})


def post(client, path, body=None, **headers):
    return client.post(path, body or {}, content_type="application/json", headers=headers)


def test_requests_inline_become_a_job_once(client, world):
    body = {"class": "bulk", "name": "small", "requests": [line(1), line(2)]}
    first = post(client, JOBS, body, **{"Idempotency-Key": "n-1"})
    again = post(client, JOBS, body, **{"Idempotency-Key": "n-1"})
    assert (first.status_code, again.status_code) == (202, 202), first.content
    assert first.json() == again.json()
    assert post(client, JOBS, {**body, "name": "other"}, **{"Idempotency-Key": "n-1"}).status_code == 422
    batch = Batch.objects.get()
    batch_import.import_batch(batch.pk, timezone.now())
    (row,) = client.get(f"{JOBS}?batch={batch.uuid}").json()["results"]
    assert (row["items"], row["has_items"], row["name"], row["batch"]["status"]) == (2, True, "small", "in_progress")
    assert row["remaining_gpu_us"] == 2 * row["estimate_gpu_us_per_item"] > 0
    assert queries.backlog(world.pool.pk, timezone.now())[0][0] == row["remaining_gpu_us"]


def test_a_file_becomes_a_job_and_wrong_fields_are_named(client, world):
    stored = stored_file(world.tenant, jsonl([line(1)]))
    given = {"class": "bulk", "input_file": f"file-{stored.uuid.hex}"}
    assert post(client, JOBS, given).status_code == 202
    for change, field in (
        ({"input_file": "file-nonsense"}, "input_file"),
        ({"class": "chat"}, "class"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"requests": [line(1)]}, "requests"),
        ({"requests": [line(1)] * 1_001}, "requests"),
    ):
        answer = post(client, JOBS, {**given, **change})
        assert (answer.status_code, list(answer.json()["errors"])) == (400, [field]), change
    assert list(post(client, JOBS, {"class": "bulk"}).json()["errors"]) == [
        "items", "prompt_tokens", "expected_output_tokens",
    ]  # fmt: skip


def test_parked_items_are_listed_and_tried_again(client, world):
    job = running(world.tenant, 60)
    run_all(world, parked={n: f"bad {n}" for n in range(1, 56)})
    path = f"{JOBS}/{job.uuid}"
    first = client.get(f"{path}/items?state=parked").json()
    second = client.get(f"{path}/items?state=parked&after={first['after']}").json()
    assert [row["line"] for row in first["results"] + second["results"]] == list(range(1, 56))
    assert (first["results"][0]["reason"], first["results"][0]["status"], second["after"]) == ("bad 1", 400, None)
    assert client.get(f"{path}/items?state=odd").status_code == 400
    assert client.get(path).json()["state"] == "completed"
    answer = post(client, f"{path}/retry-parked", {"reason": "engine repaired"}).json()
    assert (answer["retried"], answer["state"], answer["items_parked"]) == (55, "running", 0)
    assert AuditEntry.objects.filter(action="job.retry_parked").get().reason == "engine repaired"
    run_all(world)
    assert (Job.objects.get().items_completed, Job.objects.get().state) == (60, "completed")


def test_a_deadline_moves_to_a_later_instant_only(client, world):
    job = running(world.tenant, 1)
    path = f"{JOBS}/{job.uuid}/extend-deadline"
    later = (job.deadline + timedelta(hours=3)).isoformat()
    assert post(client, path, {"deadline": later}).json()["deadline"] is not None
    assert Job.objects.get().deadline == job.deadline + timedelta(hours=3)
    assert Batch.objects.get().expires_at == Job.objects.get().deadline
    for text in (
        timezone.now().isoformat(),
        job.deadline.isoformat(),
        (timezone.now() + timedelta(days=999)).isoformat(),
    ):
        assert post(client, path, {"deadline": text}).status_code == 400
    answer = post(client, path, {"deadline": "06:00 Pacific/Kiritimati"})
    assert (answer.status_code, list(answer.json()["errors"])) == (400, ["deadline"]), "before the present one"
    sent = {"class": "bulk", "requests": [line(1)], "deadline": "06:00 UTC"}
    assert post(client, JOBS, sent).json()["batch"]["metadata"]["deadline"] == "06:00 UTC"
    best = running(world.tenant, 1, best_effort="true")
    assert post(client, f"{JOBS}/{best.uuid}/extend-deadline", {"deadline": later}).status_code == 400


def test_cancelling_a_job_cancels_its_batch(client, world):
    job = running(world.tenant, 3)
    assert post(client, f"{JOBS}/{job.uuid}/cancel").json()["state"] == "cancelled"
    assert Batch.objects.get().state == "cancelling"


def test_another_tenant_reaches_none_of_it(client, world):
    stranger = factories.tenant("stranger", classes=["bulk"])
    other = Client(headers={"Authorization": f"Bearer {issue(stranger)}"})
    path = f"{JOBS}/{running(world.tenant, 1).uuid}"
    assert other.get(f"{path}/items").status_code == 404
    for action in ("retry-parked", "cancel"):
        assert post(other, f"{path}/{action}").status_code == 404
    later = (timezone.now() + timedelta(days=2)).isoformat()
    assert post(other, f"{path}/extend-deadline", {"deadline": later}).status_code == 404


def test_the_page_of_a_list_costs_the_same_however_many_jobs_there_are(client, world, django_assert_max_num_queries):
    for _ in range(3):
        running(world.tenant, 1)
    with django_assert_max_num_queries(8):
        assert len(client.get(JOBS).json()["results"]) == 3
