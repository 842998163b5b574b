"""Pools, slots, agents and tokens: the rules of each action, tenure and ownership, and the audit entry."""

import hashlib
import threading
from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import connection

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.fleet import actions
from controlplane.fleet.models import Agent, EnrolmentToken, Pool, Slot, SlotInterval, SlotTenure
from controlplane.tenants.actions import Stale
from tests import factories

ADA = Actor(id=None, name="ada", role="admin")


@pytest.fixture
def classes(installation):
    return factories.workload_class("chat"), factories.workload_class("bulk", "batch")


@pytest.fixture
def pool(classes, now):
    values = {"gpu_type": "H100", "interactive_class": "chat", "batch_class": "bulk", "name": "Chat"}
    row = actions.create_pool(slug="chat", model="llama-70b", values=values, actor=ADA, now=now)
    for band, names in (("interactive", ["i1", "i2"]), ("batch", ["b1"]), ("flex", ["f1"])):
        actions.add_slots(pool_slug="chat", names=names, band=band, actor=ADA, now=now)
    return row


def edit(now, slug="chat", reason="because", version=None, **values):
    return actions.edit_pool(slug=slug, values=values, actor=ADA, now=now, reason=reason, version=version)


def codes(error) -> dict[str, list[str]]:
    return {field: [item.code for item in items] for field, items in error.value.error_dict.items()}


def test_a_pool_is_created_with_defaults_and_an_audit_entry(pool):
    assert Pool.objects.get().model.name == "llama-70b"
    entry = AuditEntry.objects.filter(action="pool.create").get()
    assert (entry.actor_name, entry.object_id, entry.after["lend_p95_ms"]) == ("ada", "chat", 200)


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"return_slack": 0.25}, "return_slack", "return_slack_not_over_lend_slack"),
        ({"max_lent": 2}, "max_lent", "max_lent_over_flex"),
        ({"grant_ttl_s": 4}, "grant_ttl_s", "grant_ttl_too_short"),
        ({"load_limit": 1.5}, "load_limit", "out_of_range"),
        ({"interactive_class": "nobody"}, "interactive_class", "class_unknown"),
        ({"interactive_class": "bulk"}, "interactive_class", "class_kind_mismatch"),
        ({"safe_rate": {"entries": {"0": 4}}}, "safe_rate", "safe_rate_unreadable"),
        ({"safe_rate": {"entries": {"2": 8, "4": 6}}}, "safe_rate", "safe_rate_falls"),
        ({"safe_rate": {"entries": {}, "valid_until": "soon"}}, "safe_rate", "safe_rate_unreadable"),
        ({"size_bounds_gpu_ms": [500, 400]}, "size_bounds_gpu_ms", "out_of_range"),
        ({"max_batch_size": 0}, "max_batch_size", "out_of_range"),
        ({"max_batch_size": 1025, "max_batch_wait_ms": 5}, "max_batch_size", "out_of_range"),
        ({"max_batch_wait_ms": 10_001}, "max_batch_wait_ms", "out_of_range"),
        ({"max_batch_size": 8}, "max_batch_wait_ms", "batching_without_wait"),
    ],
)
def test_a_rule_that_does_not_hold_is_named_and_nothing_is_saved(pool, now, values, field, rule):
    with pytest.raises(ValidationError) as error:
        edit(now, **values)
    assert codes(error) == {field: [rule]}
    assert Pool.objects.get().version == 1


def test_a_minimum_share_larger_than_the_floor_is_refused_in_a_reserved_pool(pool, now):
    bulk = actions.served_classes()[0]
    assert bulk.slug == "bulk"
    Pool.objects.update(isolation="shared")
    factories.WorkloadClass.objects.filter(slug="bulk").update(min_share_ppm=500_000)
    with pytest.raises(ValidationError) as error:
        edit(now, isolation="reserved")
    assert codes(error) == {"isolation": ["floors_over_slots"]}
    factories.WorkloadClass.objects.filter(slug="bulk").update(min_share_ppm=250_000)
    assert edit(now, isolation="reserved").isolation == "reserved"


