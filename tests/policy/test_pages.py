"""Pages, REST and commands: what a person sees and may do."""

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone

from controlplane.fleet.models import AgentLive
from controlplane.policy import rollouts
from controlplane.policy.actions import push
from controlplane.policy.compile import compile_configuration
from controlplane.policy.models import Revision
from controlplane.policy.queries import drift
from controlplane.tenants.actions import edit_tenant
from controlplane.tenants.models import Tenant
from tests import factories
from tests.policy.conftest import make_fleet

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_broker")]

PAGES = ("/policy/", "/policy/review/", "/policy/drift/")


def report(agent, *, revision=0, at=None, refused=None, reason=""):
    AgentLive.objects.update_or_create(
        agent=agent,
        defaults={
            "epoch": 1, "seq": 1, "reported_at": at or timezone.now(), "revision": revision,
            "refused_revision": refused, "refused": reason,
        },
    )  # fmt: skip


@pytest.fixture
def pushed(fleet, actor) -> Revision:
    now = timezone.now()
    revision = push(actor=actor, reason="first push", now=now)
    rollouts.run(revision.rollout.pk, now)
    return revision


@pytest.mark.parametrize("path", PAGES)
def test_an_empty_installation_says_what_to_do(people, path):
    page = people["admin"].get(path)
    assert page.status_code == 200
    text = page.content.decode()
    assert any(word in text for word in ("No agent is enrolled", "There is no pool"))


def test_staff_read_and_tenants_do_not(people, pushed):
    paths = [*PAGES, f"/policy/revisions/{pushed.number}/", f"/policy/rollouts/{pushed.number}/"]
    for path in paths:
        for role in ("admin", "finance", "oncall", "viewer"):
            assert people[role].get(path).status_code == 200, (path, role)
        for role in ("tenant", "stranger"):
            assert people[role].get(path).status_code == 403, (path, role)
        assert people["anonymous"].get(path).status_code == 302


def test_a_number_that_does_not_exist_is_not_found(people, pushed):
    for path in ("/policy/revisions/999/", "/policy/rollouts/999/"):
        assert people["admin"].get(path).status_code == 404


def test_review_shows_before_and_after_and_pushes_with_a_reason(people, pushed, fleet):
    fleet.tenant.weight = 4
    fleet.tenant.save(update_fields=["weight"])
    page = people["admin"].get("/policy/review/").content.decode()
    assert "It gets a larger share when tenants compete." in page
    digest = compile_configuration(timezone.now()).digest
    form = {"reason": "", "waves": "10, 100", "reviewed_digest": digest}
    refused = people["admin"].post("/policy/review/", form)
    assert (refused.status_code, "Enter a reason for this change." in refused.content.decode()) == (422, True)
    accepted = people["admin"].post("/policy/review/", {**form, "reason": "launch week"})
    latest = Revision.objects.order_by("-number").first()
    assert accepted.headers["Location"] == f"/policy/rollouts/{latest.number}/"
    assert (latest.reason, latest.created_by) == ("launch week", "admin")
    assert list(latest.rollout.waves.values_list("percent", flat=True)) == [10, 100]


def test_only_an_admin_pushes_and_oncall_rolls_back(people, pushed, fleet, actor):
    for role in ("finance", "oncall", "viewer", "tenant"):
        assert people[role].post("/policy/review/", {"reason": "x"}).status_code == 403
    fleet.tenant.weight = 4
    fleet.tenant.save(update_fields=["weight"])
    push(actor=actor, reason="y", now=timezone.now())
    path = f"/policy/revisions/{pushed.number}/rollback/"
    for role in ("finance", "viewer", "tenant"):
        assert people[role].post(path, {"reason": "x"}).status_code == 403
    assert people["oncall"].post(path, {"reason": ""}).status_code == 422
    assert people["oncall"].post(path, {"reason": "burning"}).status_code == 302
    latest = Revision.objects.order_by("-number").first()
    assert (latest.rolls_back_to, latest.created_by) == (pushed.number, "oncall")


def test_a_review_that_is_out_of_date_is_shown_again(people, pushed, fleet):
    fleet.tenant.weight = 4
    fleet.tenant.save(update_fields=["weight"])
    form = {"reason": "x", "waves": "100", "reviewed_digest": "0" * 64}
    page = people["admin"].post("/policy/review/", form)
    assert page.status_code == 422
    assert "Somebody saved a change since you opened this review" in page.content.decode()
    assert compile_configuration(timezone.now()).digest in page.content.decode()


