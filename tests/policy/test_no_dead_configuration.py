"""No dead configuration: every field that can be written changes a policy document or a live entry, or is read by a
decision or an output that this table names. A field that nobody placed, or whose reader is gone, fails.
"""

import ast
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import msgspec
import pytest

from controlplane.budgets import actions as budgets
from controlplane.contracts.actions import CLASS_FIELDS, VERSION_FIELDS
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.fleet.actions import POOL_FIELDS, SLOT_FIELDS
from controlplane.fleet.models import Pool, Slot
from controlplane.ledger.models import RateCard
from controlplane.ledger.rates import CARD_FIELDS
from controlplane.policy import live_list
from controlplane.policy.compile import compile_configuration
from controlplane.policy.models import LiveEntry
from controlplane.tenants import actions as tenants
from controlplane.tenants import key_actions as keys
from controlplane.tenants.actions import next_live_number
from controlplane.tenants.models import ApiKey, Tenant
from tests import factories
from tests.policy.conftest import api_key, make_fleet

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 11, 29, 20, tzinfo=UTC)

# Of what is compiled: the field of the document (its own name unless told) and who reads it.
READS: dict[str, dict[str, tuple[str, str]]] = {
    "pool": {
        "isolation": ("isolation", "agent/rescheduling.py"),
        "interactive_class": ("interactive_class", "agent/registry.py"),
        "batch_class": ("batch_class", "agent/items.py"),
        "fairness_unit": ("fairness_unit", "agent/rescheduling.py"),
        "prompt_weight": ("prompt_weight", "agent/rescheduling.py"),
        "output_weight": ("output_weight", "agent/rescheduling.py"),
        "size_bounds_gpu_ms": ("gpu_ms", "agent/rescheduling.py"),
        "aging_s": ("aging_s", "agent/rescheduling.py"),
        "reserve_after_ms": ("reserve_after_ms", "agent/rescheduling.py"),
        "prefill_us_per_token": ("prefill_us_per_token", "agent/registry.py"),
        "decode_us_per_token": ("decode_us_per_token", "agent/registry.py"),
        "max_batch_size": ("max_batch_size", "agent/batching.py"),
        "max_batch_wait_ms": ("max_wait_ms", "agent/batching.py"),
        "safe_rate": ("entries", "agent/safe_rate.py"),
        "lend_p95_ms": ("lend_p95_ms", "agent/engine.py"),
        "lend_hold_s": ("lend_hold_s", "flex/terms.py"),
        "load_limit": ("load_limit", "flex/terms.py"),
        "lend_slack": ("lend_slack", "flex/terms.py"),
        "return_slack": ("return_slack", "flex/terms.py"),
        "return_hold_s": ("return_hold_s", "flex/terms.py"),
        "min_hold_s": ("min_hold_s", "flex/terms.py"),
        "drain_bound_s": ("drain_bound_s", "agent/engine.py"),
        "grant_ttl_s": ("grant_ttl_s", "flex/terms.py"),
        "cooldown_s": ("cooldown_s", "flex/terms.py"),
        "decision_interval_s": ("decision_interval_s", "flex/terms.py"),
        "max_lent": ("max_lent", "flex/terms.py"),
        "spillover_per_week": ("spillover_per_week", "flex/terms.py"),
        "spillover_action": ("spillover_action", "flex/terms.py"),
    },
    "slot": {
        "band": ("band", "agent/rescheduling.py"),
        "places": ("places", "agent/rescheduling.py"),
        "kv_tokens": ("kv_tokens", "agent/rescheduling.py"),
    },
    "class": {
        "priority": ("priority", "agent/engine.py"),
        "min_share_ppm": ("min_share_ppm", "agent/rescheduling.py"),
        "max_prompt_tokens": ("max_prompt_tokens", "agent/registry.py"),
        "max_output_tokens": ("max_output_tokens", "agent/registry.py"),
        "default_output_tokens": ("default_output_tokens", "agent/registry.py"),
        "template_allowance_tokens": ("template_allowance_tokens", "agent/front_desk.py"),
        "max_queue": ("max_queue", "agent/registry.py"),
        "max_wait_ms": ("max_wait_ms", "agent/registry.py"),
        "stage_timeout_s": ("stage_timeout_s", "agent/registry.py"),
        "overload": ("overload", "agent/registry.py"),
        "downgrade_to": ("downgrade_to", "agent/front_desk.py"),
        "retry_safe": ("retry_safe", "agent/registry.py"),
        "cancellable": ("cancellable", "agent/registry.py"),
        "default_deadline_s": ("default_deadline_s", "agent/registry.py"),
        "model_names": ("models", "agent/registry.py"),
    },
    "tenant": {
        "weight": ("weight", "agent/rescheduling.py"),
        "max_concurrency": ("max_concurrency", "agent/registry.py"),
        "classes": ("classes", "agent/front_desk.py"),
        "model_names": ("models", "agent/registry.py"),
        "outage_posture": ("outage_posture", "agent/registry.py"),
        "parent_id": ("ancestors", "wire/policy.py"),
    },
    "version": {
        "objective": ("objective", "agent/objectives.py"),
        "metric": ("metric", "agent/objectives.py"),
        "threshold_ms": ("threshold_ms", "agent/objectives.py"),
    },
    "card": {name: (name, "agent/registry.py") for name in CARD_FIELDS},
}