def test_an_edit_needs_a_reason_and_the_present_version(pool, now):
    with pytest.raises(ValidationError):
        edit(now, reason=" ", lend_p95_ms=150)
    with pytest.raises(Stale):
        edit(now, version=7, lend_p95_ms=150)
    assert edit(now, version=1, lend_p95_ms=150).version == 2
    entry = AuditEntry.objects.filter(action="pool.edit").get()
    assert (entry.before, entry.after, entry.reason) == ({"lend_p95_ms": 200}, {"lend_p95_ms": 150}, "because")


def test_an_edit_without_a_change_writes_nothing(pool, now):
    assert edit(now, lend_p95_ms=200).version == 1
    assert not AuditEntry.objects.filter(action="pool.edit").exists()


def test_slots_join_with_tenure_and_a_home_interval_of_their_bands_class(pool, now):
    owners = dict(SlotInterval.objects.values_list("slot__name", "owner_class"))
    assert owners == {"i1": "chat", "i2": "chat", "b1": "bulk", "f1": "chat"}
    assert SlotTenure.objects.filter(ended_at=None, started_at=now).count() == 4


def test_another_class_of_the_pool_moves_ownership_without_gap_or_overlap(pool, classes, now):
    factories.workload_class("talk")
    later = now + timedelta(hours=1)
    edit(later, interactive_class="talk")
    first, second = SlotInterval.objects.filter(slot__name="i1").order_by("started_at")
    assert (first.owner_class, first.ended_at) == ("chat", later)
    assert (second.owner_class, second.started_at, second.ended_at) == ("talk", later, None)
    assert SlotInterval.objects.filter(slot__name="b1").count() == 1


def test_a_slot_changes_band_only_at_home(pool, now):
    slot = Slot.objects.get(name="f1")
    later = now + timedelta(minutes=5)
    SlotInterval.objects.filter(slot=slot).update(state="lent", owner_class="bulk")
    with pytest.raises(ValidationError) as error:
        actions.edit_slot(slot_id=slot.pk, values={"band": "batch"}, actor=ADA, now=later)
    assert "is lent" in str(error.value)
    SlotInterval.objects.filter(slot=slot).update(state="home", owner_class="chat")
    actions.edit_slot(slot_id=slot.pk, values={"band": "batch"}, actor=ADA, now=later)
    assert list(SlotInterval.objects.filter(slot=slot).order_by("id").values_list("owner_class", "ended_at")) == [
        ("chat", later),
        ("bulk", None),
    ]


def test_the_last_interactive_floor_slot_stays_while_there_are_flex_slots(pool, now):
    first, last = Slot.objects.filter(band="interactive").order_by("name")
    actions.remove_slot(slot_id=first.pk, actor=ADA, now=now + timedelta(hours=1), reason="sold")
    with pytest.raises(ValidationError) as error:
        actions.remove_slot(slot_id=last.pk, actor=ADA, now=now + timedelta(hours=1), reason="sold")
    assert codes(error) == {"band": ["interactive_without_floor"]}


def test_a_dedicated_pool_takes_no_flex_slot(pool, now):
    with pytest.raises(ValidationError) as error:
        edit(now, isolation="dedicated")
    assert codes(error) == {"band": ["flex_in_dedicated"]}


def test_a_removed_slot_ends_its_tenure_and_comes_back_by_its_name(pool, now):
    slot = Slot.objects.get(name="i2")
    later, again = now + timedelta(hours=1), now + timedelta(hours=3)
    actions.remove_slot(slot_id=slot.pk, actor=ADA, now=later, reason="repair")
    assert SlotTenure.objects.get(slot=slot).ended_at == later
    assert not SlotInterval.objects.filter(slot=slot, ended_at=None).exists()
    (back,) = actions.add_slots(pool_slug="chat", names=["i2"], band="interactive", actor=ADA, now=again)
    assert back.pk == slot.pk
    assert list(SlotTenure.objects.filter(slot=slot).order_by("id").values_list("started_at", "ended_at")) == [
        (now, later),
        (again, None),
    ]


