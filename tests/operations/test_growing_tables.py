"""No table grows unseen: each model is declared as bounded, ended by a named function, or kept on purpose and told."""

import ast

import pytest
from django.apps import apps

from tests.architecture.compose_file import ROOT
from tests.operations.source_text import PACKAGE, parsed
from tests.operations.test_document_tables import rows

BOUNDED = {
    "as many as people, tenants, agents, pools and what they configure": (
        "tenants.Installation tenants.Tenant tenants.Member tenants.ApiKey access.Invitation access.PersonalToken"
        " alerts.Receiver alerts.Silence fleet.ServedModel fleet.Pool fleet.Agent fleet.AgentLive fleet.Slot"
        " fleet.EnrolmentToken ledger.CostRate ledger.RateCard ledger.Account ledger.InvoiceMapping ledger.PoolSku"
        " ledger.PlannedExchangeRate contracts.WorkloadClass contracts.Contract contracts.ContractVersion"
        " budgets.Budget budgets.BudgetForecast budgets.BudgetIncrease budgets.AgentDemand jobs.ItemHolder"
        " jobs.BatchEfficiency policy.SigningKey flex.ControllerTerm flex.Grant ledger.BalanceFold"
    ),
    "a few a month or a day, whatever the traffic": (
        "ledger.Period ledger.PeriodVersion ledger.PeriodExport ledger.StatementIssue ledger.Proposal ledger.Invoice"
        " ledger.InvoiceLine ledger.BalanceSum usage.RetiredDay budgets.BudgetWindow budgets.BudgetNotice"
        " usage.AuditedHour usage.AgentCursor"
    ),
    "as many as decisions of people, controllers and alerts, which are evidence": (
        "audit.AuditEntry audit.CarriedRevision policy.Revision policy.PolicyBundle policy.Rollout policy.Wave"
        " policy.Delivery policy.WatchedCount policy.LiveEntry flex.Decision flex.Lend flex.Trip alerts.Alert"
        " alerts.AlertChange alerts.Delivery alerts.DeliveryAttempt alerts.Event fleet.SlotTenure fleet.SlotInterval"
        " experiments.Experiment experiments.ExperimentResult"
    ),
}
ENDED = {
    "usage.UsageRecord": ("usage/retirement.py", "usage_drop_partition"),
    "usage.RollupDelta": ("usage/rollups.py", "DELETE FROM usage_rollupdelta"),
    "tenants.IdempotentWrite": ("tenants/rest.py", "IdempotentWrite"),
    "ledger.ExportJob": ("ledger/exports.py", "ExportJob"),
    "ledger.InvoiceUpload": ("ledger/invoice_uploads.py", "InvoiceUpload"),
    "ledger.AttributionLine": ("ledger/attribution.py", "AttributionLine"),
    "budgets.ShareDivision": ("budgets/divisions.py", "DELETE FROM budgets_sharedivision"),
    "contracts.ObjectiveHour": ("contracts/hours.py", "DELETE FROM contracts_objectivehour"),
    "contracts.FoldedHour": ("contracts/hours.py", "DELETE FROM contracts_foldedhour"),
    "flex.PoolSample": ("flex/pruning.py", "DELETE FROM flex_poolsample"),
    "flex.PoolChange": ("flex/pool_changes.py", "DELETE FROM flex_poolchange"),
    "jobs.JobProgress": ("jobs/progress.py", "JobProgress"),
    "jobs.Item": ("jobs/item_partitions.py", "jobs_drop_partition"),
    "jobs.ItemBody": ("jobs/item_partitions.py", "jobs_drop_partition"),
    "jobs.ItemResult": ("jobs/item_partitions.py", "jobs_drop_partition"),
    "experiments.InputFile": (
        "experiments/migrations/0003_prepared_later_and_inputs_end.py",
        "DELETE FROM experiments_inputfile",
    ),
    "access.Session": ("access/session_actions.py", "delete"),
}
"""Model -> the file that ends its rows, and what stands there."""
KEPT = [
    "usage.RollupMinute",
    "usage.RollupQuarter",
    "usage.RollupDay",
    "usage.SlotUsageMinute",
    "usage.SlotMinute",
    "usage.RefusalMinute",
    "usage.DecisionSample",
    "usage.Quarantine",
    "usage.ImportedUsage",
    "usage.DuplicateRecord",
    "contracts.ObjectiveMinute",
    "budgets.Lease",
    "budgets.LeaseWindow",
    "ledger.LedgerEvent",
    "ledger.Transfer",
    "ledger.AttributionInterval",
    "jobs.Job",
    "jobs.StoredFile",
    "jobs.Batch",
]
"""These grow with traffic or time and nothing ends them: the operator's document names each with its growth."""


def models() -> set[str]:
    mine = (config for config in apps.get_app_configs() if config.name.startswith("controlplane."))
    return {f"{config.label}.{model.__name__}" for config in mine for model in config.get_models()}


def declared() -> list[str]:
    return [name for names in BOUNDED.values() for name in names.split()] + [*ENDED, *KEPT]


def test_every_model_is_declared_once():
    """A side table that nobody prunes grows to gigabytes: each has an end or says that it has none."""
    found = declared()
    assert sorted(found) == sorted(set(found)), "a model is declared twice"
    assert set(found) == models()


@pytest.mark.parametrize("model", ENDED)
def test_what_ends_the_rows_of_a_table_is_there(model):
    file, text = ENDED[model]
    source = (PACKAGE / file).read_text()
    assert text in source and any(word in source for word in ("DELETE", ".delete()", "_drop_partition"))


def test_no_function_ends_rows_of_a_table_that_is_said_to_be_kept():
    for file, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "DELETE FROM" in node.value:
                for name in KEPT:
                    assert f"DELETE FROM {name.replace('.', '_').lower()} " not in node.value + " ", f"{file}: {name}"


def test_tables_that_only_grow_are_told_to_the_operator():
    assert (ROOT / "docs" / "operate.md").exists()
    told = {cell for row in rows("operate.md", "tables that only grow") for cell in row[0].replace("`", "").split(", ")}
    assert told == {name.replace(".", "_").lower() for name in KEPT}
