from datetime import timedelta

import msgspec
import pytest

from controlplane.budgets.models import Budget
from controlplane.contracts.models import Contract, ContractVersion
from controlplane.fleet.models import Pool, SlotTenure
from controlplane.policy.compile import compile_configuration, load_source
from controlplane.policy.configuration import Configuration, Stamp
from controlplane.policy.validation import Facts, Rule, Severity, validate
from controlplane.wire.policy import PolicyDocument
from controlplane.wire.signing import canonical, digest_hex
from tests import factories
from tests.policy.conftest import make_fleet

pytestmark = pytest.mark.django_db


def found(now, **facts):
    return {(item.rule, item.severity): item for item in validate(load_source(now), Facts(now=now, **facts))}


def test_the_same_rows_give_the_same_bytes(fleet, now):
    first = compile_configuration(now)
    stamp = Stamp(7, now, now + timedelta(days=7))
    # Rewritten rows come back in another physical order.
    for pool in Pool.objects.all():
        pool.name += "!"
        pool.save(update_fields=["name"])
    second = compile_configuration(now + timedelta(seconds=5))
    assert first.digest == second.digest
    assert first.stamped(stamp) == second.stamped(stamp)


def test_a_document_carries_its_stamp_and_survives_a_round_trip(fleet, now):
    configuration = compile_configuration(now)
    assert Configuration.from_json(configuration.to_json()) == configuration
    stored = canonical(configuration.to_json())
    assert Configuration.from_text(stored.decode()) == configuration
    assert configuration.digest == digest_hex(stored), "written from the documents it is the same"
    body = configuration.stamped(Stamp(7, now, now + timedelta(days=7)))["chat-70b"]
    document = msgspec.json.decode(body, type=PolicyDocument)
    assert (document.revision, document.not_before) == (7, "2026-11-29T20:00:00Z")
    assert document.accept_until == "2026-12-06T20:00:00Z"
    assert [slot.name for slot in document.pool.slots] == [f"s{n}" for n in range(8)]
    assert document.pool.slots[1].agent_id == fleet.agents[1].pk


def test_a_pool_gets_only_what_it_needs(fleet, now):
    factories.tenant("elsewhere", classes=["embed"])
    factories.tenant("other-model", classes=["chat"], model_names=["mistral"])
    factories.tenant("gone", classes=["chat"], state="archived")
    factories.workload_class("embed", model_names=["e5"])
    document = compile_configuration(now).pools["chat-70b"]
    assert [row.slug for row in document.tenants] == ["acme"]
    assert sorted(row.slug for row in document.classes) == ["bulk", "chat"]
    assert document.tenants[0].models == ["llama-70b"]


def test_tenants_stand_by_their_names_with_what_they_may_use_and_what_holds_them(fleet, now):
    parent = factories.tenant("zz-parent", classes=[])
    for slug, classes in (
        ("e", ["bulk"]),
        ("b", ["bulk"]),
        ("a", ["chat", "bulk", "embed"]),
        ("c", ["chat"]),
        ("d", ["embed"]),
    ):
        factories.tenant(slug, classes=classes, parent=parent if slug in "ac" else None, weight=ord(slug))
    Budget.objects.create(
        tenant=parent, name="all", hard=True, limit_nanos=1, zone="UTC", created_at=now, updated_at=now
    )
    rows = {row.slug: row for row in compile_configuration(now).pools["chat-70b"].tenants}
    assert list(rows) == ["a", "acme", "b", "c", "e"]
    assert [rows[slug].classes for slug in "abce"] == [["bulk", "chat"], ["bulk"], ["chat"], ["bulk"]]
    assert [rows[slug].weight for slug in "abc"] == [97, 98, 99]
    assert [rows[slug].hard_budget for slug in "abc"] == [True, False, True]
    assert [rows[slug].ancestors for slug in "abc"] == [[parent.pk], [], [parent.pk]]


def test_slots_that_left_the_fleet_are_in_no_document(fleet, now):
    pool = Pool.objects.get(slug="chat-70b")
    ended, fresh = (factories.slot(pool, name, "flex") for name in ("ended", "fresh"))
    SlotTenure.objects.filter(slot=ended).update(ended_at=now)
    SlotTenure.objects.filter(slot=fresh).delete()
    names = {slot.name for slot in compile_configuration(now).pools["chat-70b"].pool.slots}
    assert "fresh" in names and "ended" not in names


def test_a_downgrade_target_comes_along(fleet, now):
    economy = factories.workload_class("economy")
    chat = fleet.classes[0]
    chat.overload, chat.downgrade_to = "downgrade", economy
    chat.save(update_fields=["overload", "downgrade_to"])
    document = compile_configuration(now).pools["chat-70b"]
    assert {row.slug: row.downgrade_to for row in document.classes} == {
        "bulk": None,
        "chat": "economy",
        "economy": None,
    }


def test_a_hard_budget_of_an_ancestor_binds_its_children(fleet, now):
    parent = factories.tenant("group", classes=[])
    fleet.tenant.parent = parent
    fleet.tenant.save(update_fields=["parent"])
    assert compile_configuration(now).pools["chat-70b"].tenants[0].hard_budget is False
    Budget.objects.create(tenant=parent, name="month", limit_nanos=1, created_at=now, updated_at=now)
    row = compile_configuration(now).pools["chat-70b"].tenants[0]
    assert (row.hard_budget, row.ancestors) == (True, [parent.pk])


