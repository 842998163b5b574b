"""Pages of pools, slots and agents: the way of their forms, who may do what, and how many statements lists need."""

from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.contracts.actions import create_contract
from controlplane.fleet import desired
from controlplane.fleet.forms import PoolForm, pool_initial
from controlplane.fleet.management.commands.agent import agent_command
from controlplane.fleet.models import Agent, AgentLive, EnrolmentToken, Pool, Slot, SlotInterval
from tests import factories
from tests.fleet.conftest import ADA

POOL = reverse("pool-edit", args=["chat"])


def pool_data(pool: Pool, **changes):
    """What a browser would send for a pool's form."""
    form = PoolForm(initial=pool_initial(pool), pool=pool)
    data = {name: form[name].value() for name in form.fields if not form.fields[name].disabled}
    data = {name: value for name, value in data.items() if value is not None and value is not False}
    for name in ("safe_measured_at", "safe_valid_until"):
        data.pop(name, None)
    return {**data, **changes}


def text(response) -> str:
    return response.content.decode()


def test_a_change_is_reviewed_with_before_and_after_and_saved_with_a_reason(fleet, people):
    admin = people["admin"]
    data = pool_data(fleet, lend_p95_ms=150)
    review = admin.post(POOL, data)
    assert review.status_code == 200
    assert "Queue wait p95 must stay under, ms" in text(review) and "150" in text(review)
    assert Pool.objects.get().lend_p95_ms == 200
    without_reason = admin.post(POOL, {**data, "confirm": "1"})
    assert "say why" in text(without_reason).lower()
    assert Pool.objects.get().lend_p95_ms == 200
    saved = admin.post(POOL, {**data, "confirm": "1", "reason": "faster recall"})
    assert saved.status_code == 302
    entry = AuditEntry.objects.get(action="pool.edit")
    assert (entry.before, entry.after, entry.reason) == ({"lend_p95_ms": 200}, {"lend_p95_ms": 150}, "faster recall")


def test_a_rule_is_told_beside_its_field_before_the_review(fleet, people):
    response = people["admin"].post(POOL, pool_data(fleet, return_slack=0.2, max_lent=5))
    assert response.status_code == 400
    assert 'href="#id_return_slack"' in text(response)
    assert "Only 1 of the pool" in text(response)
    assert not AuditEntry.objects.filter(action="pool.edit").exists()


def test_the_slower_of_two_editors_is_shown_what_changed(fleet, people):
    data = pool_data(fleet, lend_p95_ms=150)
    Pool.objects.update(version=2, lend_p95_ms=180)
    response = people["admin"].post(POOL, {**data, "confirm": "1", "reason": "mine"})
    assert response.status_code == 409
    assert "180" in text(response) and 'name="version" value="2"' in text(response)
    assert Pool.objects.get().lend_p95_ms == 180


def test_a_contract_without_room_is_told_in_the_review(fleet, people):
    create_contract(
        slug="fast", class_slug="chat", values={"target_ppm": 990_000, "threshold_ms": 300}, actor=ADA,
        now=timezone.now() - timedelta(hours=1),
    )  # fmt: skip
    response = people["admin"].post(POOL, pool_data(fleet, lend_p95_ms=300))
    assert "Contract fast promises" in text(response)


def test_a_new_pool_with_slots_by_its_pages(installation, people):
    factories.workload_class("chat")
    admin = people["admin"]
    data = {
        name: field.initial
        for name, field in PoolForm.base_fields.items()
        if field.initial is not None and field.initial is not False and name != "version"
    }
    data |= {"slug": "embed", "model": "bge-m3", "gpu_type": "L4", "interactive_class": "chat"}
    assert admin.post(reverse("pool-new"), data).status_code == 200
    made = admin.post(reverse("pool-new"), {**data, "confirm": "1", "reason": "first"})
    assert made.status_code == 302, text(made)
    slots = {"names": "s1, s2", "band": "interactive", "places": 4, "kv_tokens": 9_000, "gpus": "0.5"}
    added = admin.post(reverse("slot-new", args=["embed"]), {**slots, "confirm": "1", "reason": "first"})
    assert added.status_code == 302, text(added)
    assert dict(Slot.objects.values_list("name", "gpu_share_ppm")) == {"s1": 500_000, "s2": 500_000}
    page = text(admin.get(reverse("pool-edit", args=["embed"])))
    assert "s1" in page and "remove-s2" in page


