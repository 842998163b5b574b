"""People: roles, the last administrator, passwords."""

import pytest
from django.contrib.auth import authenticate
from django.core.exceptions import ValidationError
from django.test import Client

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.tenants import member_actions
from controlplane.tenants.actions import Stale
from controlplane.tenants.models import Member
from tests import factories
from tests.tenants.conftest import ADMIN, side_by_side

NOW = factories.NOW
PASSWORD = "correct horse battery"


def create(username="ben", role="viewer", **values) -> Member:
    return member_actions.create_member(username=username, password=PASSWORD, role=role, actor=ADMIN, now=NOW, **values)


def edit(member: Member, role: str, tenant_id=None) -> Member:
    return member_actions.edit_member(
        member_id=member.pk, version=member.version, role=role, tenant_id=tenant_id, actor=ADMIN, now=NOW
    )


@pytest.mark.django_db
class TestMembers:
    def test_a_new_member_can_sign_in_and_the_log_has_no_password(self, installation):
        create()
        assert authenticate(username="ben", password=PASSWORD) is not None
        assert PASSWORD not in str(list(AuditEntry.objects.values()))

    @pytest.mark.parametrize(
        "values,field",
        [
            ({"username": ""}, "username"),
            ({"username": "BEN"}, "username"),
            ({"username": "cleo", "role": "root"}, "role"),
            ({"username": "cleo", "role": "tenant"}, "tenant"),
        ],
    )
    def test_refuses_what_cannot_be(self, values, field, installation):
        create()
        with pytest.raises(ValidationError) as caught:
            create(**values)
        assert list(caught.value.message_dict) == [field]

    def test_only_the_role_tenant_has_a_tenant(self, acme):
        with pytest.raises(ValidationError):
            create(role="viewer", tenant_id=acme.pk)
        assert create(role="tenant", tenant_id=acme.pk).tenant == acme

    def test_a_weak_password_is_refused(self, installation):
        with pytest.raises(ValidationError) as caught:
            member_actions.create_member(username="ben", password="short", role="viewer", actor=ADMIN, now=NOW)
        assert "12 characters" in str(caught.value)

    def test_an_old_version_is_stale(self, installation):
        create("root", "admin")
        member = create()
        edit(member, "oncall")
        with pytest.raises(Stale):
            edit(member, "finance")

    def test_the_last_administrator_stays(self, installation):
        root = create("root", "admin")
        with pytest.raises(ValidationError, match="last administrator"):
            edit(root, "viewer")
        with pytest.raises(ValidationError, match="last administrator"):
            member_actions.remove_member(member_id=root.pk, actor=ADMIN, now=NOW)

    def test_nobody_removes_themselves(self, installation):
        create("root", "admin")
        other = create("other", "admin")
        myself = Actor(id=other.user_id, name="other", role="admin")
        with pytest.raises(ValidationError, match="yourself"):
            member_actions.remove_member(member_id=other.pk, actor=myself, now=NOW)

    def test_a_removed_persons_open_session_ends(self, installation):
        create("root", "admin")
        member, client = create(), Client()
        client.force_login(member.user)
        assert client.get("/tenants/").status_code == 200
        member_actions.remove_member(member_id=member.pk, actor=ADMIN, now=NOW)
        assert client.get("/tenants/").status_code == 302

    def test_a_new_password_ends_open_sessions(self, installation):
        member, client = create(), Client()
        client.force_login(member.user)
        member_actions.set_password(user_id=member.user_id, password="another long one 4", actor=ADMIN, now=NOW)
        assert client.get("/tenants/").status_code == 302


@pytest.mark.django_db(transaction=True)
def test_two_administrators_cannot_demote_each_other_at_once(installation):
    first, second = create("first", "admin"), create("second", "admin")
    results = side_by_side(lambda: edit(first, "viewer"), lambda: edit(second, "viewer"))
    assert sorted(type(result).__name__ for result in results) == ["Member", "ValidationError"]
    assert Member.objects.filter(role="admin").count() == 1
