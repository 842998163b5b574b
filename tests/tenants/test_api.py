"""REST of tenants, keys, members and the audit log: scoping, lost updates, repeats, errors."""

import json
from decimal import Decimal

import pytest

from controlplane.audit.models import AuditEntry
from controlplane.budgets.models import Budget
from controlplane.tenants.models import ApiKey, IdempotentWrite, Member, Tenant
from tests import factories
from tests.tenants.conftest import side_by_side

KEY = {"tenant": "acme", "name": "web", "classes": ["chat"], "default_class": "chat"}
BUDGET = {"tenant": "acme", "name": "Month", "limit": "22000.00", "reason": "plan"}


def send(client, method: str, url: str, body: dict | None = None, **headers):
    return getattr(client, method)(
        url, json.dumps(body if body is not None else {}), content_type="application/json", headers=headers
    )


class TestTenants:
    def test_create_read_change(self, people):
        client = people["admin"]
        made = send(client, "post", "/api/v1/tenants/", {"slug": "globex", "name": "Globex", "parent": "acme"})
        assert (made.status_code, made.json()["parent"]) == (201, "acme")
        read = client.get("/api/v1/tenants/globex/")
        assert read.headers["ETag"] == made.headers["ETag"]
        changed = send(client, "patch", "/api/v1/tenants/globex/", {"weight": 4}, **{"If-Match": read.headers["ETag"]})
        assert (changed.status_code, changed.json()["weight"], changed.json()["version"]) == (200, 4, 2)
        assert changed.headers["ETag"] != read.headers["ETag"]

    def test_a_stale_write_is_412_and_one_without_if_match_428(self, people):
        client, url = people["admin"], "/api/v1/tenants/acme/"
        etag = client.get(url).headers["ETag"]
        assert send(client, "patch", url, {"weight": 4}, **{"If-Match": etag}).status_code == 200
        stale = send(client, "patch", url, {"weight": 5}, **{"If-Match": etag})
        assert (stale.status_code, stale.headers["Content-Type"]) == (412, "application/problem+json")
        assert send(client, "patch", url, {"weight": 5}).status_code == 428
        assert send(client, "patch", url, {"weight": 5}, **{"If-Match": "*"}).status_code == 200

    def test_errors_name_the_fields(self, people):
        wrong = send(people["admin"], "post", "/api/v1/tenants/", {"slug": "a b", "weight": 0, "colour": "red"})
        assert wrong.status_code == 400 and wrong.json()["errors"] == {"colour": ["There is no such field to write."]}
        wrong = send(people["admin"], "post", "/api/v1/tenants/", {"slug": "a b", "weight": 0})
        assert set(wrong.json()["errors"]) == {"slug", "name", "weight"}
        loop = send(people["admin"], "patch", "/api/v1/tenants/acme/", {"parent": "acme"}, **{"If-Match": "*"})
        assert loop.status_code == 400 and list(loop.json()["errors"]) == ["parent"]

    @pytest.mark.parametrize("body", ["[1]", "{", '"text"', "null"])
    def test_a_body_that_is_no_object_is_a_400(self, body, people):
        response = people["admin"].post("/api/v1/tenants/", body, content_type="application/json")
        assert response.status_code == 400 and response.headers["Content-Type"] == "application/problem+json"

    def test_oncall_suspends_but_does_not_edit(self, people):
        client = people["oncall"]
        assert send(client, "post", "/api/v1/tenants/acme/suspend/", {"reason": "flood"}).json()["state"] == "suspended"
        assert send(client, "patch", "/api/v1/tenants/acme/", {"weight": 2}, **{"If-Match": "*"}).status_code == 403

    def test_lists_are_cut_by_cursor_filtered_and_ordered(self, people):
        for number in range(5):
            factories.tenant(f"t{number}", classes=["bulk"])
        client, seen = people["admin"], []
        url = "/api/v1/tenants/?limit=2&workload_class=bulk&ordering=-slug"
        while url:
            page = client.get(url).json()
            seen += [row["slug"] for row in page["results"]]
            url = page["next"]
        assert seen == ["t4", "t3", "t2", "t1", "t0", "acme"]

    def test_the_lists_queries_do_not_grow(self, people, django_assert_num_queries):
        with django_assert_num_queries(4):
            people["admin"].get("/api/v1/tenants/")
        for number in range(10):
            factories.tenant(f"t{number}", parent=Tenant.objects.get(slug="acme"))
        with django_assert_num_queries(4):
            people["admin"].get("/api/v1/tenants/")