def test_slots_are_edited_and_removed_with_a_reason(fleet, people):
    admin, slot = people["admin"], Slot.objects.get(name="i2")
    data = {"band": "interactive", "places": 8, "kv_tokens": 60_000, "gpus": "1", "version": slot.version}
    address = reverse("slot-edit", args=["chat", slot.pk])
    assert admin.post(address, {**data, "confirm": "1", "reason": "more memory"}).status_code == 302
    assert Slot.objects.get(pk=slot.pk).places == 8
    remove = reverse("slot-remove", args=["chat", slot.pk])
    admin.post(remove, {"reason": ""})
    assert Slot.objects.get(pk=slot.pk).removed_at is None
    admin.post(remove, {"reason": "sold"})
    assert Slot.objects.get(pk=slot.pk).removed_at is not None
    assert admin.get(address).status_code == 404


def test_a_viewer_reads_the_settings_and_changes_nothing(fleet, people):
    viewer = people["viewer"]
    page = text(viewer.get(POOL))
    assert "Add slots" not in page and "Archive pool" not in page and "Review change" not in page
    assert "Settings of chat" in page
    assert viewer.post(POOL, pool_data(fleet, lend_p95_ms=1)).status_code == 403


def test_pools_are_ordered_by_attention_name_or_age(fleet, people):
    for number in (1, 2):
        row = factories.pool(f"a-{number}", created_at=fleet.created_at + timedelta(days=number))
        factories.slot(row, "i1", "interactive")

    def shown(sort):
        return [row.pool.slug for row in people["viewer"].get(reverse("pools"), {"sort": sort}).context["rows"]]

    assert shown("name") == ["a-1", "a-2", "chat"]
    assert shown("newest") == ["a-2", "a-1", "chat"]
    assert shown("attention") == shown("") == shown("nonsense")
    assert people["viewer"].get(reverse("pools"), {"sort": "name"}).context["sort"] == "name"


def test_the_list_of_pools_needs_as_many_statements_for_two_as_for_six(fleet, people, django_assert_num_queries):
    admin = people["admin"]
    admin.get(reverse("pools"))
    for number in range(5):
        row = factories.pool(f"pool-{number}")
        factories.slot(row, "i1", "interactive")
        factories.agent(row, f"agent-{number}")
    with django_assert_num_queries(7):
        page = text(admin.get(reverse("pools")))
    assert page.count("pool-") >= 5


def test_pools_that_need_attention_come_first(fleet, people):
    good = factories.agent(fleet, "gpu-1")
    AgentLive.objects.create(agent=good, epoch=1, seq=1, reported_at=timezone.now())
    factories.slot(factories.pool("a-empty-of-agents"), "i1", "interactive")
    silent = factories.pool("z-silent")
    factories.slot(silent, "i1", "interactive")
    factories.agent(silent, "gpu-9")
    page = text(people["viewer"].get(reverse("pools")))
    assert page.index("z-silent") < page.index("a-empty-of-agents") < page.index("/pools/chat/edit/")
    assert "None of 1 agents reports" in page


def test_the_list_of_agents_needs_as_many_statements_for_one_as_for_ten(fleet, people, django_assert_num_queries):
    for number in range(10):
        one = factories.agent(fleet, f"gpu-{number}")
        AgentLive.objects.create(agent=one, epoch=1, seq=1, reported_at=timezone.now(), revision=3)
    admin = people["admin"]
    with django_assert_num_queries(9):
        page = text(admin.get(reverse("agents")))
    assert page.count("gpu-") >= 10
    rows = text(admin.get(reverse("agents"), headers={"HX-Request": "true"}))
    assert rows.startswith("<tbody") and rows.count("gpu-") == 10


def test_agents_that_were_retired_leave_the_lists_and_are_still_found(fleet, people, django_assert_num_queries):
    """A thousand machines come and go: the list is of those that there are, each of the others has its page."""
    gone = Agent.objects.bulk_create(
        Agent(pool=fleet, name=f"gone-{n}", state="retired", public_key=b"\0" * 32, enrolled_at=factories.NOW)
        for n in range(1_000)
    )
    AgentLive.objects.bulk_create(
        AgentLive(agent=one, epoch=1, seq=1, reported_at=timezone.now(), revision=3) for one in gone
    )
    one = factories.agent(fleet)
    AgentLive.objects.create(agent=one, epoch=1, seq=1, reported_at=timezone.now(), revision=3)
    with django_assert_num_queries(9):
        page = text(people["admin"].get(reverse("agents")))
    assert "gpu-1" in page and "gone-" not in page
    assert "gone-" not in text(people["viewer"].get(reverse("pools"))) + text(people["viewer"].get(reverse("home")))
    assert "gone-777" in text(people["viewer"].get(reverse("agents") + "?state=retired"))
    assert "Retired" in text(people["viewer"].get(reverse("agent", args=[gone[777].pk])))


