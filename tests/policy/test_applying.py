"""The configuration as a file: its export changes nothing, an empty installation becomes it, errors name lines."""

from datetime import UTC, datetime, timedelta

import pytest
import yaml
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.utils import timezone
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from controlplane.audit.models import AuditEntry
from controlplane.budgets.actions import create_budget
from controlplane.contracts.actions import create_class, create_contract, edit_class
from controlplane.contracts.models import Contract, WorkloadClass
from controlplane.fleet.actions import add_slots, create_pool
from controlplane.fleet.models import Pool, Slot
from controlplane.ledger.models import CostRate, RateCard
from controlplane.ledger.rates import add_cost_rate, add_rate_card
from controlplane.policy.apply_plan import Verb, plan
from controlplane.policy.applying import apply, export_text, prepare
from controlplane.policy.sections import SECTIONS, read_sections
from controlplane.policy.yaml_lines import Unreadable, read_lines
from controlplane.tenants.actions import create_tenant
from controlplane.tenants.models import ApiKey, Tenant
from tests import factories
from tests.policy.conftest import ADMIN, api_key

UNMANAGED = {section.name: {"mode": "unmanaged"} for section in SECTIONS}


def build(now: datetime, tenant_slug: str = "acme") -> None:
    """A bit of everything, by the actions that pages call."""
    said = {"actor": ADMIN, "now": now, "reason": "built"}
    create_class(slug="bulk", kind="batch", values={"name": "Bulk: night = #1", "default_deadline_s": 3_600}, **said)
    create_class(slug="small", kind="interactive", values={"max_wait_ms": 500}, **said)
    create_class(slug="chat", kind="interactive", values={"model_names": ["llama-70b"], "priority": 10}, **said)
    target = WorkloadClass.objects.get(slug="small")
    edit_class(slug="chat", values={"overload": "downgrade", "downgrade_to": target}, **said)
    create_tenant(slug="group", name="Group", **said)
    parent = Tenant.objects.get(slug="group").pk
    create_tenant(
        slug=tenant_slug, name="'ACME' \u2013 Zo\u00eb", parent_id=parent, classes=["chat", "bulk"], weight=3, **said
    )
    values = {
        "gpu_type": "H100", "interactive_class": "chat", "batch_class": "bulk", "size_bounds_gpu_ms": [500, 4_000],
        "safe_rate": {"entries": {"4": 20.5, "6": 31}, "valid_until": "2027-01-01T00:00:00Z"}, "load_limit": 0.65,
    }  # fmt: skip
    create_pool(slug="chat-70b", model="llama-70b", values=values, **said)
    for band, names in (("interactive", ["s0", "s1"]), ("batch", ["s2"]), ("flex", ["s3"])):
        add_slots(pool_slug="chat-70b", names=names, band=band, kv_tokens=70_000, **said)
    create_contract(
        slug="chat-ttft", class_slug="chat", tenant_slug=tenant_slug,
        values={"target_ppm": 990_000, "threshold_ms": 800}, **said,
    )  # fmt: skip
    night = {"objective": "deadline", "target_ppm": 990_000, "admitted_before": "20:00", "finished_by": "06:30:15"}
    create_contract(slug="night", class_slug="bulk", values={**night, "zone": "Europe/Berlin"}, **said)
    for slug in ("chat", "bulk"):
        prices = {"prompt_nanos_per_mtok": 500_000_001, "output_nanos_per_mtok": 1_500_000_000}
        add_rate_card(class_slug=slug, model="llama-70b", values=prices, **said)
    add_cost_rate(pool_slug="chat-70b", nanos_per_slot_hour=2_500_000_000, **said)
    add_cost_rate(
        pool_slug="chat-70b", nanos_per_slot_hour=2_400_000_000, effective_from=now + timedelta(days=9), **said
    )
    tenant = Tenant.objects.get(slug=tenant_slug)
    create_budget(tenant_id=tenant.pk, name="month", limit_nanos=4_000 * 10**9, thresholds_percent=[80, 100], **said)


@pytest.fixture
def built(installation):
    now = timezone.now()
    build(now)
    return now