def test_versions_in_force_and_to_come_are_shipped_and_replaced_ones_are_not(fleet, now):
    contract = Contract.objects.create(slug="chat-ttft", name="x", workload_class=fleet.classes[0], created_at=now)
    for number, days in ((1, -30), (2, -1), (3, 5)):
        ContractVersion.objects.create(
            contract=contract, number=number, effective_from=now + timedelta(days=days), target_ppm=990_000,
            threshold_ms=1000 - number, created_by="test", created_at=now,
        )  # fmt: skip
    document = compile_configuration(now).pools["chat-70b"]
    assert [row.threshold_ms for row in document.contracts] == [998, 997]
    later = compile_configuration(now + timedelta(days=6)).pools["chat-70b"]
    assert [row.threshold_ms for row in later.contracts] == [997]


def test_a_sound_fleet_has_no_finding(fleet, now):
    assert found(now) == {}


def _no_slots(fleet):
    fleet.pool.slots.all()[0].tenures.all()
    for slot in fleet.pool.slots.all():
        slot.tenures.update(ended_at=factories.NOW)


def _unknown_class(fleet):
    fleet.pool.batch_class = "nightly"
    fleet.pool.save(update_fields=["batch_class"])


def _wrong_kind(fleet):
    fleet.pool.batch_class, fleet.pool.interactive_class = "chat", "bulk"
    fleet.pool.save(update_fields=["batch_class", "interactive_class"])


def _wrong_model(fleet):
    fleet.classes[0].model_names = ["mistral"]
    fleet.classes[0].save(update_fields=["model_names"])


def _cycle(fleet):
    chat, bulk = fleet.classes
    chat.downgrade_to, bulk.downgrade_to = bulk, chat
    chat.save(update_fields=["downgrade_to"])
    bulk.save(update_fields=["downgrade_to"])


def _max_lent(fleet):
    fleet.pool.max_lent = 3
    fleet.pool.save(update_fields=["max_lent"])


def _floors(fleet):
    fleet.classes[1].min_share_ppm = 300_000
    fleet.classes[1].save(update_fields=["min_share_ppm"])


def _no_floor(fleet):
    fleet.pool.slots.filter(band="interactive").update(band="flex")


def _no_card(fleet):
    fleet.cards[1].delete()


def _short_grant(fleet):
    fleet.pool.grant_ttl_s = 4
    fleet.pool.save(update_fields=["grant_ttl_s"])


def _bad_rate(fleet):
    fleet.pool.safe_rate = {"entries": {"four": 1}}
    fleet.pool.save(update_fields=["safe_rate"])


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (_no_slots, Rule.POOL_WITHOUT_SLOTS),
        (_unknown_class, Rule.CLASS_UNKNOWN),
        (_wrong_kind, Rule.CLASS_KIND_MISMATCH),
        (_wrong_model, Rule.CLASS_MODEL_MISMATCH),
        (_cycle, Rule.DOWNGRADE_CYCLE),
        (_max_lent, Rule.MAX_LENT_OVER_FLEX),
        (_floors, Rule.FLOORS_OVER_SLOTS),
        (_no_floor, Rule.INTERACTIVE_WITHOUT_FLOOR),
        (_no_card, Rule.RATE_CARD_MISSING),
        (_short_grant, Rule.GRANT_TTL_TOO_SHORT),
        (_bad_rate, Rule.SAFE_RATE_UNREADABLE),
    ],
)
def test_a_rule_that_does_not_hold_is_an_error_with_its_name(fleet, now, spoil, rule):
    spoil(fleet)
    finding = found(now)[rule, Severity.ERROR]
    assert finding.message.endswith(".")
    assert finding.action.endswith(".")


def test_return_slack_at_lend_slack_is_refused(fleet, now):
    source = load_source(now)
    source.pools[0].return_slack = source.pools[0].lend_slack
    rules = {item.rule for item in validate(source, Facts(now=now))}
    assert rules == {Rule.RETURN_SLACK_NOT_OVER_LEND_SLACK}


def test_no_pool_is_an_error(installation, now):
    assert set(found(now)) == {(Rule.NO_POOLS, Severity.ERROR)}


def test_warnings_ask_for_a_look(fleet, now):
    fleet.pool.safe_rate = {}
    fleet.pool.save(update_fields=["safe_rate"])
    fleet.pool.slots.filter(name="s0").update(agent=None)
    assert set(found(now)) == {
        (Rule.SAFE_RATE_MISSING, Severity.WARNING),
        (Rule.SLOT_WITHOUT_AGENT, Severity.WARNING),
    }
    fleet.pool.safe_rate = {"entries": {"4": 16.0}, "valid_until": "2026-11-29T20:00:00Z"}
    fleet.pool.save(update_fields=["safe_rate"])
    assert (Rule.SAFE_RATE_EXPIRED, Severity.WARNING) in found(now)


@pytest.mark.parametrize(("rest_ms", "warned"), [(499.0, False), (500.0, True)])
def test_a_contract_needs_room_beside_the_queue(fleet, now, rest_ms, warned):
    contract = Contract.objects.create(slug="chat-ttft", name="x", workload_class=fleet.classes[0], created_at=now)
    ContractVersion.objects.create(
        contract=contract, number=1, effective_from=now, target_ppm=990_000, threshold_ms=700, created_by="t",
        created_at=now,
    )  # fmt: skip
    rules = found(now, rest_of_ttft_ms={"chat-70b": rest_ms})
    assert ((Rule.CONTRACT_NO_ROOM, Severity.WARNING) in rules) is warned


def test_two_pools_of_one_model_share_a_rate_card(now, db):
    make_fleet()
    second = factories.pool("chat-70b-b")
    factories.slot(second, "s0", "interactive")
    rules = {rule for rule, _ in found(now)}
    assert Rule.RATE_CARD_MISSING not in rules
