import json
from datetime import timedelta

import pytest

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.policy.compile import compile_configuration
from controlplane.policy.configuration import Configuration
from controlplane.policy.diff import diff, groups, summary, tally
from tests import factories
from tests.policy.conftest import make_fleet

pytestmark = pytest.mark.django_db


def test_nothing_changed_is_no_change(fleet, now):
    assert diff(compile_configuration(now), compile_configuration(now), now=now) == []


def test_changes_are_told_with_direction_unit_and_both_values(fleet, now):
    before = compile_configuration(now)
    fleet.pool.lend_hold_s, fleet.pool.max_lent = 900, 1
    fleet.pool.save(update_fields=["lend_hold_s", "max_lent"])
    fleet.tenant.weight = 4
    fleet.tenant.save(update_fields=["weight"])
    fleet.classes[0].max_wait_ms = 600
    fleet.classes[0].save(update_fields=["max_wait_ms"])
    changes = diff(before, compile_configuration(now), now=now)
    assert [(item.kind, item.subject, item.sentence, item.before, item.after) for item in changes] == [
        ("pool", "chat-70b", "Interactive work must be calm for longer before a slot is lent.", "600 s", "900 s"),
        ("pool", "chat-70b", "Another number of slots may be lent at once.", "all flex slots", "1 slot"),
        ("tenant", "acme", "It gets a larger share when tenants compete.", "1", "4"),
        ("class", "chat", "A request that would wait longer than this is refused.", "2,000 ms", "600 ms"),
    ]
    assert [(group.kind, len(group.changes)) for group in groups(changes)] == [("pool", 2), ("tenant", 1), ("class", 1)]
    assert tally(changes) == "4 changes: 1 pool, 1 tenant, 1 class"
    assert summary(changes, most=1) == [
        "pool chat-70b: Interactive work must be calm for longer before a slot is lent. 600 s → 900 s",
        "and 3 more",
    ]


def test_batching_is_off_in_what_was_pushed_before_it_and_a_change_is_told(fleet, now):
    old_json = json.loads(json.dumps(compile_configuration(now).to_json()))
    for doc in old_json["pools"].values():
        del doc["pool"]["batching"]
    before = Configuration.from_json(old_json)
    assert diff(before, compile_configuration(now), now=now) == []
    assert before.digest == compile_configuration(now).digest
    fleet.pool.max_batch_size, fleet.pool.max_batch_wait_ms = 32, 5
    fleet.pool.save(update_fields=["max_batch_size", "max_batch_wait_ms"])
    changes = diff(before, compile_configuration(now), now=now)
    assert [(item.sentence, item.before, item.after) for item in changes] == [
        ("More embeddings may run together.", "1 input", "32 inputs"),
        ("A batch may wait longer for others.", "0 ms", "5 ms"),
    ]


def test_a_change_in_several_pools_is_told_once(now, db):
    make_fleet()
    other = factories.pool("chat-70b-b")
    factories.slot(other, "s0", "interactive")
    before = compile_configuration(now)
    factories.Tenant.objects.update(weight=2)
    assert len(diff(before, compile_configuration(now), now=now)) == 1


def test_the_first_push_and_an_archived_pool(fleet, now):
    new = compile_configuration(now)
    first = diff(None, new, now=now)
    assert first[0].sentence == "The pool is new."
    fleet.pool.archived_at = now
    fleet.pool.save(update_fields=["archived_at"])
    assert [item.sentence for item in diff(new, compile_configuration(now), now=now)] == [
        "The pool is archived; its agents keep what they have."
    ]


def test_a_slot_that_moves_and_one_that_leaves(fleet, now):
    before = compile_configuration(now)
    fleet.pool.slots.filter(name="s0").update(band="flex")
    fleet.pool.slots.get(name="s7").tenures.update(ended_at=now)
    changes = diff(before, compile_configuration(now), now=now)
    assert [(item.sentence, item.before, item.after) for item in changes] == [
        ("Slot s0 moves to another band.", "interactive", "flex"),
        ("Slot s7 leaves the pool.", "flex, 4 places", "none"),
    ]


def test_a_version_that_time_replaced_is_no_change_and_a_withdrawn_contract_is(fleet, now):
    contract = Contract.objects.create(slug="ttft", name="x", workload_class=fleet.classes[0], created_at=now)
    for number, days in ((1, -3), (2, 3)):
        ContractVersion.objects.create(
            contract=contract, number=number, effective_from=now + timedelta(days=days), target_ppm=990_000,
            threshold_ms=1000 - number, created_by="test", created_at=now,
        )  # fmt: skip
    before = compile_configuration(now)
    later = now + timedelta(days=4)
    assert diff(before, compile_configuration(later), now=later) == []
    contract.archived_at = later
    contract.save(update_fields=["archived_at"])
    sentences = {item.sentence for item in diff(before, compile_configuration(later), now=later)}
    assert "The contract is withdrawn." in sentences