class TestKeys:
    def test_the_secret_is_in_the_first_answer_only(self, people):
        client = people["admin"]
        made = send(client, "post", "/api/v1/api-keys/", KEY)
        assert made.status_code == 201 and made.json()["secret"].startswith("fb_")
        assert "secret" not in client.get(f"/api/v1/api-keys/{made.json()['id']}/").json()

    def test_a_repeat_gets_the_first_answer_without_the_secret(self, people):
        client, header = people["admin"], {"Idempotency-Key": "create-1"}
        first = send(client, "post", "/api/v1/api-keys/", KEY, **header)
        again = send(client, "post", "/api/v1/api-keys/", KEY, **header)
        assert again.status_code == 201 and again.headers["Idempotency-Replayed"] == "true"
        assert again.json() == {**first.json(), "secret": None}
        assert again.headers["ETag"] == first.headers["ETag"]
        assert ApiKey.objects.count() == 1
        assert first.json()["secret"] not in str(list(IdempotentWrite.objects.values()))

    def test_another_body_under_the_same_key_is_422(self, people):
        header = {"Idempotency-Key": "create-1"}
        send(people["admin"], "post", "/api/v1/api-keys/", KEY, **header)
        other = send(people["admin"], "post", "/api/v1/api-keys/", {**KEY, "name": "other"}, **header)
        assert other.status_code == 422 and ApiKey.objects.count() == 1

    def test_a_write_that_failed_can_be_repeated(self, people):
        header = {"Idempotency-Key": "create-1"}
        assert (
            send(people["admin"], "post", "/api/v1/api-keys/", {**KEY, "classes": ["x"]}, **header).status_code == 400
        )
        assert send(people["admin"], "post", "/api/v1/api-keys/", KEY, **header).status_code == 201

    def test_the_scope_is_person_method_and_path(self, people):
        header = {"Idempotency-Key": "same"}
        factories.person("admin", name="second")
        for client in (people["admin"], factories.person("admin", name="third")):
            assert send(client, "post", "/api/v1/api-keys/", KEY, **header).status_code == 201
        assert send(people["admin"], "post", "/api/v1/budgets/", BUDGET, **header).status_code == 201
        assert ApiKey.objects.count() == 2

    def test_rotation_is_repeated_with_its_secret(self, people):
        client = people["admin"]
        public_id = send(client, "post", "/api/v1/api-keys/", KEY).json()["id"]
        body = {"rotation_id": "rotation-2027", "reason": "yearly"}
        first, again = (send(client, "post", f"/api/v1/api-keys/{public_id}/rotate/", body).json() for _ in range(2))
        assert first["secret"] == again["secret"] and first["id"] == public_id
        assert first["previous_valid_until"] is not None

    def test_a_strangers_key_is_not_there(self, people):
        public_id = send(people["admin"], "post", "/api/v1/api-keys/", KEY).json()["id"]
        assert people["tenant"].get(f"/api/v1/api-keys/{public_id}/").status_code == 200
        assert people["stranger"].get(f"/api/v1/api-keys/{public_id}/").status_code == 404
        assert people["stranger"].get("/api/v1/api-keys/?tenant=acme").json()["results"] == []


