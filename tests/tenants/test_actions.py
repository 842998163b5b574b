"""Tenants: what can be created and changed, what is refused and why, and who wins when two act at once."""

import pytest
from django.core.exceptions import ValidationError

from controlplane.audit.models import AuditEntry
from controlplane.audit.queries import verify_chain
from controlplane.tenants import actions, key_actions
from controlplane.tenants.actions import Stale
from controlplane.tenants.models import ApiKey, Installation, Tenant
from tests import factories
from tests.tenants.conftest import ADMIN, side_by_side

NOW = factories.NOW


def edit(row: Tenant, *, version: int | None = None, **changes) -> Tenant:
    return actions.edit_tenant(
        tenant_id=row.pk, version=version or row.version, changes=changes, actor=ADMIN, now=NOW, reason="because"
    )


@pytest.mark.django_db
class TestCreate:
    def test_is_active_and_in_the_audit_log(self, installation, actor):
        row = actions.create_tenant(slug="acme", name=" Acme ", weight=3, classes=["chat"], actor=actor, now=NOW)
        assert (row.name, row.state, row.weight, row.version) == ("Acme", "active", 3, 1)
        entry = AuditEntry.objects.get(action="tenant.create")
        assert (entry.actor_name, entry.tenant_slug, entry.before) == ("ada", "acme", None)
        assert entry.after["slug"] == "acme" and entry.after["classes"] == ["chat"]

    @pytest.mark.parametrize("slug", ["", "Acme", "a_b", "-a", "a" * 64, "new", "platform", "a b"])
    def test_refuses_a_slug_that_cannot_be_an_address(self, slug, installation, actor):
        with pytest.raises(ValidationError) as caught:
            actions.create_tenant(slug=slug, name="A", actor=actor, now=NOW)
        assert list(caught.value.message_dict) == ["slug"]

    def test_refuses_a_slug_that_is_taken(self, acme, actor):
        with pytest.raises(ValidationError) as caught:
            actions.create_tenant(slug="acme", name="Other", actor=actor, now=NOW)
        assert "slug" in caught.value.message_dict

    def test_refuses_fields_that_have_their_own_actions(self, installation, actor):
        with pytest.raises(ValidationError):
            actions.create_tenant(slug="a", name="A", state="archived", actor=actor, now=NOW)


@pytest.mark.django_db
class TestEdit:
    def test_writes_only_what_differs_to_the_audit_log(self, acme):
        row = edit(acme, weight=5, name="Acme")
        entry = AuditEntry.objects.get(action="tenant.edit")
        assert (entry.before, entry.after, entry.reason) == ({"weight": 1}, {"weight": 5}, "because")
        assert row.version == 2

    def test_changes_nothing_when_nothing_differs(self, acme):
        assert edit(acme, weight=1).version == 1
        assert not AuditEntry.objects.exists()

    def test_an_old_version_is_stale_and_brings_the_present_row(self, acme):
        edit(acme, weight=5)
        with pytest.raises(Stale) as caught:
            edit(acme, version=1, weight=7)
        assert caught.value.current.weight == 5

    def test_the_slug_never_changes(self, acme):
        with pytest.raises(ValidationError):
            edit(acme, slug="other")

    def test_a_class_that_a_key_has_cannot_be_taken_away(self, acme, actor):
        key_actions.create_key(
            tenant_id=acme.pk, name="web", classes=["bulk"], default_class="bulk", actor=actor, now=NOW
        )
        with pytest.raises(ValidationError, match="web still has bulk"):
            edit(acme, classes=["chat"])

    def test_a_ring_of_parents_is_refused_at_any_length(self, acme):
        child = factories.tenant("child", parent=acme)
        grandchild = factories.tenant("grandchild", parent=child)
        for parent in (acme, child, grandchild):
            with pytest.raises(ValidationError) as caught:
                edit(acme, parent_id=parent.pk)
            assert list(caught.value.message_dict) == ["parent"]

    def test_nesting_has_a_bound(self, acme, actor):
        row = acme
        for depth in range(2, actions.DEPTH_MAX + 1):
            row = actions.create_tenant(slug=f"t{depth}", name="T", parent_id=row.pk, actor=actor, now=NOW)
        with pytest.raises(ValidationError, match="at most"):
            actions.create_tenant(slug="too-deep", name="T", parent_id=row.pk, actor=actor, now=NOW)


