"""Pages of tenants, keys and people, as administrators use them."""

import re

import pytest
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.tenants import actions, key_actions
from controlplane.tenants.key_actions import secret_hash
from controlplane.tenants.models import ApiKey, Member, Tenant
from controlplane.tenants.roles import PERMISSIONS
from tests import factories
from tests.tenants.conftest import ADMIN

TENANT = {
    "name": "Acme Support", "parent": "", "weight": "3", "max_concurrency": "32", "classes": ["chat"],
    "outage_posture": "closed", "cost_centre": "",
}  # fmt: skip


@pytest.fixture
def acme(people):
    factories.workload_class("chat")
    factories.workload_class("bulk", "batch")
    return Tenant.objects.get(slug="acme")


@pytest.fixture
def key(acme) -> ApiKey:
    return key_actions.create_key(
        tenant_id=acme.pk, name="web", classes=["chat"], default_class="chat", actor=ADMIN, now=timezone.now()
    ).key


def secret_on(page: str) -> str | None:
    found = re.search(r'id="secret">(fb_[^<]+)<', page)
    return found[1] if found else None


class TestTenantForms:
    def test_review_then_create(self, people, acme):
        client, form = people["admin"], {**TENANT, "slug": "globex"}
        review = client.post("/tenants/new/", form).content.decode()
        assert "globex" in review and 'name="confirm"' in review and not Tenant.objects.filter(slug="globex").exists()
        assert client.post("/tenants/new/", {**form, "confirm": "1"}).url == "/tenants/globex/"
        assert Tenant.objects.get(slug="globex").classes == ["chat"]

    def test_a_copy_begins_with_all_but_the_names(self, people, acme):
        client = people["admin"]
        Tenant.objects.filter(pk=acme.pk).update(weight=7, classes=["bulk"], cost_centre="CC-12", outage_posture="open")
        page = client.get("/tenants/new/?like=acme").content.decode()
        assert (
            "New tenant like acme" in page
            and "/tenants/new/?like=acme" in client.get("/tenants/acme/").content.decode()
        )
        assert 'value="7"' in page and 'value="CC-12"' in page and not re.search(r'name="(slug|name)" value=', page)
        assert re.findall(r'value="(\w+)"[^>]* checked', page) == ["bulk"]
        assert '<option value="open" selected' in page
        assert client.get("/tenants/new/?like=nobody").status_code == 404

    def test_back_from_the_review_the_form_has_everything(self, people, acme):
        page = people["admin"].post("/tenants/new/", {**TENANT, "slug": "globex", "edit": "1"}).content.decode()
        assert 'value="globex"' in page and 'value="Acme Support"' in page

    def test_a_wrong_value_is_named_twice_and_kept(self, people, acme):
        response = people["admin"].post("/tenants/new/", {**TENANT, "slug": "New Tenant", "confirm": "1"})
        page = response.content.decode()
        assert response.status_code == 400 and 'href="#id_slug"' in page and 'value="New Tenant"' in page

    def test_an_edit_shows_before_and_after_and_saves_the_reason(self, people, acme):
        client, form = people["admin"], {**TENANT, "version": "1"}
        review = client.post("/tenants/acme/edit/", form).content.decode()
        assert "next policy revision" in review
        client.post("/tenants/acme/edit/", {**form, "confirm": "1", "reason": "grown"})
        entry = AuditEntry.objects.get(action="tenant.edit")
        assert (entry.reason, entry.after["weight"], entry.before["weight"]) == ("grown", 3, 1)

    def test_whoever_was_slower_sees_what_changed(self, people, acme):
        actions.edit_tenant(tenant_id=acme.pk, version=1, changes={"weight": 9}, actor=ADMIN, now=timezone.now())
        response = people["admin"].post("/tenants/acme/edit/", {**TENANT, "version": "1", "confirm": "1"})
        page = response.content.decode()
        assert response.status_code == 409 and "ada changed this" in page and "<td>9</td><td>3</td>" in page
        assert Tenant.objects.get(slug="acme").weight == 9

    def test_suspend_and_resume(self, people, acme):
        client = people["oncall"]
        assert "Enter a reason" in client.post("/acts/suspend/acme/", {}, follow=True).content.decode()
        assert Tenant.objects.get(slug="acme").state == "active"
        client.post("/acts/suspend/acme/", {"reason": "flood"})
        page = client.get("/tenants/acme/").content.decode()
        assert "Suspended" in page and "flood" in page
        client.post("/acts/resume/acme/", {"reason": "calm"})
        assert Tenant.objects.get(slug="acme").state == "active"

    def test_a_get_changes_nothing(self, people, acme):
        assert people["admin"].get("/tenants/acme/archive/").status_code == 405
        for verb in ("suspend", "resume"):
            assert people["admin"].get(f"/acts/{verb}/acme/").status_code == 200
        assert Tenant.objects.get(slug="acme").state == "active"
        assert not AuditEntry.objects.filter(object_id="acme").exists()

    def test_archive(self, people, acme, key):
        child = factories.tenant("acme-lab", parent=acme)
        asked = people["admin"].get("/tenants/acme/").content.decode()
        assert "Revokes its 1 working key for ever. It sent nothing." in asked
        assert "Archive its children first: acme-lab." in asked
        Tenant.objects.filter(pk=child.pk).update(state="archived")
        assert "children first" not in people["admin"].get("/tenants/acme/").content.decode()
        assert "Say why" in people["admin"].post("/tenants/acme/archive/", {}, follow=True).content.decode()
        people["admin"].post("/tenants/acme/archive/", {"reason": "left"})
        assert Tenant.objects.get(slug="acme").state == "archived"
        assert ApiKey.objects.get().state == "revoked"