def test_a_broken_rule_shows_what_to_do_and_no_form(people, pushed, fleet):
    fleet.pool.max_lent = 9
    fleet.pool.save(update_fields=["max_lent"])
    page = people["admin"].get("/policy/review/").content.decode()
    assert "max_lent_over_flex" in page
    assert "Push this configuration" not in page


def test_drift_tells_every_state_apart(db, actor):
    fleet = make_fleet(6)
    now = timezone.now()
    revision = push(actor=actor, reason="x", now=now)
    rollouts.run(revision.rollout.pk, now)
    ok, behind, refused, old, silent, _never = fleet.agents
    report(ok, revision=revision.number)
    report(behind)
    report(refused, refused=revision.number, reason="wrong target")
    report(old, refused=revision.number, reason="schema 9 is newer than this agent")
    report(silent, revision=revision.number, at=now - timedelta(seconds=30))
    states = {row.name: row.state for row in drift(now + timedelta(seconds=1))}
    assert [states[agent.name] for agent in fleet.agents] == [
        "in_force", "behind", "refused", "must_upgrade", "silent", "never",
    ]  # fmt: skip


def test_drift_is_seen_within_two_intervals_though_nothing_changed(people, pushed, fleet):
    """The push path is cut: the agents go on reporting an older revision."""
    for agent in fleet.agents:
        report(agent, revision=0)
    page = people["viewer"].get("/policy/drift/").content.decode()
    assert page.count("Behind") == 2
    assert "favicon-risk" in page


def test_the_number_of_queries_does_not_grow_with_agents(db, actor, django_assert_max_num_queries):
    make_fleet(40)
    now = timezone.now()
    revision = push(actor=actor, reason="x", now=now)
    rollouts.run(revision.rollout.pk, now)
    client = factories.person("viewer")
    for path, most in (("/policy/drift/", 10), (f"/policy/rollouts/{revision.number}/", 10), ("/policy/", 28)):
        with django_assert_max_num_queries(most):
            assert client.get(path).status_code == 200


def test_the_overview_counts_changes_and_leaves_what_they_come_to_to_a_part_of_its_own(people, pushed, actor):
    client = people["viewer"]
    page = client.get("/policy/").content.decode()
    assert f"No change was made since revision {pushed.number}" in page and 'hx-get="/policy/unpushed/"' in page
    assert f"What is saved is what revision {pushed.number} carries" in client.get("/policy/unpushed/").content.decode()
    acme = Tenant.objects.get(slug="acme")
    edit_tenant(tenant_id=acme.pk, version=acme.version, changes={"weight": 9}, actor=actor, now=timezone.now())
    assert f"1 change saved since revision {pushed.number}" in client.get("/policy/").content.decode()
    part = client.get("/policy/unpushed/").content.decode()
    assert "1 change: 1 tenant" in part and "<html" not in part


def test_a_rollout_names_every_agent_and_its_reason(people, pushed, fleet):
    first, second = fleet.agents
    report(first, revision=pushed.number)
    report(second, refused=pushed.number, reason="wrong target")
    with connection.cursor() as cursor:
        from controlplane.policy.ingest import note_revisions

        note_revisions(
            cursor, [(first.pk, pushed.number, None, ""), (second.pk, 0, pushed.number, "wrong target")], timezone.now()
        )
    page = people["viewer"].get(f"/policy/rollouts/{pushed.number}/").content.decode()
    assert "1 of 2" in page
    assert "wrong target" in page
    part = people["viewer"].get(f"/policy/rollouts/{pushed.number}/", headers={"hx-request": "true"}).content.decode()
    assert "<html" not in part
    assert 'hx-trigger="every 5s, rollout-moved from:body"' in part