def edited(text: str, change) -> str:
    document = yaml.safe_load(text)
    change(document["sections"])
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def empty_it() -> None:
    """Everything that a file may bring back, gone as if it had never been."""
    for model in (RateCard, CostRate):
        model.objects.all().delete()
    from controlplane.budgets.models import Budget, BudgetWindow
    from controlplane.contracts.models import ContractVersion
    from controlplane.fleet.models import ServedModel, SlotInterval, SlotTenure

    for model in (
        BudgetWindow, Budget, ContractVersion, Contract, SlotInterval, SlotTenure, Slot, Pool, ServedModel, ApiKey,
    ):  # fmt: skip
        model.objects.all().delete()
    Tenant.objects.update(parent=None)
    Tenant.objects.all().delete()
    WorkloadClass.objects.update(downgrade_to=None)
    WorkloadClass.objects.all().delete()


@pytest.mark.django_db
class TestRoundTrip:
    def test_its_own_export_is_an_empty_plan_and_writes_nothing(self, built):
        entries = AuditEntry.objects.count()
        text = export_text(built)
        assert prepare(text, built).plan.empty
        assert apply(text, actor=ADMIN, now=built, reason="again").empty
        assert AuditEntry.objects.count() == entries

    def test_an_empty_installation_becomes_what_was_exported(self, built):
        text = export_text(built)
        before = read_sections(built)
        empty_it()
        assert not any(read_sections(built).values())
        done = apply(text, actor=ADMIN, now=built, reason="moved")
        assert read_sections(built) == before
        assert {step.verb for step in done.steps} <= {Verb.CREATE, Verb.ADD, Verb.EDIT}
        assert prepare(text, built).plan.empty
        assert export_text(built) == text
        entry = AuditEntry.objects.get(action="configuration.apply")
        assert (entry.reason, entry.after["steps"]) == ("moved", len(done.steps))
        assert AuditEntry.objects.filter(action="tenant.create", reason="moved").count() == 2

    def test_an_empty_installation_exports_clear_and_takes_it_back(self, installation, now):
        text = export_text(now)
        assert "mode: replace" not in text.split("flexband:")[1]
        assert prepare(text, now).plan.empty

    def test_no_secret_is_in_it(self, built):
        key = api_key(Tenant.objects.get(slug="acme"))
        text = export_text(built)
        assert key.secret_hash not in text and key.public_id not in text and "hash" not in text


