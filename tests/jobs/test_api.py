"""REST of jobs: by a tenant's API key and by staff, with idempotency, clear fields and nobody else's jobs."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.jobs.deadlines import read_deadline
from controlplane.jobs.models import Job
from controlplane.tenants import key_actions
from controlplane.tenants.models import ApiKey, Tenant
from tests import factories

JOBS = "/api/v1/jobs"
JSON = "application/json"
ADA = Actor(id=None, name="ada", role="admin")
ORDER = {"class": "bulk", "items": 100, "prompt_tokens": 1_000, "expected_output_tokens": 200}


@pytest.fixture
def tenant(people):
    factories.workload_class("chat")
    factories.workload_class("bulk", "batch")
    factories.batch_floor(factories.pool("chat"))
    return Tenant.objects.get(slug="acme")


@pytest.fixture
def secret(tenant):
    return issue(tenant)


def issue(tenant, classes=("chat", "bulk")) -> str:
    return key_actions.create_key(
        tenant_id=tenant.pk, name="nightly", classes=list(classes), default_class=classes[0], actor=ADA,
        now=timezone.now(),
    ).secret  # fmt: skip


def post(secret, body=ORDER, path=JOBS, **headers):
    headers = {"Authorization": f"Bearer {secret}", **headers}
    return Client().post(path, body, content_type=JSON, headers=headers)


def test_a_key_declares_a_job_of_its_tenant(tenant, secret):
    answer = post(secret)
    assert answer.status_code == 201, answer.content
    job = Job.objects.get()
    row = answer.json()
    assert (row["uuid"], row["tenant"], row["class"], row["standing"]) == (str(job.uuid), "acme", "bulk", "waiting")
    assert row["remaining_gpu_us"] == 100 * row["estimate_gpu_us_per_item"]
    entry = AuditEntry.objects.get(action="job.submit")
    assert entry.actor_name == f"key {ApiKey.objects.get().public_id}"
    assert secret not in str(entry.after)


def test_the_same_idempotency_key_answers_the_same_job_and_refuses_another(tenant, secret):
    headers = {"Idempotency-Key": "night-1"}
    first, again = post(secret, **headers), post(secret, **headers)
    assert (first.status_code, again.status_code, again["Idempotency-Replayed"]) == (201, 200, "true")
    assert first.json()["uuid"] == again.json()["uuid"]
    other = post(secret, {**ORDER, "items": 7}, **headers)
    assert (other.status_code, other["Content-Type"]) == (422, "application/problem+json")
    assert Job.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"items": 0}, "items"),
        ({"items": "many"}, "items"),
        ({"class": "chat"}, "class"),
        ({"class": "other"}, "class"),
        ({"deadline": "2020-01-01T00:00:00Z"}, "deadline"),
        ({"deadline": "2036-01-01T00:00:00"}, "deadline"),
        ({"deadline": "tomorrow"}, "deadline"),
        ({"pool": "nowhere"}, "pool"),
        ({"colour": "red"}, "colour"),
        ({"tenant": "stranger"}, "tenant"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(tenant, secret, change, field):
    answer = post(secret, {**ORDER, **change})
    assert (answer.status_code, list(answer.json()["errors"])) == (400, [field])
    assert not Job.objects.exists()


def test_a_deadline_is_an_instant_the_class_default_or_none(tenant, secret):
    at = (timezone.now() + timedelta(hours=4)).replace(microsecond=0)
    assert post(secret, {**ORDER, "deadline": at.isoformat()}).status_code == 201
    assert Job.objects.latest("id").deadline == at
    post(secret)
    assert Job.objects.latest("id").deadline > timezone.now() + timedelta(hours=23)
    clock = {**ORDER, "deadline": "06:00 Europe/Berlin"}
    assert post(secret, clock, **{"idempotency-key": "nightly"}).status_code == 201
    assert Job.objects.latest("id").deadline == read_deadline("06:00 Europe/Berlin", timezone.now())
    again = post(secret, clock, **{"idempotency-key": "nightly"})
    assert (again.status_code, again.json()["uuid"]) == (200, str(Job.objects.latest("id").uuid))
    for text in ("06:00", "2026-12-01T06:00:00", "06:00 Mars/Base"):
        assert list(post(secret, {**ORDER, "deadline": text}).json()["errors"]) == ["deadline"]
    assert post(secret, {**ORDER, "best_effort": True}).json()["standing"] == "best_effort"


def test_a_class_that_the_key_lacks_is_refused(tenant):
    answer = post(issue(tenant, ("chat",)))
    assert "You may use: chat" in answer.json()["errors"]["class"][0]


def test_bad_keys_are_401(tenant, secret):
    assert post("fb_nobody").status_code == 401
    assert post("fb_nobody")["WWW-Authenticate"] == "Bearer"
    key = ApiKey.objects.get()
    key_actions.revoke_key(key_id=key.pk, reason="lost", actor=ADA, now=timezone.now())
    assert post(secret).status_code == 401


def test_a_key_sees_and_cancels_its_own_tenants_jobs_only(tenant, secret):
    stranger = Tenant.objects.get(slug="stranger")
    Tenant.objects.filter(pk=stranger.pk).update(classes=["bulk"])
    other = issue(Tenant.objects.get(pk=stranger.pk), ("bulk",))
    mine, theirs = post(secret).json()["uuid"], post(other).json()["uuid"]
    client = Client(headers={"Authorization": f"Bearer {secret}"})
    assert [row["uuid"] for row in client.get(JOBS).json()["results"]] == [mine]
    assert client.get(f"{JOBS}/{theirs}").status_code == 404
    assert post(secret, {}, f"{JOBS}/{theirs}/cancel").status_code == 404
    assert post(secret, {}, f"{JOBS}/{mine}/cancel").json()["state"] == "cancelled"
    assert Job.objects.get(uuid=theirs).state == "running"


def test_a_key_opens_nothing_else(tenant, secret):
    client = Client(headers={"Authorization": f"Bearer {secret}"})
    for path in ("/api/v1/tenants/", "/api/v1/pools/", "/api/v1/audit/", "/jobs/"):
        assert client.get(path).status_code in (302, 401, 403), path


def test_staff_declare_jobs_for_a_tenant_with_the_right_role(tenant, people):
    admin = people["admin"]
    assert list(admin.post(JOBS, ORDER, content_type=JSON).json()["errors"]) == ["tenant"]
    made = admin.post(JOBS, {**ORDER, "tenant": "acme"}, content_type=JSON)
    assert (made.status_code, made.json()["tenant"]) == (201, "acme")
    assert people["oncall"].post(JOBS, {**ORDER, "tenant": "acme"}, content_type=JSON).status_code == 403
    own = people["tenant"].post(JOBS, ORDER, content_type=JSON)
    assert (own.status_code, own.json()["tenant"]) == (201, "acme"), "a member declares its own tenant's"
    foreign = people["tenant"].post(JOBS, {**ORDER, "tenant": "stranger"}, content_type=JSON)
    assert (foreign.status_code, list(foreign.json()["errors"])) == (400, ["tenant"])
    assert people["anonymous"].get(JOBS).status_code == 401


def test_the_list_is_filtered_and_needs_few_statements(tenant, secret, django_assert_num_queries):
    for _ in range(5):
        post(secret)
    Job.objects.filter(pk=Job.objects.latest("id").pk).update(deadline=timezone.now() - timedelta(hours=1))
    client = Client(headers={"Authorization": f"Bearer {secret}"})
    assert len(client.get(JOBS, {"missed": "true"}).json()["results"]) == 1
    with django_assert_num_queries(2):
        assert len(client.get(JOBS, {"state": "running"}).json()["results"]) == 5
