"""REST of classes and contracts."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.contracts.models import ContractVersion
from tests import factories

JSON = "application/json"
TTFT = {"target_ppm": 990_000, "metric": "ttft", "threshold_ms": 900}


@pytest.fixture
def admin(people):
    return people["admin"]


@pytest.fixture
def contract(admin):
    made = admin.post("/api/v1/classes/", {"slug": "chat", "kind": "interactive"}, content_type=JSON)
    assert made.status_code == 201, made.content
    body = {"slug": "chat-ttft", "workload_class": "chat", **TTFT}
    made = admin.post("/api/v1/contracts/", body, content_type=JSON)
    assert made.status_code == 201, made.content
    return made


def test_a_contract_reads_aloud_with_the_alerts_of_its_target(contract):
    version = contract.json()["in_force"]
    assert (version["number"], version["threshold_ms"]) == (1, 900)
    assert version["reads"].startswith("At least 99")
    assert [alert["reachable"] for alert in version["alerts"]] == [True] * 4


def test_a_change_is_a_new_version_under_if_match(contract, admin):
    address = "/api/v1/contracts/chat-ttft/versions/"
    body = {"threshold_ms": 700, "reason": "launch"}
    assert admin.post(address, body, content_type=JSON).status_code == 428
    added = admin.post(address, body, content_type=JSON, headers={"If-Match": contract["ETag"]})
    assert (added.status_code, added.json()["number"], added.json()["target_ppm"]) == (201, 2, 990_000)
    assert admin.post(address, body, content_type=JSON, headers={"If-Match": contract["ETag"]}).status_code == 412
    assert [row["threshold_ms"] for row in admin.get(address).json()] == [700, 900]
    assert ContractVersion.objects.get(number=1).threshold_ms == 900


def test_a_promise_that_cannot_be_is_a_problem_with_its_fields(contract, admin):
    body = {"slug": "x", "workload_class": "nothing", **TTFT}
    answer = admin.post("/api/v1/contracts/", body, content_type=JSON)
    assert (answer.status_code, list(answer.json()["errors"])) == (400, ["workload_class"])
    body = {"slug": "x", "workload_class": "chat", **TTFT, "target_ppm": 0}
    answer = admin.post("/api/v1/contracts/", body, content_type=JSON)
    assert list(answer.json()["errors"]) == ["target_ppm"]


def test_the_list_reads_versions_once(contract, admin, django_assert_num_queries):
    for number in range(6):
        body = {"slug": f"more-{number}", "workload_class": "chat", **TTFT}
        admin.post("/api/v1/contracts/", body, content_type=JSON)
    with django_assert_num_queries(5):
        rows = admin.get("/api/v1/contracts/").json()["results"]
    assert len(rows) == 7
    assert all(row["in_force"]["number"] == 1 for row in rows)


def test_a_member_of_a_tenant_reads_its_contracts_only(contract, people):
    rows = people["tenant"].get("/api/v1/contracts/").json()["results"]
    assert [row["slug"] for row in rows] == ["chat-ttft"]
    assert people["stranger"].get("/api/v1/contracts/chat-ttft/").status_code == 404
    assert people["tenant"].get("/api/v1/classes/").status_code == 403


def test_a_class_is_edited_and_suspended(contract, admin):
    etag = admin.get("/api/v1/classes/chat/")["ETag"]
    factories.workload_class("second")
    body = {"overload": "downgrade", "downgrade_to": "second", "reason": "spill"}
    edited = admin.patch("/api/v1/classes/chat/", body, content_type=JSON, headers={"If-Match": etag})
    assert (edited.status_code, edited.json()["downgrade_to"]) == (200, "second")
    suspended = admin.post("/api/v1/classes/chat/suspend/", {"reason": "runaway"}, content_type=JSON)
    assert suspended.json()["state"] == "suspended"
    wrong = admin.patch(
        "/api/v1/classes/second/",
        {"overload": "downgrade", "downgrade_to": "chat", "reason": "x"},
        content_type=JSON,
        headers={"If-Match": "*"},
    )
    assert (wrong.status_code, list(wrong.json()["errors"])) == (400, ["downgrade_to"])


def test_a_version_may_begin_later(contract, admin):
    later = (timezone.now() + timedelta(days=1)).isoformat()
    body = {"threshold_ms": 700, "reason": "launch", "effective_from": later}
    admin.post("/api/v1/contracts/chat-ttft/versions/", body, content_type=JSON, headers={"If-Match": contract["ETag"]})
    row = admin.get("/api/v1/contracts/chat-ttft/").json()
    assert (row["in_force"]["number"], row["next"]["number"]) == (1, 2)
