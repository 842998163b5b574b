"""Personal tokens over REST: what they open, what narrows them, how they end."""

from datetime import timedelta

import pytest
from django.core.cache import cache
from django.core.exceptions import ValidationError
from django.test import Client
from django.utils import timezone

from controlplane.access import token_throttle
from controlplane.access.models import PersonalToken
from controlplane.access.queries import hashed
from controlplane.access.token_actions import EACH_MAX, allowed_to, create_token, revoke_token
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.policy.applying import NEEDS
from controlplane.tenants.models import Member, Tenant
from controlplane.tenants.roles import Role
from tests.access.test_page_forms import just_confirmed
from tests.windows import begin_in_one_window

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def clean_cache():
    cache.clear()
    yield
    cache.clear()


def issue(role, permissions=None, *, days=1, now=None):
    user = Member.objects.get(user__username=role).user
    return create_token(
        user_id=user.pk, name="script", permissions=permissions or allowed_to(role), days=days,
        actor=Actor(user.pk, role, role), now=now or timezone.now(),
    )  # fmt: skip


def call(secret, path="/api/v1/tenants/", method="get", **data):
    return getattr(Client(), method)(
        path, data or None, headers={"authorization": f"Bearer {secret}"}, content_type="application/json"
    )


def test_it_acts_as_the_person_without_a_form_token(people):
    issued = issue("admin")
    assert [row["slug"] for row in call(issued.secret).json()["results"]] == ["acme", "stranger"]
    made = call(issued.secret, method="post", slug="made", name="Made")
    assert made.status_code == 201
    assert AuditEntry.objects.get(action="tenant.create").actor_name == "admin"
    row = PersonalToken.objects.get()
    assert row.last_used_at is not None and row.secret_hash == hashed(issued.secret)
    assert issued.secret not in str(list(AuditEntry.objects.values()))


def test_a_tenants_member_sees_its_own_tenant_through_it(people):
    assert [row["slug"] for row in call(issue("tenant").secret).json()["results"]] == ["acme"]
    assert call(issue("tenant").secret, "/api/v1/tenants/stranger/").status_code == 404


def test_its_permissions_narrow_it_and_the_role_narrows_it_further(people):
    reads = issue("admin", ["tenant.read"])
    assert call(reads.secret).status_code == 200
    assert call(reads.secret, method="post", slug="x", name="X").status_code == 403
    assert call(reads.secret, "/api/v1/members/").status_code == 403
    everything = issue("admin")
    Member.objects.filter(user__username="admin").update(role=Role.VIEWER)
    assert call(everything.secret, method="post", slug="x", name="X").status_code == 403
    assert call(everything.secret).status_code == 200


def test_more_than_the_role_is_not_given(people):
    with pytest.raises(ValidationError, match=r"tenant\.write"):
        issue("viewer", ["tenant.read", "tenant.write"])


@pytest.mark.parametrize("end", ["revoked", "over", "locked out", "not a member"])
def test_it_ends(people, end):
    issued = issue("viewer", now=timezone.now() - timedelta(days=2) if end == "over" else None)
    user = issued.token.user
    if end == "revoked":
        assert call(issued.secret).status_code == 200
        revoke_token(token=issued.token, actor=Actor(user.pk, "viewer", "viewer"), now=timezone.now())
        revoke_token(token=issued.token, actor=Actor(user.pk, "viewer", "viewer"), now=timezone.now())
        assert AuditEntry.objects.filter(action="token.revoke").count() == 1
    elif end == "locked out":
        user.is_active = False
        user.save(update_fields=["is_active"])
    elif end == "not a member":
        user.member.delete()
    answer = call(issued.secret)
    assert answer.status_code == (403 if end == "not a member" else 401)
    assert answer.headers.get("WWW-Authenticate", "Bearer") == "Bearer"


def test_wrong_ones_are_401_and_after_thirty_429(people):
    begin_in_one_window(token_throttle.WINDOW_S, 10)
    for _ in range(token_throttle.WRONG_MAX):
        assert call("fbp_wrong").status_code == 401
    answer = call("fbp_wrong")
    assert answer.status_code == 429 and 1 <= int(answer.headers["Retry-After"]) <= 60
    assert call(issue("viewer").secret).status_code == 200, "a right one is not counted with them"


def test_a_token_that_calls_too_often_waits(people, monkeypatch):
    begin_in_one_window(token_throttle.WINDOW_S, 5)
    monkeypatch.setattr(token_throttle, "CALLS_MAX", 3)
    secret, other = issue("viewer").secret, issue("viewer").secret
    statuses = [call(secret).status_code for _ in range(5)]
    assert 429 in statuses and statuses[:3] == [200, 200, 200]
    assert call(other).status_code == 200


def test_one_person_has_at_most_so_many(people):
    for _ in range(EACH_MAX):
        issue("viewer")
    with pytest.raises(ValidationError, match="revoke one"):
        issue("viewer")


def test_the_page_shows_the_secret_once_and_only_its_owner_can_revoke(people):
    client = people["viewer"]
    just_confirmed(client)
    form = {"name": "nightly", "reach": "reads", "days": "30"}
    page = client.post("/account/tokens/new/", form).content.decode()
    secret = page.split('id="secret">')[1].split("<")[0]
    assert call(secret).status_code == 200 and secret not in client.get("/account/").content.decode()
    row = PersonalToken.objects.get()
    assert row.permissions and all(name.endswith(".read") for name in row.permissions)
    assert people["admin"].post(f"/account/tokens/{row.pk}/revoke/").status_code == 404
    assert client.post(f"/account/tokens/{row.pk}/revoke/").status_code == 302
    assert call(secret).status_code == 401


def test_making_one_asks_who_it_is_first(people):
    answer = people["viewer"].get("/account/tokens/new/")
    assert answer.status_code == 302 and answer.url.startswith("/account/confirm/")


def test_the_rest_description_knows_it(people):
    schemes = people["admin"].get("/api/schema/?format=json").json()["components"]["securitySchemes"]
    assert schemes["personalToken"]["scheme"] == "bearer"


def test_the_configuration_file_is_no_way_around_its_permissions(people):
    sections = "".join(f"  {name}: {{mode: unmanaged}}\n" for name in NEEDS if name != "tenants")
    items = "    - {slug: acme, weight: 7}\n    - {slug: stranger}\n"
    text = f"flexband: 1\nsections:\n{sections}  tenants:\n    mode: replace\n    items:\n{items}"
    path = "/api/v1/policy/configuration/apply/"
    narrow = call(issue("admin", ["policy.push"]).secret, path, "post", text=text, reason="Weigh")
    assert narrow.status_code == 403 and "tenant.write" in narrow.content.decode()
    assert Tenant.objects.get(slug="acme").weight == 1
    wide = call(issue("admin", ["policy.push", "tenant.write"]).secret, path, "post", text=text, reason="Weigh")
    assert wide.status_code == 200 and Tenant.objects.get(slug="acme").weight == 7
