"""REST of sessions, invitations, personal tokens and second factors: whose they are, and what a token may not."""

import json
from datetime import timedelta

import pytest
from allauth.mfa.models import Authenticator
from django.core import mail
from django.test import Client
from django.utils import timezone

from controlplane.access.models import Invitation, PersonalToken, Session
from controlplane.access.token_actions import allowed_to, create_token
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.tenants.models import IdempotentWrite, Member
from tests.access.examples import personal_token
from tests.access.test_page_forms import just_confirmed

pytestmark = pytest.mark.django_db
TOKEN = {"name": "nightly", "permissions": ["tenant.read"], "days": 7}
INVITED = {"email": "ada@example.com", "role": "oncall"}


def send(client, method, path, body=None, **headers):
    return getattr(client, method)(
        f"/api/v1/{path}", json.dumps(body or {}), content_type="application/json", headers=headers
    )


def person(role):
    return Member.objects.get(user__username=role)


def bearer(role, permissions=None):
    """A client that calls with a personal token."""
    user = person(role).user
    issued = create_token(
        user_id=user.pk, name="script", permissions=permissions or allowed_to(role), days=1,
        actor=Actor(user.pk, role, role), now=timezone.now(),
    )  # fmt: skip
    return Client(headers={"authorization": f"Bearer {issued.secret}"})


def session_of(client):
    return Session.objects.get(session_key=client.cookies["sessionid"].value)


def names(client, path):
    return {row["username"] for row in client.get(f"/api/v1/{path}").json()["results"]}


class TestSessions:
    def test_own_ones_are_listed_and_everybodys_for_admins(self, people):
        assert names(people["viewer"], "sessions/") == {"viewer"}
        assert {"admin", "viewer", "stranger"} <= names(people["admin"], "sessions/")
        assert names(people["admin"], "sessions/?username=oncall") == {"oncall"}
        assert names(people["admin"], f"sessions/?member={person('finance').pk}") == {"finance"}
        (row,) = people["viewer"].get("/api/v1/sessions/").json()["results"]
        assert row["current"] is True and row["id"] == str(session_of(people["viewer"]).public_id)
        assert session_of(people["viewer"]).session_key not in json.dumps(row), "a session's key is a secret"

    def test_an_admins_token_that_may_not_read_members_sees_its_own(self, people):
        assert names(bearer("admin", ["own.read"]), "sessions/") == {"admin"}

    def test_ending_one_signs_it_out(self, people):
        mine = session_of(people["viewer"])
        assert send(people["viewer"], "delete", f"sessions/{mine.public_id}/").status_code == 204
        assert people["viewer"].get("/account/").status_code == 302
        entry = AuditEntry.objects.get(action="session.end")
        assert (entry.actor_name, entry.object_id) == ("viewer", "viewer")

    def test_anothers_is_not_there_and_an_admins_to_end(self, people):
        theirs = f"sessions/{session_of(people['viewer']).public_id}/"
        assert send(people["oncall"], "delete", theirs).status_code == 404
        assert send(bearer("admin", ["own.write", "member.read"]), "delete", theirs).status_code == 403
        assert send(bearer("viewer", ["own.read"]), "delete", theirs).status_code == 403, "a token that only reads"
        assert people["viewer"].get("/account/").status_code == 200
        assert send(people["admin"], "delete", theirs).status_code == 204
        assert people["viewer"].get("/account/").status_code == 302

    def test_all_of_a_member_and_all_others_of_ones_own(self, people):
        other = Client()
        other.force_login(person("admin").user)
        assert send(people["oncall"], "post", "sessions/end/", {"member": person("viewer").pk}).status_code == 404
        assert send(people["admin"], "post", "sessions/end/", {"member": person("viewer").pk}).json() == {"ended": 1}
        assert send(people["admin"], "post", "sessions/end/").json() == {"ended": 1}
        assert [people["admin"].get("/account/").status_code, other.get("/account/").status_code] == [200, 302]
        assert send(people["admin"], "post", "sessions/end/", {"member": 99_999}).status_code == 404


class TestInvitations:
    def test_made_listed_withdrawn(self, people, django_capture_on_commit_callbacks, settings):
        settings.EMAIL_IS_SET = True
        with django_capture_on_commit_callbacks(execute=True):
            made = send(people["admin"], "post", "invitations/", INVITED)
        link, ours = made.json()["link"], made.json()["id"]
        assert made.status_code == 201 and link in mail.outbox[0].body
        assert Client().get(link).status_code == 200
        (row,) = people["admin"].get("/api/v1/invitations/?role=oncall&email=ada").json()["results"]
        assert (row["email"], "link" in row) == ("ada@example.com", False)
        assert link.split("/")[-2] not in str(list(AuditEntry.objects.values()))
        assert send(people["admin"], "post", f"invitations/{ours}/withdraw/").status_code == 204
        assert Client().get(link).status_code == 404
        assert send(people["admin"], "post", f"invitations/{ours}/withdraw/").status_code == 404

    def test_repeated_under_one_key_it_is_one_and_the_link_is_not_kept(self, people):
        first = send(people["admin"], "post", "invitations/", INVITED, **{"Idempotency-Key": "a"})
        again = send(people["admin"], "post", "invitations/", INVITED, **{"Idempotency-Key": "a"})
        assert (again.status_code, again.headers["Idempotency-Replayed"], again.json()["link"]) == (201, "true", None)
        assert Invitation.objects.count() == 1
        assert first.json()["link"].split("/")[-2] not in str(list(IdempotentWrite.objects.values()))

    def test_rules_are_those_of_the_page(self, people):
        wrong = send(people["admin"], "post", "invitations/", {**INVITED, "role": "tenant"})
        assert wrong.status_code == 400 and "tenant" in wrong.json()["errors"]
        assert send(people["admin"], "post", "invitations/", {**INVITED, "tenant": "acme"}).status_code == 400
        assert send(people["admin"], "post", "invitations/", {**INVITED, "days": 31}).status_code == 400
        assert people["oncall"].get("/api/v1/invitations/").status_code == 403