# Of what no document carries: who decides by it, or shows it.
READERS: dict[str, dict[str, str]] = {
    "pool": {
        "name": "templates/fleet/pools_rows.html",
        "gpu_type": "templates/live/pool.html",
        "idle_policy": "ledger/attribution_input.py",
        "lend_price_share_ppm": "ledger/attribution_cells.py",
        "demo_values": "live/topics.py",
    },
    "slot": {"gpu_share_ppm": "ledger/attribution_input.py"},
    "class": {"name": "templates/contracts/class.html"},
    "tenant": {"name": "ledger/export_rows.py", "cost_centre": "ledger/export_rows.py"},
    "version": {
        "target_ppm": "live/contracts.py",
        "population": "live/contracts.py",
        "window_s": "live/contracts.py",
        "budget_period_s": "live/contracts.py",
        "load_limit_per_s": "live/contracts.py",
        "min_events": "live/contracts.py",
        "admitted_before": "contracts/nights.py",
        "finished_by": "contracts/nights.py",
        "first_attempt_within_s": "contracts/nights.py",
        "zone": "contracts/nights.py",
    },
    "card": {},
    "budget": {
        "name": "budgets/queries.py",
        "limit_nanos": "budgets/windows.py",
        "hard": "budgets/windows.py",
        "thresholds_percent": "budgets/sweep.py",
        "period": "budgets/windows.py",
        "anchor_day": "budgets/windows.py",
        "zone": "budgets/windows.py",
    },
    "key": {"name": "templates/tenants/_key_rows.html"},
}

# Of keys, which act at once: the field of the live entry and who reads it.
LIVE: dict[str, tuple[str, str]] = {
    "expires_at": ("expires_us", "agent/registry.py"),
    "classes": ("classes", "agent/front_desk.py"),
    "default_class": ("default_class", "agent/front_desk.py"),
    "max_concurrency": ("max_concurrency", "agent/registry.py"),
    "requests_per_s": ("requests_per_s", "agent/registry.py"),
    "tokens_per_minute": ("tokens_per_minute", "agent/registry.py"),
}

WRITABLE: dict[str, tuple[str, ...]] = {
    "pool": POOL_FIELDS,
    "slot": SLOT_FIELDS,
    "class": CLASS_FIELDS,
    "tenant": tenants.EDITABLE,
    "version": VERSION_FIELDS,
    "card": CARD_FIELDS,
    "budget": (*budgets.EDITABLE, *budgets.CALENDAR),
    "key": keys.EDITABLE,
}

OTHER: dict[str, object] = {
    "isolation": "dedicated", "interactive_class": "other", "batch_class": "bulk-2", "fairness_unit": "requests",
    "size_bounds_gpu_ms": [1, 2], "safe_rate": {"entries": {"4": 9.5}}, "load_limit": 0.11, "lend_slack": 0.01,
    "return_slack": 0.99, "max_lent": 1, "spillover_action": "block", "band": "flex", "overload": "queue",
    "retry_safe": True, "cancellable": False, "model_names": ["other-model"], "classes": ["bulk"],
    "outage_posture": "open",
    "objective": "deadline", "metric": "e2e", "idle_policy": "even", "population": "admitted", "zone": "Europe/Berlin",
    "expires_at": NOW, "default_class": "bulk", "requests_per_s": 1.5, "demo_values": True,
    "load_limit_per_s": 5.0,
}  # fmt: skip


def test_the_table_places_every_field_that_can_be_written():
    for noun, fields in WRITABLE.items():
        placed = {**READS.get(noun, {}), **READERS.get(noun, {}), **(LIVE if noun == "key" else {})}
        assert set(placed) == set(fields), f"{noun}: place these, or take them out: {set(placed) ^ set(fields)}"