def test_a_slot_removed_at_the_instant_it_was_added_leaves_no_interval(pool, now):
    slot = Slot.objects.get(name="i2")
    actions.remove_slot(slot_id=slot.pk, actor=ADA, now=now, reason="slip")
    assert not SlotTenure.objects.filter(slot=slot).exists()
    assert not SlotInterval.objects.filter(slot=slot).exists()


def test_names_of_slots_are_taken_once(pool, now):
    for names in (["i1"], ["x", "x"], []):
        with pytest.raises(ValidationError) as error:
            actions.add_slots(pool_slug="chat", names=names, band="batch", actor=ADA, now=now)
        assert list(error.value.error_dict) == ["names"]


def test_a_pool_with_slots_or_agents_is_not_archived(pool, now):
    with pytest.raises(ValidationError, match="4 slots"):
        actions.archive_pool(slug="chat", actor=ADA, now=now, reason="old")
    for slot in Slot.objects.order_by("-band"):
        if slot.band != "interactive":
            actions.remove_slot(slot_id=slot.pk, actor=ADA, now=now, reason="old")
    for slot in Slot.objects.filter(removed_at=None):
        actions.remove_slot(slot_id=slot.pk, actor=ADA, now=now, reason="old")
    assert actions.archive_pool(slug="chat", actor=ADA, now=now, reason="old").archived_at == now


def test_an_enrolment_token_is_stored_hashed_and_good_for_an_hour(pool, now):
    row, secret = actions.create_enrolment_token(pool=pool, actor=ADA, now=now)
    stored = EnrolmentToken.objects.get()
    assert stored.token_hash == hashlib.sha256(secret.encode()).hexdigest()
    assert stored.expires_at == now + timedelta(hours=1)
    assert secret.startswith(row.prefix)
    entry = AuditEntry.objects.filter(action="enrolment_token.create").get()
    assert secret not in str(entry.after)
    pool.archived_at = now
    with pytest.raises(ValidationError):
        actions.create_enrolment_token(pool=pool, actor=ADA, now=now)


def test_an_agent_is_approved_drained_and_retired(pool, now):
    agent = factories.agent(pool, state="pending")
    Slot.objects.update(agent=agent)
    assert actions.approve_agent(agent_id=agent.pk, actor=ADA, now=now).state == "active"
    assert actions.request_drain(agent_id=agent.pk, actor=ADA, now=now, reason="kernel").drain_requested_at == now
    assert actions.cancel_drain(agent_id=agent.pk, actor=ADA, now=now, reason="done").drain_requested_at is None
    later = now + timedelta(days=1)
    actions.retire_agent(agent_id=agent.pk, actor=ADA, now=later, reason="sold")
    assert Agent.objects.get().state == "retired"
    assert not Slot.objects.exclude(agent=None).exists()
    assert SlotTenure.objects.filter(ended_at=later).count() == 4
    again = actions.retire_agent(agent_id=agent.pk, actor=ADA, now=later, reason="sold")
    assert again.retired_at == later
    with pytest.raises(ValidationError):
        actions.approve_agent(agent_id=agent.pk, actor=ADA, now=later)
    with pytest.raises(ValidationError):
        actions.request_drain(agent_id=agent.pk, actor=ADA, now=later, reason="kernel")
    assert list(AuditEntry.objects.filter(noun="agent").order_by("id").values_list("action", flat=True)) == [
        "agent.approve",
        "agent.drain",
        "agent.undrain",
        "agent.retire",
    ]


@pytest.mark.django_db(transaction=True)
def test_two_people_who_edit_one_pool_at_once_cannot_both_win(installation, now):
    factories.workload_class("chat")
    factories.workload_class("bulk", "batch")
    factories.pool("chat")
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def change(limit: int) -> None:
        barrier.wait()
        try:
            edit(now, version=1, lend_p95_ms=limit)
            outcomes.append("saved")
        except Stale:
            outcomes.append("stale")
        finally:
            connection.close()

    threads = [threading.Thread(target=change, args=(limit,)) for limit in (150, 160)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["saved", "stale"]
    assert Pool.objects.get().version == 2
    assert AuditEntry.objects.filter(action="pool.edit").count() == 1
