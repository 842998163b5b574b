"""REST of pools, slots, agents and tokens: versions, idempotency, problems, pages."""

import pytest

from controlplane.fleet.models import EnrolmentToken, Pool, Slot
from tests import factories

POOLS = "/api/v1/pools/"
JSON = "application/json"


@pytest.fixture
def admin(people):
    return people["admin"]


def test_a_pool_is_made_once_under_one_idempotency_key(installation, admin):
    factories.workload_class("chat")
    body = {"slug": "embed", "model": "bge-m3", "gpu_type": "L4", "interactive_class": "chat"}
    first = admin.post(POOLS, body, content_type=JSON, headers={"Idempotency-Key": "a-1"})
    again = admin.post(POOLS, body, content_type=JSON, headers={"Idempotency-Key": "a-1"})
    assert (first.status_code, again.status_code, again["Idempotency-Replayed"]) == (201, 201, "true")
    other = admin.post(POOLS, {**body, "gpu_type": "A10"}, content_type=JSON, headers={"Idempotency-Key": "a-1"})
    assert other.status_code == 422
    assert Pool.objects.count() == 1


def test_a_change_needs_the_version_that_was_read(fleet, admin):
    address = f"{POOLS}chat/"
    etag = admin.get(address)["ETag"]
    body = {"lend_p95_ms": 150, "reason": "faster recall"}
    assert admin.patch(address, body, content_type=JSON).status_code == 428
    done = admin.patch(address, body, content_type=JSON, headers={"If-Match": etag})
    assert (done.status_code, done.json()["lend_p95_ms"], done.json()["warnings"]) == (200, 150, [])
    late = admin.patch(address, {**body, "lend_p95_ms": 99}, content_type=JSON, headers={"If-Match": etag})
    assert (late.status_code, late["Content-Type"]) == (412, "application/problem+json")
    assert Pool.objects.get().lend_p95_ms == 150


def test_a_broken_rule_is_a_problem_with_its_field(fleet, admin):
    address = f"{POOLS}chat"
    etag = admin.get(address)["ETag"]
    answer = admin.patch(address, {"return_slack": 0.1, "reason": "x"}, content_type=JSON, headers={"If-Match": etag})
    assert answer.status_code == 400
    assert "must be over lend slack" in answer.json()["errors"]["return_slack"][0]
    unknown = admin.patch(address, {"colour": "red", "reason": "x"}, content_type=JSON, headers={"If-Match": etag})
    assert list(unknown.json()["errors"]) == ["colour"]


def test_slots_are_added_edited_and_removed(fleet, admin):
    body = {"names": ["f2", "f3"], "band": "flex", "places": 2, "reason": "two more"}
    added = admin.post(f"{POOLS}chat/slots/", body, content_type=JSON)
    assert [row["name"] for row in added.json()] == ["f2", "f3"]
    slot = added.json()[0]["id"]
    etag = admin.get(f"/api/v1/slots/{slot}/")["ETag"]
    edited = admin.patch(f"/api/v1/slots/{slot}/", {"band": "batch"}, content_type=JSON, headers={"If-Match": etag})
    assert (edited.status_code, edited.json()["band"]) == (200, "batch")
    removed = admin.post(
        f"/api/v1/slots/{slot}/remove/", {"reason": "sold"}, content_type=JSON, headers={"If-Match": edited["ETag"]}
    )
    assert removed.status_code == 200
    assert Slot.objects.get(pk=slot).removed_at is not None
    assert admin.get(f"/api/v1/slots/{slot}/").status_code == 404


def test_pools_are_paged_by_cursor_filtered_and_ordered(fleet, admin, django_assert_max_num_queries):
    for number in range(4):
        factories.pool(f"pool-{number}", isolation="shared")
    first = admin.get(POOLS, {"limit": 2, "isolation": "shared", "ordering": "-slug"}).json()
    assert [row["slug"] for row in first["results"]] == ["pool-3", "pool-2"]
    with django_assert_max_num_queries(5):
        second = admin.get(first["next"]).json()
    assert [row["slug"] for row in second["results"]] == ["pool-1", "pool-0"]


def test_an_address_without_its_last_slash_is_the_same(fleet, admin):
    assert admin.get("/api/v1/pools").status_code == admin.get("/api/v1/pools/").status_code == 200


def test_a_token_shows_its_secret_once_even_when_repeated(fleet, admin, people):
    headers = {"Idempotency-Key": "token-1"}
    made = admin.post("/api/v1/enrolment-tokens/", {"pool": "chat"}, content_type=JSON, headers=headers)
    again = admin.post("/api/v1/enrolment-tokens/", {"pool": "chat"}, content_type=JSON, headers=headers)
    assert made.json()["secret"].startswith("fbe_")
    assert again.json()["secret"] is None
    assert EnrolmentToken.objects.count() == 1
    assert "secret" not in admin.get(f"/api/v1/enrolment-tokens/{made.json()['id']}/").json()
    refused = people["oncall"].post("/api/v1/enrolment-tokens/", {"pool": "chat"}, content_type=JSON)
    assert refused.status_code == 403


def test_agents_are_drained_by_on_call_and_retired_by_admins(fleet, people):
    agent = factories.agent(fleet)
    base = f"/api/v1/agents/{agent.pk}"
    drained = people["oncall"].post(f"{base}/drain/", {"reason": "kernel"}, content_type=JSON)
    assert drained.json()["drain_requested_at"] is not None
    assert people["oncall"].post(f"{base}/retire/", {"reason": "sold"}, content_type=JSON).status_code == 403
    assert people["admin"].post(f"{base}/retire/", {}, content_type=JSON).status_code == 400
    retired = people["admin"].post(f"{base}/retire/", {"reason": "sold"}, content_type=JSON)
    assert retired.json()["state"] == "retired"