def test_an_agent_that_is_silent_or_of_the_future_is_unknown(fleet, people):
    for name, age in (("old", timedelta(minutes=1)), ("future", timedelta(minutes=-1)), ("fresh", timedelta(0))):
        one = factories.agent(fleet, name)
        AgentLive.objects.create(agent=one, epoch=1, seq=1, reported_at=timezone.now() - age)
    page = text(people["viewer"].get(reverse("agents")))
    assert page.count("Silent") == 2
    assert page.count("Reporting") == 1


def test_slots_of_a_vanished_agent_say_that_they_are_unobserved_and_what_to_do(fleet, people):
    agent = factories.agent(fleet)
    Slot.objects.update(agent=agent)
    page = reverse("agent", args=[agent.pk])
    assert "unobserved since" not in text(people["viewer"].get(page))
    SlotInterval.objects.filter(slot__agent=agent, ended_at=None).update(state="lost", owner_class="")
    said = text(people["viewer"].get(page))
    assert "unobserved since the agent vanished" in said and "retire the agent" in said
    assert said.count("unobserved") > 1, "each cell is hatched"


def test_the_secret_of_a_token_is_shown_once_with_the_command_to_copy(fleet, people):
    response = people["admin"].post(reverse("agent-enrol"), {"pool": "chat"})
    page = text(response)
    token = EnrolmentToken.objects.get()
    assert f"--enrol-token {token.prefix}" in page and "--slots 4" in page and "--name chat-1" in page
    assert "no-store" in response["Cache-Control"]
    assert page.count(token.prefix) >= 2
    listed = text(people["admin"].get(reverse("agents")))
    assert token.prefix in listed and "--enrol-token" not in listed
    assert people["oncall"].post(reverse("agent-enrol"), {"pool": "chat"}).status_code == 403


def test_on_call_drains_and_only_an_admin_retires(fleet, people):
    agent = factories.agent(fleet)
    oncall = people["oncall"]
    assert oncall.post(reverse("act-drain", args=[agent.pk]), {"reason": "kernel"}).status_code == 302
    assert Agent.objects.get().drain_requested_at is not None
    assert "Serve again" in text(oncall.get(reverse("agent", args=[agent.pk])))
    assert oncall.post(reverse("agent-retire", args=[agent.pk]), {"reason": "x"}).status_code == 403
    assert oncall.post(reverse("agent-approve", args=[agent.pk])).status_code == 403
    people["admin"].post(reverse("agent-retire", args=[agent.pk]), {"reason": ""})
    assert Agent.objects.get().state == "active"
    people["admin"].post(reverse("agent-retire", args=[agent.pk]), {"reason": "sold"})
    assert Agent.objects.get().state == "retired"
    assert "Retired" in text(people["viewer"].get(reverse("agents") + "?state=retired"))


def test_an_agent_that_refused_its_revision_says_why(fleet, people, monkeypatch):
    agent = factories.agent(fleet)
    AgentLive.objects.create(
        agent=agent, epoch=1, seq=1, reported_at=timezone.now(), revision=3, refused_revision=4, refused="no such model"
    )
    monkeypatch.setattr(desired, "_readers", [lambda ids: {agent.pk: 4}])
    page = text(people["viewer"].get(reverse("agent", args=[agent.pk])))
    assert "Refused policy" in page and "no such model" in page


def test_the_command_line_retires_by_name_number_or_uuid(fleet, capsys):
    agent = factories.agent(fleet)
    call_command("agent", "retire", str(agent.uuid), "--reason", "sold", "--json")
    assert '"name": "gpu-1"' in capsys.readouterr().out
    assert Agent.objects.get().state == "retired"
    assert AuditEntry.objects.get(action="agent.retire").reason == "sold"
    with pytest.raises(CommandError) as error:
        call_command("agent", "retire", "gpu-1", "--reason", "again")
    assert error.value.returncode == 2


@pytest.mark.parametrize(
    ("offset_us", "warned"),
    [(None, False), (0, False), (-1_000_000, False), (1_000_001, True), (-40_000_000, True)],
)
def test_a_clock_that_is_off_is_warned_of(fleet, people, offset_us, warned):
    one = factories.agent(fleet, "gpu-1")
    now = timezone.now()
    AgentLive.objects.create(agent=one, epoch=1, seq=1, reported_at=now, clock_offset_us=offset_us)
    page = text(people["viewer"].get(reverse("agent", args=[one.pk])))
    assert ("Set the clock of that machine (NTP)" in page) is warned


def test_run_hands_every_option_to_the_agent():
    assert agent_command(["--name", "gpu-1"])[1:] == ["-m", "controlplane.agent", "--name", "gpu-1"]