class TestKeys:
    FORM = {"name": "batch job", "classes": ["chat"], "default_class": "chat"}

    def test_the_secret_is_shown_once_and_not_cached(self, people, acme):
        response = people["admin"].post("/tenants/acme/keys/new/", self.FORM)
        secret = secret_on(response.content.decode())
        assert secret is not None and response.headers["Cache-Control"] == "no-store"
        assert ApiKey.objects.get().secret_hash == secret_hash(secret)
        for url in ("/keys/", "/tenants/acme/?tab=keys", "/audit/", "/api/v1/api-keys/"):
            assert secret.split("_", 2)[2] not in people["admin"].get(url).content.decode()

    def test_what_is_missing_is_named(self, people, acme):
        response = people["admin"].post("/tenants/acme/keys/new/", {"name": "", "default_class": "bulk"})
        assert response.status_code == 400
        assert 'href="#id_name"' in response.content.decode()

    def test_a_tenant_without_classes_gets_a_way_out(self, people, acme):
        page = people["admin"].get("/tenants/stranger/keys/new/").content.decode()
        assert "no class yet" in page and "/tenants/stranger/edit/" in page

    def test_edit_with_review(self, people, key):
        client, url = people["admin"], f"/keys/{key.public_id}/edit/"
        form = {**self.FORM, "version": "1", "max_concurrency": "7"}
        assert "batch job" in client.post(url, form).content.decode()
        client.post(url, {**form, "confirm": "1", "reason": "r"})
        assert ApiKey.objects.get().max_concurrency == 7

    def test_rotating_the_same_form_twice_shows_the_same_secret(self, people, key):
        client, url = people["admin"], f"/keys/{key.public_id}/rotate/"
        rotation_id = re.search(r'name="rotation_id" value="([^"]+)"', client.get(url).content.decode())[1]
        form = {"rotation_id": rotation_id, "overlap_hours": "48", "reason": "yearly"}
        first, second = (secret_on(client.post(url, form).content.decode()) for _ in range(2))
        assert first is not None and first == second
        assert AuditEntry.objects.filter(action="key.rotate").count() == 1

    def test_during_an_overlap_the_form_asks(self, people, key):
        client, url = people["admin"], f"/keys/{key.public_id}/rotate/"
        client.post(url, {"rotation_id": "rotation-1", "overlap_hours": "48", "reason": "yearly"})
        again = {"rotation_id": "rotation-2", "overlap_hours": "48", "reason": "leak"}
        refused = client.post(url, again)
        assert refused.status_code == 400 and secret_on(refused.content.decode()) is None
        assert secret_on(client.post(url, {**again, "end_overlap": "on"}).content.decode())

    def test_revoke_needs_a_reason(self, people, key):
        url = f"/keys/{key.public_id}/revoke/"
        people["admin"].post(url, {})
        assert ApiKey.objects.get().state == "active"
        people["admin"].post(url, {"reason": "leaked"})
        assert ApiKey.objects.get().state == "revoked"

    def test_the_lists_queries_do_not_grow(self, people, key, django_assert_num_queries):
        with django_assert_num_queries(6):
            people["admin"].get("/keys/")
        for number in range(20):
            key_actions.create_key(
                tenant_id=key.tenant_id, name=f"k{number}", classes=["chat"], default_class="chat", actor=ADMIN,
                now=timezone.now(),
            )  # fmt: skip
        with django_assert_num_queries(6):
            people["admin"].get("/keys/")

    @pytest.mark.parametrize("query,found", [("q=web", 1), ("q=nothing", 0), ("state=revoked", 0), ("q=acme", 1)])
    def test_search(self, query, found, people, key):
        assert len(people["admin"].get(f"/keys/?{query}").context["page"].rows) == found