@pytest.mark.django_db
class TestApply:
    def test_a_file_edits_creates_and_archives_with_one_reason(self, built):
        def change(sections):
            acme = next(item for item in sections["tenants"]["items"] if item["slug"] == "acme")
            acme["weight"] = 5
            sections["tenants"]["items"].append({"slug": "beta", "parent": "acme", "classes": ["chat"]})
            sections["budgets"] = {"mode": "clear"}
            pool = sections["pools"]["items"][0]
            pool["slots"] = [slot for slot in pool["slots"] if slot["name"] != "s3"] + [{"name": "s9", "band": "flex"}]

        text = edited(export_text(built), change)
        found = prepare(text, built)
        sentences = [step.sentence for step in found.plan.steps]
        assert "edit tenant acme: weight 3 -> 5" in sentences
        assert {"create tenant beta", "archive budget acme month", "remove slot s3 of pool chat-70b",
                "add slot s9 of pool chat-70b"} <= set(sentences)  # fmt: skip
        assert Tenant.objects.get(slug="acme").weight == 3, "a plan changes nothing"
        apply(text, actor=ADMIN, now=built, reason="CHG-7", against=found.against)
        assert Tenant.objects.get(slug="acme").weight == 5
        assert set(AuditEntry.objects.filter(reason="CHG-7").values_list("action", flat=True)) >= {
            "tenant.edit", "tenant.create", "budget.archive", "slot.remove", "slot.add", "configuration.apply",
        }  # fmt: skip
        assert prepare(text, built).plan.empty

    def test_a_promise_is_added_to_and_never_changed(self, built):
        def change(sections):
            versions = next(item for item in sections["contracts"]["items"] if item["slug"] == "chat-ttft")["versions"]
            versions.append({"threshold_ms": 700, "target_ppm": 990_000})

        later = built + timedelta(hours=1)
        text = edited(export_text(built), change)
        apply(text, actor=ADMIN, now=later, reason="faster")
        versions = list(Contract.objects.get(slug="chat-ttft").versions.order_by("number"))
        assert [row.threshold_ms for row in versions] == [800, 700]
        assert versions[-1].effective_from == later

        def rewrite(sections):
            sections["contracts"]["items"][0]["versions"][0]["threshold_ms"] = 1

        with pytest.raises(Unreadable, match="never changed"):
            prepare(edited(export_text(later), rewrite), later)

    def test_what_is_unmanaged_stays_whatever_is_there(self, built):
        text = yaml.safe_dump({"flexband": 1, "sections": UNMANAGED})
        assert prepare(text, built).plan.empty

    def test_all_or_nothing_and_every_line_is_named(self, built):
        def change(sections):
            sections["classes"]["items"].append({"slug": "third", "kind": "interactive", "max_output_tokens": 0})
            acme = next(item for item in sections["tenants"]["items"] if item["slug"] == "acme")
            acme.update(weight=0, parent="nobody")

        text = edited(export_text(built), change)
        with pytest.raises(Unreadable) as caught:
            apply(text, actor=ADMIN, now=built, reason="x")
        lines = text.splitlines()
        said = {lines[problem.line - 1].strip() for problem in caught.value.problems}
        assert {"max_output_tokens: 0", "parent: nobody"} <= said
        assert not WorkloadClass.objects.filter(slug="third").exists()

    def test_somebody_who_changed_something_meanwhile_is_noticed(self, built):
        def change(sections):
            sections["budgets"] = {"mode": "clear"}

        text = edited(export_text(built), change)
        found = prepare(text, built)
        Tenant.objects.filter(slug="acme").update(weight=8)
        with pytest.raises(ValidationError, match="Somebody"):
            apply(text, actor=ADMIN, now=built, reason="x", against=found.against)

    def test_a_reason_is_asked_for(self, built):
        with pytest.raises(ValidationError):
            apply(export_text(built), actor=ADMIN, now=built, reason=" ")

    def test_the_commands_show_the_plan_first(self, built, tmp_path, capsys):
        file = tmp_path / "flexband.yaml"
        call_command("policy", "export", output=file)
        call_command("policy", "apply", str(file))
        assert "nothing to change" in capsys.readouterr().out
        file.write_text(edited(file.read_text(), lambda sections: sections["tenants"]["items"][0].update(weight=9)))
        call_command("policy", "apply", str(file))
        assert "weight 3 -> 9" in (said := capsys.readouterr().out) and "Nothing was changed yet" in said
        assert Tenant.objects.get(slug="acme").weight == 3
        call_command("policy", "apply", str(file), reason="more")
        assert Tenant.objects.get(slug="acme").weight == 9
        file.write_text("flexband: 1\nsections:\n  classes: {mode: replace}\n")
        with pytest.raises(CommandError, match=r"line 3: classes has no items") as caught:
            call_command("policy", "apply", str(file))
        assert caught.value.returncode == 2


ITEMS = {
    "tenants": st.fixed_dictionaries(
        {"weight": st.integers(1, 1_000), "max_concurrency": st.integers(1, 9_999), "cost_centre": st.text(
            st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]), max_size=60)}
    ),
    "budgets": st.fixed_dictionaries(
        {"limit_nanos": st.integers(0, 10**17), "hard": st.booleans(),
         "thresholds_percent": st.lists(st.integers(1, 200), unique=True, min_size=1, max_size=5).map(sorted)}
    ),
    "pools": st.fixed_dictionaries(
        {"load_limit": st.floats(0.05, 0.95), "aging_s": st.integers(1, 600), "max_batch_wait_ms": st.integers(0, 50)}
    ),
}  # fmt: skip


@pytest.mark.django_db(transaction=True)
@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_was_applied_exports_as_itself(data):
    from django.db import transaction

    now = datetime(2026, 11, 29, 20, tzinfo=UTC)
    with transaction.atomic():
        factories.installation()
        build(now)

        def change(sections):
            for name, values in ITEMS.items():
                for item in sections[name]["items"]:
                    item.update(data.draw(values))

        text = edited(export_text(now), change)
        try:
            apply(text, actor=ADMIN, now=now, reason="x")
        except Unreadable as refused:
            assert all(problem.line for problem in refused.problems), refused.problems
        else:
            again = export_text(now)
            assert yaml.safe_load(again) == yaml.safe_load(text)
            assert plan(read_lines(again), read_sections(now)).empty
            assert plan(read_lines(text), read_sections(now)).empty
        transaction.set_rollback(True)