class TestRest:
    ROOT = "/api/v1/policy/revisions/"

    def test_lists_and_details(self, people, pushed):
        body = people["viewer"].get(self.ROOT).json()
        assert [row["number"] for row in body["results"]] == [pushed.number]
        detail = people["viewer"].get(f"{self.ROOT}{pushed.number}/").json()
        assert detail["configuration"]["pools"]["chat-70b"]["pool"]["slug"] == "chat-70b"

    def test_push_diff_rollout_rollback(self, people, pushed, fleet):
        fleet.tenant.weight = 4
        fleet.tenant.save(update_fields=["weight"])
        admin = people["admin"]
        made = admin.post(f"{self.ROOT}push/", {"reason": "x"}, content_type="application/json")
        assert made.status_code == 201
        number = made.json()["number"]
        changes = admin.get(f"{self.ROOT}{number}/diff/").json()
        assert [(row["subject"], row["before"], row["after"]) for row in changes["changes"]] == [("acme", "1", "4")]
        assert admin.get(f"{self.ROOT}{number}/diff/?from={number}").json()["changes"] == []
        assert admin.get(f"{self.ROOT}{number}/rollout/").json()["counts"]["silent"] == 0
        back = people["oncall"].post(
            f"{self.ROOT}{pushed.number}/rollback/", {"reason": "y"}, content_type="application/json"
        )
        assert (back.status_code, back.json()["rolls_back_to"]) == (201, pushed.number)

    def test_refusals_are_problem_documents(self, people, pushed, fleet):
        fleet.cards[0].delete()
        answer = people["admin"].post(f"{self.ROOT}push/", {"reason": "x"}, content_type="application/json")
        assert (answer.status_code, answer.headers["Content-Type"]) == (400, "application/problem+json")
        assert "rate card" in answer.json()["errors"]["configuration"][0]
        for role in ("viewer", "oncall", "tenant"):
            assert people[role].post(f"{self.ROOT}push/", {"reason": "x"}).status_code == 403
        assert people["admin"].get(f"{self.ROOT}{pushed.number}/diff/?from=x").status_code == 400
        assert people["admin"].get(f"{self.ROOT}{pushed.number}/diff/?from=999").status_code == 404

    def test_drift(self, people, pushed):
        rows = people["viewer"].get("/api/v1/policy/drift/").json()
        assert {row["state"] for row in rows} == {"never"}


class TestCommand:
    def run(self, *arguments):
        out = StringIO()
        call_command("policy", *arguments, stdout=out)
        return out.getvalue()

    def test_plan_push_diff_rollback_status(self, fleet):
        plan = json.loads(self.run("plan", "--json"))
        assert (plan["against"], plan["errors"]) == (None, [])
        first = json.loads(self.run("push", "--reason", "first", "--json"))
        fleet.tenant.weight = 4
        fleet.tenant.save(update_fields=["weight"])
        second = json.loads(self.run("push", "--reason", "second", "--waves", "50,100", "--json"))
        assert "weight" not in self.run("diff", str(first["revision"]), str(second["revision"]))
        assert "1 → 4" in self.run("diff", str(first["revision"]), str(second["revision"]))
        back = json.loads(self.run("rollback", str(first["revision"]), "--reason", "no", "--json"))
        assert back["content_of"] == first["revision"]
        status = json.loads(self.run("status", "--json"))
        assert (status["revision"], status["agents"], status["in_force"]) == (back["revision"], 2, 0)

    def test_unusable_arguments_exit_with_2(self, fleet):
        for arguments in (("diff", "1", "2"), ("rollback", "9", "--reason", "x"), ("push", "--reason", " ")):
            with pytest.raises(CommandError) as caught:
                self.run(*arguments)
            assert caught.value.returncode == 2


def test_changes_of_many_tenants_are_shown_by_pages(people, pushed, fleet, actor):
    for number in range(70):
        factories.tenant(f"many-{number:02}", classes=["chat"])

    def walked(path):
        seen, cursor = [], ""
        while True:
            response = people["admin"].get(path, {"cursor": cursor})
            seen += [(group.kind, group.subject) for group in response.context["page"].rows]
            cursor = response.context["page"].next_cursor
            if not cursor:
                return seen, response.content.decode()

    seen, text = walked("/policy/review/")
    assert len(seen) == len(set(seen)) == 70 and "70 changes: 70 tenants" in text
    assert "Push this configuration" in text, "a page of changes is no part of what is pushed"
    assert people["admin"].get("/policy/review/", {"cursor": "x"}).status_code == 400
    revision = push(actor=actor, reason="many", now=timezone.now())
    assert walked(f"/policy/revisions/{revision.number}/")[0] == seen
    back = people["admin"].get(f"/policy/revisions/{pushed.number}/")
    assert len(back.context["undo_groups"]) == 50 and "And of 20 more" in back.content.decode()
    assert people["admin"].get(f"/policy/revisions/{revision.number}/", {"cursor": "x"}).status_code == 400


def test_a_review_asks_as_much_for_one_tenant_as_for_many(people, pushed, fleet, django_assert_num_queries):
    for number in range(2):
        factories.tenant(f"t{number}", classes=["chat"])
        with django_assert_num_queries(QUERIES_OF_REVIEW):
            people["viewer"].get("/policy/review/")
        for more in range(20):
            factories.tenant(f"t{number}-{more}", classes=["chat"])
            factories.slot(fleet.pool, f"more-{number}-{more}", "flex")


QUERIES_OF_REVIEW = 16