class TestPersonalTokens:
    def test_made_in_a_session_that_confirmed(self, people):
        refused = send(people["viewer"], "post", "personal-tokens/", TOKEN)
        assert (refused.status_code, refused.json()["code"]) == (403, "confirmation_required")
        just_confirmed(people["viewer"])
        made = send(people["viewer"], "post", "personal-tokens/", TOKEN, **{"Idempotency-Key": "a"})
        assert made.status_code == 201 and made.json()["in_force"]
        caller = Client(headers={"authorization": f"Bearer {made.json()['secret']}"})
        assert caller.get("/api/v1/tenants/").status_code == 200
        assert caller.get("/api/v1/sessions/").status_code == 403
        again = send(people["viewer"], "post", "personal-tokens/", TOKEN, **{"Idempotency-Key": "a"})
        assert (again.json()["secret"], PersonalToken.objects.count()) == (None, 1)

    def test_no_token_makes_one(self, people):
        refused = send(bearer("admin"), "post", "personal-tokens/", TOKEN)
        assert (refused.status_code, refused.json()["code"]) == (403, "confirmation_required")
        assert PersonalToken.objects.count() == 1

    def test_not_beyond_the_role(self, people):
        just_confirmed(people["viewer"])
        wrong = send(people["viewer"], "post", "personal-tokens/", {**TOKEN, "permissions": ["tenant.write"]})
        assert wrong.status_code == 400 and "tenant.write" in str(wrong.json()["errors"]["permissions"])
        assert send(people["viewer"], "post", "personal-tokens/", {**TOKEN, "permissions": []}).status_code == 400

    def test_listed_and_revoked_by_owner_or_admin(self, people):
        row = personal_token("acme")
        assert names(people["oncall"], "personal-tokens/") == set()
        assert names(people["viewer"], "personal-tokens/") == names(people["admin"], "personal-tokens/") == {"viewer"}
        assert send(people["oncall"], "post", f"personal-tokens/{row}/revoke/").status_code == 404
        assert (
            send(bearer("admin", ["own.write", "member.read"]), "post", f"personal-tokens/{row}/revoke/").status_code
            == 403
        )
        ended = send(people["viewer"], "post", f"personal-tokens/{row}/revoke/")
        assert ended.status_code == 200 and ended.json()["in_force"] is False
        assert send(people["admin"], "post", f"personal-tokens/{row}/revoke/").json() == ended.json()

    def test_a_token_can_end_itself(self, people):
        caller = bearer("viewer")
        (own,) = caller.get("/api/v1/personal-tokens/").json()["results"]
        assert send(caller, "post", f"personal-tokens/{own['id']}/revoke/").json()["in_force"] is False
        assert caller.get("/api/v1/personal-tokens/").status_code == 401


class TestSecondFactors:
    def test_told_and_removed_with_a_reason(self, people):

        path = f"second-factors/{person('viewer').pk}/"
        assert people["admin"].get(f"/api/v1/{path}").json() == {
            "member": person("viewer").pk, "username": "viewer", "app": False, "passkeys": [], "recovery_codes": None,
        }  # fmt: skip
        Authenticator.objects.create(user=person("viewer").user, type="totp", data={"secret": "x"})
        assert people["admin"].get(f"/api/v1/{path}").json()["app"] is True
        assert send(people["admin"], "post", f"{path}remove/").status_code == 400
        assert send(people["admin"], "post", f"{path}remove/", {"reason": "phone lost"}).json() == {"removed": 1}
        assert people["viewer"].get("/account/").status_code == 302
        assert people["oncall"].get(f"/api/v1/{path}").status_code == 403


def test_lists_ask_a_fixed_number_of_questions(people, django_assert_max_num_queries):
    for number in range(5):
        Invitation.objects.create(
            email=f"{number}@example.com", role="viewer", secret_hash=str(number), created_at=timezone.now(),
            created_by="ada", expires_at=timezone.now() + timedelta(days=1),
        )  # fmt: skip
        bearer("viewer")
    for path in ("sessions", "invitations", "personal-tokens"):
        with django_assert_max_num_queries(5):
            assert people["admin"].get(f"/api/v1/{path}/").status_code == 200
