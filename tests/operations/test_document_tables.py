"""Tables of reasons, lines, metrics and options in the documents are those of the code, in both directions."""

import re
from fractions import Fraction

import pytest
from django.urls import resolve

from controlplane.agent.identity import IDENTITY_FILE, KEY_FILE
from controlplane.agent.options import parser
from controlplane.agent.policy_state import LIVE_FILE, POLICY_FILE
from controlplane.agent.readiness import NotReady
from controlplane.core import attribution, reasons
from controlplane.core.flex_decision import RecallReason
from controlplane.core.idle_time import Band, IdleCause, OwnerInterval, SlotTenure
from controlplane.ledger.pages import CAUSES, LINE_TITLES
from controlplane.ledger.posting import AccountKind, AccountRef
from tests.architecture.compose_file import ROOT

DOCS = ROOT / "docs"
US_PER_S = 1_000_000


def rows(document: str, heading: str) -> list[list[str]]:
    """Cells of the first table below the header row that begins with `heading`, marks of code taken off the first."""
    lines = (DOCS / document).read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        found.append([cells[0].strip("`"), *cells[1:]])
    return found


def first_cells(document: str, heading: str) -> list[str]:
    return [row[0] for row in rows(document, heading)]


def test_refusals_stand_in_their_order_with_their_status():
    table = rows("on-call.md", "reason | status")
    assert [row[0] for row in table] == [reason.value for reason in reasons.Reason]
    assert {row[0]: int(row[1]) for row in table} == {
        reason.value: reasons.answer_for(reason).status for reason in reasons.Reason
    }
    assert all(row[2] and row[3] for row in table), "every refusal says what it means and what to do"


def test_outcomes_stand_with_their_status():
    table = rows("on-call.md", "outcome")
    assert {row[0]: int(row[1]) for row in table} == {
        outcome.value: reasons.answer_for(outcome).status for outcome in reasons.Outcome
    }


def test_recall_reasons_stand_in_their_order():
    assert first_cells("on-call.md", "reason | what happened") == [reason.value for reason in RecallReason]


def test_what_clients_are_told_is_what_the_tenants_document_says():
    told = {(int(row[0]), code) for row in rows("tenant.md", "status") for code in re.findall(r"`([a-z_]+)`", row[1])}
    answers = {
        (answer.status, answer.error_code) for answer in reasons.ANSWERS.values() if answer.error_code is not None
    }
    assert told == answers | {(503, "unavailable")}
    never = {row[1] for row in rows("tenant.md", "status") if row[2].startswith(("no:", "not before"))}
    said_false = {answer.error_code for answer in reasons.ANSWERS.values() if answer.should_retry is False}
    assert {code for cell in never for code in re.findall(r"`([a-z_]+)`", cell)} == said_false


def test_lines_of_cost_stand_with_idle_causes_in_their_order():
    told = first_cells("finance.md", "line")
    assert told == [*(kind.value for kind in attribution.LineKind), *(cause.value for cause in IdleCause)]
    assert set(told) == set(LINE_TITLES)
    idle = [row[0] for row in rows("finance.md", "line") if row[1].startswith("idle: ")]
    assert set(idle) == set(CAUSES)


def test_accounts_stand_with_their_codes():
    told = {row[1].strip("`"): row[0] for row in rows("finance.md", "account")}
    assert told == {
        kind.value: AccountRef(kind, tenant="<slug>", class_="<class>", pool="<pool>", line="<line>").code
        for kind in AccountKind
    }


def test_the_example_of_finance_is_what_attribution_says():
    hour = 3_600 * US_PER_S
    home, lent = OwnerInterval("chat", 0, hour // 2), OwnerInterval("bulk", hour // 2, hour, lender="chat")
    found = attribution.attribute(
        attribution.PoolInterval(
            0,
            hour,
            2_500_000_000,
            [
                SlotTenure("i1", (OwnerInterval("chat", 0, hour),), Band.INTERACTIVE_FLOOR),
                SlotTenure("f1", (home, lent), Band.FLEX),
            ],
            [
                attribution.Usage("a", "chat", 2_700 * US_PER_S, "i1"),
                attribution.Usage("b", "bulk", 900 * US_PER_S, "f1"),
            ],
        )
    )
    direct = {line.tenant: line.nanos for line in found.lines if line.kind == "direct"}
    by_tenant = found.by_tenant()
    for name, direct_text, idle_text, cost_text in rows("finance.md", "tenant"):
        tenant = name.strip("*").lower()
        owned = sum(by_tenant.values()) if tenant == "pool" else by_tenant[tenant]
        used = sum(direct.values()) if tenant == "pool" else direct[tenant]
        texts = [text.strip("*") for text in (direct_text, idle_text, cost_text)]
        assert [Fraction(text) * 10**9 for text in texts] == [used, owned - used, owned]
    causes = {kind: nanos for kind, nanos in found.by_kind().items() if kind != "direct"}
    text = (DOCS / "finance.md").read_text().replace("\n", " ")
    for kind, nanos in causes.items():
        assert f"(`{kind}`, {nanos / 10**9:g})" in text


def test_metrics_stand_with_type_and_labels():
    source = (ROOT / "controlplane/agent/metrics.py").read_text()
    families = set(re.findall(r'"((?:flexband|gen_ai)_[a-z_]+)"', source))
    table = rows("agent.md", "metric")
    assert {row[0] for row in table} == families
    kinds = {name: kind for kind, name in re.findall(r'(counter|gauge|Times|quantiles)\(\s*"([a-z_]+)"', source)}
    for name, kind, labels, _ in table:
        assert kind == kinds[name].replace("quantiles", "gauge").replace("Times", "histogram"), name
        assert ("`quantile`" in labels) == (kinds[name] == "quantiles"), name


def test_reasons_of_an_agent_that_is_not_ready_stand_in_their_order():
    table = rows("agent.md", "reason of not ready")
    assert [row[0] for row in table] == [reason.value for reason in NotReady]
    assert all(row[1] for row in table)


def test_options_and_files_of_the_agent_are_told():
    text = (DOCS / "agent.md").read_text()
    told = set(re.findall(r"--[a-z-]+", "\n".join(line for line in text.splitlines() if line.startswith("| `--"))))
    options = {name for action in parser()._actions for name in action.option_strings if name.startswith("--")}
    assert told == options - {"--help"}
    files = first_cells("agent.md", "file in the state directory")
    assert {KEY_FILE, IDENTITY_FILE, POLICY_FILE, LIVE_FILE} <= set(files)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", (DOCS / "tenant.md").read_text(), flags=re.S))
def test_examples_for_tenants_are_python(block):
    compile(block, "docs/tenant.md", "exec")


def test_the_address_of_jobs_in_the_example_is_one():
    address = re.search(r'"https://flexband\.example(/api/v1/[^"]*)"', (DOCS / "tenant.md").read_text())
    assert address and resolve(address.group(1)).view_name == "api-jobs-list"