@pytest.mark.django_db
class TestState:
    def test_suspending_takes_a_live_number_at_once(self, acme, actor):
        row = actions.suspend_tenant(tenant_id=acme.pk, reason="abuse", actor=actor, now=NOW)
        assert (row.state, row.suspend_reason, row.live_number) == ("suspended", "abuse", 1)
        assert Installation.objects.get(pk=1).live_number == 1

    def test_doing_it_again_changes_nothing(self, acme, actor):
        for _ in range(2):
            row = actions.suspend_tenant(tenant_id=acme.pk, reason="abuse", actor=actor, now=NOW)
        assert row.live_number == 1 and AuditEntry.objects.count() == 1

    def test_resuming_clears_the_reason(self, acme, actor):
        actions.suspend_tenant(tenant_id=acme.pk, reason="abuse", actor=actor, now=NOW)
        row = actions.resume_tenant(tenant_id=acme.pk, reason="sorted out", actor=actor, now=NOW)
        assert (row.state, row.suspend_reason, row.live_number) == ("active", "", 2)

    @pytest.mark.parametrize("action", [actions.suspend_tenant, actions.resume_tenant])
    def test_needs_a_reason(self, action, acme, actor):
        with pytest.raises(ValidationError) as caught:
            action(tenant_id=acme.pk, reason="  ", actor=actor, now=NOW)
        assert list(caught.value.message_dict) == ["reason"]

    def test_archiving_revokes_the_keys_and_is_final(self, acme, actor):
        issued = key_actions.create_key(
            tenant_id=acme.pk, name="web", classes=["chat"], default_class="chat", actor=actor, now=NOW
        )
        actions.archive_tenant(tenant_id=acme.pk, version=1, reason="left", actor=actor, now=NOW)
        assert ApiKey.objects.get(pk=issued.key.pk).state == "revoked"
        numbers = {ApiKey.objects.get().live_number, Tenant.objects.get().live_number}
        assert len(numbers) == 2, "each change has a number of its own"
        with pytest.raises(ValidationError):
            actions.resume_tenant(tenant_id=acme.pk, reason="back", actor=actor, now=NOW)
        with pytest.raises(ValidationError):
            key_actions.create_key(
                tenant_id=acme.pk, name="new", classes=["chat"], default_class="chat", actor=actor, now=NOW
            )
        assert verify_chain().broken_at is None

    def test_children_come_first(self, acme, actor):
        factories.tenant("child", parent=acme)
        with pytest.raises(ValidationError, match="child"):
            actions.archive_tenant(tenant_id=acme.pk, version=1, reason="left", actor=actor, now=NOW)


@pytest.mark.django_db(transaction=True)
class TestAtTheSameTime:
    def test_of_two_edits_of_one_version_one_wins_and_the_other_is_told(self, acme):
        results = side_by_side(lambda: edit(acme, weight=5), lambda: edit(acme, weight=7))
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["Stale", "Tenant"]
        winner = next(result for result in results if isinstance(result, Tenant))
        assert Tenant.objects.get(pk=acme.pk).weight == winner.weight
        assert AuditEntry.objects.count() == 1

    def test_two_edits_cannot_close_a_ring_between_them(self, acme):
        other = factories.tenant("other")
        results = side_by_side(lambda: edit(acme, parent_id=other.pk), lambda: edit(other, parent_id=acme.pk))
        assert sorted(type(result).__name__ for result in results) == ["Tenant", "ValidationError"]

    def test_changes_at_once_get_numbers_without_gap_or_repeat(self, acme, actor):
        rows = [factories.tenant(f"t{number}") for number in range(6)]
        results = side_by_side(
            *[
                lambda row=row: actions.suspend_tenant(tenant_id=row.pk, reason="x", actor=actor, now=NOW)
                for row in rows
            ]
        )
        assert sorted(row.live_number for row in results) == [1, 2, 3, 4, 5, 6]
        assert verify_chain().broken_at is None