@cache
def words_read(place: str) -> frozenset[str]:
    """Attributes that a module loads and words of its strings (SQL, names for getattr); of a template all words."""
    path = ROOT / place if place.startswith("templates/") else ROOT / "controlplane" / place
    text = path.read_text()
    if path.suffix == ".html":
        return frozenset(re.findall(r"\w+", text))
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"\w+", node.value))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


@pytest.mark.parametrize(
    ("noun", "field", "read", "place"),
    [
        *((noun, field, read, place) for noun, rows in READS.items() for field, (read, place) in rows.items()),
        *((noun, field, field, place) for noun, rows in READERS.items() for field, place in rows.items()),
        *(("key", field, read, place) for field, (read, place) in LIVE.items()),
    ],
)
def test_somebody_reads_it(noun, field, read, place):
    assert read in words_read(place), f"{noun}.{field}: nothing in {place} reads {read}"


def rows() -> dict[str, object]:
    """One row of each noun, all of them in one pool's document."""
    fleet = make_fleet(1)
    for slug, kind in (("other", "interactive"), ("bulk-2", "batch")):
        factories.workload_class(slug, kind)
    parent = factories.tenant("group")
    chat = fleet.classes[0]
    chat.model_names = [fleet.pool.model.name]
    chat.save()
    fleet.tenant.classes = ["chat", "bulk"]
    fleet.tenant.save()
    contract = Contract.objects.create(slug="c", name="c", workload_class=chat, created_at=NOW)
    version = ContractVersion.objects.create(
        contract=contract, number=1, effective_from=NOW, target_ppm=990_000, threshold_ms=800, created_by="x",
        created_at=NOW,
    )  # fmt: skip
    OTHER["parent_id"] = parent.pk
    return {
        "pool": fleet.pool, "slot": fleet.pool.slots.order_by("name").first(), "class": chat, "tenant": fleet.tenant,
        "version": version, "card": fleet.cards[0],
    }  # fmt: skip


NIGHTLY = ("admitted_before", "finished_by", "first_attempt_within_s")
MODELS = {
    "pool": Pool,
    "slot": Slot,
    "class": WorkloadClass,
    "tenant": Tenant,
    "version": ContractVersion,
    "card": RateCard,
}


def another(row, field):
    """A value that the column takes and that is not the present one."""
    present = getattr(row, field)
    if field == "downgrade_to":
        return WorkloadClass.objects.get(slug="other")
    if field in OTHER:
        assert OTHER[field] != present, field
        return OTHER[field]
    return f"{present}-2" if isinstance(present, str) else present + 1


@pytest.mark.django_db
@pytest.mark.parametrize("noun", list(READS))
def test_what_the_table_says_is_compiled_changes_the_document_and_the_rest_does_not(noun):
    row = rows()[noun]
    before = compile_configuration(NOW).digest
    moved = set()
    for field in WRITABLE[noun]:
        if field in NIGHTLY:
            # of deadlines only, which no document carries: the control plane judges them
            continue
        value, present = another(row, field), getattr(row, field)
        changed = row
        if (noun, field) == ("class", "model_names"):
            # a pool serves its home classes anyway: the list says which others it serves
            changed, present, value = WorkloadClass.objects.get(slug="other"), [], row.model_names
        MODELS[noun].objects.filter(pk=changed.pk).update(**{field: value})
        if compile_configuration(NOW).digest != before:
            moved.add(field)
        MODELS[noun].objects.filter(pk=changed.pk).update(**{field: present})
        assert compile_configuration(NOW).digest == before
    assert moved == set(READS[noun]), f"{noun}: {moved ^ set(READS[noun])}"


@pytest.mark.django_db
def test_every_limit_of_a_key_is_in_its_live_entry():
    factories.installation()
    key = api_key(factories.tenant("acme"))
    live_list.sign_changes(NOW)

    def entry() -> dict[str, object]:
        return msgspec.json.decode(bytes(LiveEntry.objects.get(kind="key").body))

    for field, (read, _) in LIVE.items():
        before = entry()
        present = getattr(key, field)
        value = OTHER.get(field, 7 if present is None else present)
        ApiKey.objects.filter(pk=key.pk).update(**{field: value, "live_number": next_live_number()})
        live_list.sign_changes(NOW)
        after = entry()
        assert before[read] != after[read], field
