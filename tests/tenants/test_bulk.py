"""One action on many rows: reviewed and done row by row, an entry each, and none that somebody changed meanwhile."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.tenants import actions, key_actions
from controlplane.tenants.bulk import APPLIED, CHANGED, NOTHING, READY, REFUSED, Selection, apply, rehearse
from controlplane.tenants.bulk_nouns import KEYS, TENANTS
from controlplane.tenants.models import ApiKey, Member, Tenant
from tests import factories
from tests.tenants.conftest import ADMIN, side_by_side

T, K, M = "/bulk/tenants/", "/bulk/keys/", "/bulk/members/"


@pytest.fixture
def acme(people):
    factories.workload_class("chat")
    factories.workload_class("bulk", "batch")
    return Tenant.objects.get(slug="acme")


@pytest.fixture
def three(acme):
    return [acme, factories.tenant("globex"), factories.tenant("hooli")]


def key_of(tenant, name="web", **limits):
    return key_actions.create_key(
        tenant_id=tenant.pk, name=name, classes=["chat"], default_class="chat", actor=ADMIN, now=timezone.now(),
        **limits,
    ).key  # fmt: skip


def box(*rows):
    return [f"{row.pk}:{row.version}" for row in rows]


def states(response):
    return {one.name: one.state for one, _ in response.context["lines"]}


def reviewed(response):
    """The rows that the review sends on."""
    return re.findall(r'name="row" value="([\d:]+)"', response.content.decode())


class TestTenants:
    def test_weights_are_reviewed_before_and_after_and_then_set(self, people, three):
        client = people["admin"]
        form = client.post(T, {"action": "weight", "row": box(*three)})
        assert 'name="weight"' in form.content.decode()
        sent = {"action": "weight", "row": box(*three), "given": "1", "weight": "7"}
        review = client.post(T, sent)
        assert set(states(review).values()) == {READY} and "<td>1</td>" in review.content.decode()
        assert set(Tenant.objects.values_list("weight", flat=True)) == {1}
        assert not AuditEntry.objects.exists(), "a review leaves nothing behind"
        done = client.post(T, {**sent, "row": reviewed(review), "confirm": "1", "reason": "new prices"})
        assert states(done) == {"acme": APPLIED, "globex": APPLIED, "hooli": APPLIED}
        assert dict(Tenant.objects.values_list("slug", "weight")) == {"acme": 7, "globex": 7, "hooli": 7, "stranger": 1}
        entries = AuditEntry.objects.filter(action="tenant.edit")
        assert {row.object_id for row in entries} == {"acme", "globex", "hooli"}
        assert {row.reason for row in entries} == {"new prices"}
        (request_id,) = {row.request_id for row in entries}
        page = client.get(f"/audit/?request={request_id}").content.decode()
        assert all(slug in page for slug in ("acme", "globex", "hooli"))

    def test_all_on_the_page_is_read_without_a_script(self, people, three):
        review = people["admin"].post(T, {"action": "suspend", "all": "1", "shown": ",".join(box(*three))})
        assert len(states(review)) == 3

    def test_what_cannot_be_used_stays_in_the_form_with_the_rows(self, people, three):
        response = people["admin"].post(T, {"action": "weight", "row": box(*three), "given": "1", "weight": "0"})
        page = response.content.decode()
        assert response.status_code == 400 and 'href="#id_weight"' in page and len(reviewed(response)) == 3

    def test_a_reason_is_asked_for(self, people, three):
        sent = {"action": "suspend", "row": box(*three), "confirm": "1"}
        response = people["oncall"].post(T, sent)
        assert response.status_code == 400 and "say why" in response.content.decode()
        assert not Tenant.objects.filter(state="suspended").exists()

    def test_what_a_row_forbids_is_told_and_the_others_are_done(self, people, three):
        acme, globex, hooli = three
        key_of(acme)
        actions.archive_tenant(tenant_id=hooli.pk, version=1, reason="left", actor=ADMIN, now=timezone.now())
        hooli.refresh_from_db()
        sent = {"action": "class-take", "row": box(*three), "given": "1", "workload_class": "chat"}
        review = people["admin"].post(T, sent)
        assert states(review) == {"acme": REFUSED, "globex": READY, "hooli": REFUSED}
        page = review.content.decode()
        assert "Key web still has chat" in page and "An archived tenant cannot be changed" in page
        assert reviewed(review) == box(globex)
        people["admin"].post(T, {**sent, "row": reviewed(review), "confirm": "1", "reason": "r"})
        assert Tenant.objects.get(slug="globex").classes == ["bulk"]

    def test_a_row_that_is_like_that_already_is_left(self, people, three):
        Tenant.objects.filter(slug="hooli").update(weight=7)
        sent = {"action": "weight", "row": box(*three), "given": "1", "weight": "7"}
        assert states(people["admin"].post(T, sent))["hooli"] == NOTHING

    def test_children_are_archived_before_their_parent(self, people, acme):
        child = factories.tenant("child", parent=acme)
        grandchild = factories.tenant("grandchild", parent=child)
        key_of(grandchild)
        sent = {"action": "archive", "row": box(acme, child, grandchild)}
        review = people["admin"].post(T, sent)
        assert set(states(review).values()) == {READY} and "revokes 1 key" in review.content.decode()
        people["admin"].post(T, {**sent, "row": reviewed(review), "confirm": "1", "reason": "left"})
        assert set(Tenant.objects.exclude(slug="stranger").values_list("state", flat=True)) == {"archived"}

    def test_a_parent_whose_child_was_not_chosen_is_refused(self, people, acme):
        factories.tenant("child", parent=acme)
        assert states(people["admin"].post(T, {"action": "archive", "row": box(acme)})) == {"acme": REFUSED}

    def test_the_review_tells_what_somebody_did_since_the_list_was_opened(self, people, three):
        acme = three[0]
        actions.edit_tenant(tenant_id=acme.pk, version=1, changes={"weight": 9}, actor=ADMIN, now=timezone.now())
        sent = {"action": "weight", "row": box(*three), "given": "1", "weight": "7"}
        review = people["admin"].post(T, sent)
        page = review.content.decode()
        assert "ada changed it" in page and "weight 1 → 9" in page
        assert f"{acme.pk}:2" in reviewed(review), "what is confirmed is what was shown"

    def test_a_row_that_changes_after_the_review_is_left_alone_and_can_be_reviewed_again(self, people, three):
        acme = three[0]
        sent = {"action": "weight", "row": box(*three), "given": "1", "weight": "7"}
        rows = reviewed(people["admin"].post(T, sent))
        actions.edit_tenant(tenant_id=acme.pk, version=1, changes={"weight": 9}, actor=ADMIN, now=timezone.now())
        done = people["admin"].post(T, {**sent, "row": rows, "confirm": "1", "reason": "r"})
        assert states(done) == {"acme": CHANGED, "globex": APPLIED, "hooli": APPLIED}
        assert "ada changed it" in done.content.decode() and reviewed(done) == [f"{acme.pk}:2"]
        assert Tenant.objects.get(slug="acme").weight == 9
        again = people["admin"].post(T, {**sent, "row": reviewed(done)})
        assert states(again) == {"acme": READY}

    def test_sending_it_twice_changes_each_once(self, people, three):
        sent = {"action": "suspend", "row": box(*three), "confirm": "1", "reason": "flood"}
        for _ in range(2):
            people["oncall"].post(T, sent)
        assert AuditEntry.objects.filter(action="tenant.suspend").count() == 3

    @pytest.mark.parametrize("role,action,status", [
        ("oncall", "suspend", 200), ("oncall", "weight", 403), ("viewer", "suspend", 403), ("tenant", "suspend", 403),
        ("admin", "weight", 200),
    ])  # fmt: skip
    def test_each_action_asks_for_its_own_permission(self, role, action, status, people, three):
        assert people[role].post(T, {"action": action, "row": box(*three)}).status_code == status

    def test_nothing_selected_no_action_and_too_many_are_told_on_the_list(self, people, three):
        client = people["admin"]
        for sent, said in (
            ({"action": "suspend"}, "Select the tenants first"),
            ({"action": "", "row": box(*three)}, "Choose what to do"),
            ({"action": "suspend", "row": [f"{n}:1" for n in range(1, 203)]}, "at most 200"),
            ({"action": "suspend", "row": ["x", "1", "-1:1", "9999999999:1"]}, "Select the tenants first"),
        ):
            response = client.post(T, {**sent, "back": "/tenants/?q=a"}, follow=True)
            assert response.redirect_chain == [("/tenants/?q=a", 302)] and said in response.content.decode()

    def test_the_way_back_stays_here(self, people):
        response = people["admin"].post(T, {"back": "//elsewhere.example/"})
        assert response.url == "/tenants/"

    def test_the_list_offers_what_the_role_may_do(self, people, three):
        assert '<option value="weight">' in people["admin"].get("/tenants/").content.decode()
        page = people["oncall"].get("/tenants/").content.decode()
        assert '<option value="suspend">' in page and '<option value="weight">' not in page
        page = people["viewer"].get("/tenants/").content.decode()
        assert 'name="row"' not in page and 'id="bulk"' not in page


class TestKeys:
    def test_expiry_of_many(self, people, three):
        keys = [key_of(tenant) for tenant in three]
        key_actions.revoke_key(key_id=keys[0].pk, reason="leak", actor=ADMIN, now=timezone.now())
        keys[0].refresh_from_db()
        at = timezone.now().replace(second=0, microsecond=0) + timedelta(days=30)
        sent = {"action": "expiry", "row": box(*keys), "given": "1", "expires_at": f"{at:%Y-%m-%dT%H:%M}"}
        review = people["admin"].post(K, sent)
        assert sorted(states(review).values()) == [READY, READY, REFUSED]
        people["admin"].post(K, {**sent, "row": reviewed(review), "confirm": "1", "reason": "yearly"})
        assert [key.expires_at for key in ApiKey.objects.order_by("pk")] == [None, at, at]

    def test_an_end_in_the_past_is_refused_by_the_keys_own_rule(self, people, three):
        sent = {"action": "expiry", "row": box(key_of(three[0])), "given": "1", "expires_at": "2020-01-01T00:00"}
        review = people["admin"].post(K, sent)
        assert set(states(review).values()) == {REFUSED} and "lies in the past" in review.content.decode()
        assert "Nothing would change" in review.content.decode()

    def test_revoke(self, people, three):
        keys = [key_of(tenant) for tenant in three]
        people["admin"].post(K, {"action": "revoke", "row": box(*keys), "confirm": "1", "reason": "leaked"})
        assert set(ApiKey.objects.values_list("state", flat=True)) == {"revoked"}
        assert AuditEntry.objects.filter(action="key.revoke", reason="leaked").count() == 3


class TestMembers:
    def test_the_last_administrator_and_oneself_stay(self, people):
        members = list(Member.objects.order_by("pk"))
        sent = {"action": "remove", "row": box(*members)}
        review = people["admin"].post(M, sent)
        assert states(review)["admin"] == REFUSED
        people["admin"].post(M, {**sent, "row": reviewed(review), "confirm": "1", "reason": "left"})
        assert list(Member.objects.values_list("role", flat=True)) == ["admin"]

    def test_a_role(self, people):
        rows = Member.objects.filter(role__in=("finance", "viewer"))
        sent = {"action": "role", "row": box(*rows), "given": "1", "role": "oncall", "confirm": "1", "reason": "shift"}
        people["admin"].post(M, sent)
        assert Member.objects.filter(role="oncall").count() == 3


@pytest.mark.django_db(transaction=True)
class TestTwoAdministrators:
    def test_of_overlapping_rows_each_is_changed_by_one(self, installation):
        rows = [factories.tenant(f"t{number:02}") for number in range(12)]
        mine, theirs = rows[:8], list(reversed(rows[4:]))
        weight = TENANTS.action("weight")

        def change(chosen, value):
            selection = Selection({row.pk: row.version for row in chosen})
            return apply(
                TENANTS, weight, chosen, selection, {"weight": value}, reason="r", actor=ADMIN, now=timezone.now()
            )

        first, second = side_by_side(lambda: change(mine, 5), lambda: change(theirs, 9))
        state = {value: {one.name: one.state for one in found} for value, found in ((5, first), (9, second))}
        for row in rows[4:8]:
            both = sorted((state[5][row.slug], state[9][row.slug]))
            assert both == [APPLIED, CHANGED], f"{row.slug} was changed by both or by none"
            row.refresh_from_db()
            assert row.weight == (5 if state[5][row.slug] == APPLIED else 9) and row.version == 2
        assert AuditEntry.objects.filter(action="tenant.edit").count() == 12

    def test_a_review_holds_up_nobody_and_leaves_nothing(self, installation):
        rows = [factories.tenant(f"t{number:02}") for number in range(6)]
        keys = [key_of(row) for row in rows]
        selection = Selection({row.pk: row.version for row in keys})
        revoke = KEYS.action("revoke")
        chosen = KEYS.rows(_administrator(), [row.pk for row in keys])

        def look():
            return rehearse(KEYS, revoke, chosen, selection, {}, actor=ADMIN, now=timezone.now())

        def do():
            return apply(KEYS, revoke, chosen, selection, {}, reason="r", actor=ADMIN, now=timezone.now())

        answers = side_by_side(look, do, look, do)
        done = [one.state for found in (answers[1], answers[3]) for one in found]
        assert done.count(APPLIED) == 6 and set(done) <= {APPLIED, CHANGED}
        assert AuditEntry.objects.filter(action="key.revoke").count() == 6


def _administrator():
    factories.person("admin", name="ben")
    return Member.objects.get(user__username="ben").user