class TestPeople:
    def test_create_edit_and_remove(self, people, acme):
        client = people["admin"]
        form = {"username": "ben", "role": "tenant", "tenant": "acme", "password": "correct horse battery"}
        assert client.post("/settings/members/new/", form).status_code == 302
        member = Member.objects.get(user__username="ben")
        client.post(f"/settings/members/{member.pk}/edit/", {"role": "viewer", "tenant": "", "version": "1"})
        member.refresh_from_db()
        assert (member.role, member.tenant, member.version) == ("viewer", None, 2)
        client.post(f"/settings/members/{member.pk}/remove/", {"reason": "left"})
        assert not Member.objects.filter(pk=member.pk).exists()

    def test_an_old_form_is_told_what_changed(self, people):
        member = Member.objects.get(user__username="viewer")
        client, url = people["admin"], f"/settings/members/{member.pk}/edit/"
        client.post(url, {"role": "finance", "tenant": "", "version": "1"})
        response = client.post(url, {"role": "oncall", "tenant": "", "version": "1"})
        assert response.status_code == 409 and "<td>finance</td><td>oncall</td>" in response.content.decode()

    def test_a_weak_password_is_refused_beside_its_field(self, people):
        member = Member.objects.get(user__username="viewer")
        response = people["admin"].post(f"/settings/members/{member.pk}/password/", {"password": "short"})
        assert response.status_code == 400 and "12 characters" in response.content.decode()

    def test_the_list_s_queries_do_not_grow(self, people, django_assert_num_queries):
        with django_assert_num_queries(6):
            people["admin"].get("/settings/members/")
        for number in range(5):
            factories.person("viewer", name=f"v{number}")
        with django_assert_num_queries(6):
            people["admin"].get("/settings/members/")

    def test_the_table_of_roles_is_the_one_that_is_asked(self, people):
        page = people["viewer"].get("/settings/roles/").content.decode()
        assert all(permission in page for permission in PERMISSIONS)
        assert page.count(">yes<") + page.count("yes</span>") >= sum(len(roles) for roles in PERMISSIONS.values())


@pytest.mark.django_db
@pytest.mark.parametrize("url", ["/healthz", "/readyz"])
def test_health_is_open_and_says_little(url, client):
    response = client.get(url)
    assert response.status_code == 200 and len(response.content) < 40


def test_the_icon_that_browsers_look_for_is_there_for_anybody(client):
    response = client.get("/favicon.ico")
    assert response.status_code == 302 and "max-age=86400" in response["Cache-Control"]
    assert re.fullmatch(r"/static/flexband/favicon[.0-9a-f]*\.svg", response["Location"])


def test_the_description_is_openapi_3_1_and_its_page_has_no_inline_script(people):
    schema = people["viewer"].get("/api/schema/?format=json").json()
    assert schema["openapi"].startswith("3.1")
    assert {"/api/v1/tenants/", "/api/v1/api-keys/", "/api/v1/budgets/", "/api/v1/members/", "/api/v1/audit/"} <= set(
        schema["paths"]
    )
    page = people["viewer"].get("/api/docs/").content.decode()
    assert not re.search(r"<script(?![^>]*src=)", page)