class TestBudgets:
    def test_money_is_a_decimal_string_both_ways(self, people):
        made = send(people["finance"], "post", "/api/v1/budgets/", {**BUDGET, "limit": "0.000000001"})
        assert (made.json()["limit"], made.json()["limit_nanos"]) == ("0.000000001", 1)
        assert made.json()["present"]["state"] == "ok"
        for limit in (22000.0, "1,5", "-1"):
            assert send(people["finance"], "post", "/api/v1/budgets/", {**BUDGET, "limit": limit}).status_code == 400

    def test_change_with_reason_and_etag(self, people):
        client = people["finance"]
        made = send(client, "post", "/api/v1/budgets/", BUDGET)
        url = f"/api/v1/budgets/{made.json()['id']}/"
        header = {"If-Match": made.headers["ETag"]}
        assert send(client, "patch", url, {"limit": "10"}, **header).status_code == 400, "no reason"
        assert send(client, "patch", url, {"limit": "10", "reason": "cut"}, **header).json()["limit"] == "10.00"
        assert send(client, "patch", url, {"limit": "11", "reason": "cut"}, **header).status_code == 412
        assert Decimal(Budget.objects.get().limit_nanos) == 10_000_000_000

    def test_the_lists_queries_do_not_grow(self, people, django_assert_num_queries):
        send(people["finance"], "post", "/api/v1/budgets/", BUDGET)
        with django_assert_num_queries(7):
            people["finance"].get("/api/v1/budgets/")
        for number in range(5):
            send(people["finance"], "post", "/api/v1/budgets/", {**BUDGET, "name": f"b{number}"})
        with django_assert_num_queries(7):
            people["finance"].get("/api/v1/budgets/")


class TestMembersAndAudit:
    def test_members_have_no_password_in_any_answer(self, people):
        body = {"username": "ben", "password": "correct horse battery", "role": "viewer"}
        made = send(people["admin"], "post", "/api/v1/members/", body)
        assert made.status_code == 201 and "password" not in made.content.decode()
        url = f"/api/v1/members/{made.json()['id']}/"
        assert send(people["admin"], "delete", url, **{"If-Match": made.headers["ETag"]}).status_code == 204
        assert not Member.objects.filter(user__username="ben").exists()

    def test_every_change_is_in_the_log_with_before_and_after(self, people):
        send(people["admin"], "patch", "/api/v1/tenants/acme/", {"weight": 4}, **{"If-Match": "*"})
        found = people["viewer"].get("/api/v1/audit/?noun=tenant&tenant=acme").json()["results"][0]
        assert (found["actor"], found["before"], found["after"]) == ("admin", {"weight": 1}, {"weight": 4})
        assert len(found["hash"]) == 64 and found["request_id"]

    def test_the_log_cannot_be_written(self, people):
        for method in ("post", "put", "patch", "delete"):
            assert send(people["admin"], method, "/api/v1/audit/").status_code == 405


@pytest.mark.django_db(transaction=True)
def test_the_same_write_sent_twice_at_once_is_done_once(people):
    client, header = people["admin"], {"Idempotency-Key": "once"}
    results = side_by_side(*[lambda: send(client, "post", "/api/v1/api-keys/", KEY, **header) for _ in range(3)])
    assert [response.status_code for response in results] == [201, 201, 201]
    assert ApiKey.objects.count() == 1 and AuditEntry.objects.filter(action="key.create").count() == 1
    assert sum(response.json()["secret"] is not None for response in results) == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("tenants/", {"slug": "new", "name": "New", "parent": "\x00a"}, "parent"),
        ("members/", {"username": "eve", "password": "x" * 20, "role": "tenant", "tenant": "\x00a"}, "tenant"),
        ("invitations/", {"email": "eve@example.com", "role": "tenant", "tenant": "\x00a"}, "tenant"),
    ],
)
def test_a_name_that_no_database_can_hold_names_no_tenant(people, path, body, field):
    refused = people["admin"].post(f"/api/v1/{path}", body, content_type="application/json")
    assert refused.status_code == 400 and field in refused.json()["errors"]


@pytest.mark.parametrize("limit", ["1e3", "\uff11\uff12", "+5", " 5", "5.", "1,5", "0.0000000001", "-0.5e1"])
def test_money_is_written_as_the_description_says(people, limit):
    body = {"tenant": "acme", "name": "odd", "limit": limit, "reason": "plan"}
    refused = people["admin"].post("/api/v1/budgets/", body, content_type="application/json")
    assert refused.status_code == 400 and "limit" in refused.json()["errors"]
