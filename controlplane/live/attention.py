"""What needs attention: contract rows, alerts and agents, worst first. Pure over a `Reading`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

from django.urls import NoReverseMatch, reverse

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.contracts.queries import Standing
from controlplane.contracts.wording import share_text, span_text
from controlplane.core.slo import Population, UnknownReason, Verdict
from controlplane.fleet.models import Pool
from controlplane.live import stages
from controlplane.live.contracts import FIVE_MINUTES_S, GRADES, HOUR_S, Evaluation
from controlplane.live.deadlines import Night
from controlplane.live.queues import AgentWord
from controlplane.live.readings import Reading
from controlplane.live.strip import iso
from controlplane.policy.queries import AgentDrift
from controlplane.tenants.models import Tenant
from controlplane.web.numerals import duration

WORDS = {"bad": "Breached", "risk": "At risk", "unknown": "Unknown", "ok": "OK"}
TALLY_WORDS = {"bad": "breached", "risk": "at risk", "unknown": "unknown", "ok": "OK"}
METRICS = {"queue_wait": "queue wait", "ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
_UNKNOWN = {
    UnknownReason.SILENCE: "no requests in its window",
    UnknownReason.FEW_DATA: "too few requests in its window to judge",
    UnknownReason.NONSENSE: "counts that contradict each other",
    UnknownReason.NOT_YET_DUE: "not due yet",
}
_DRIFT = {
    "refused": ("bad", "Refused"),
    "must_upgrade": ("bad", "Must upgrade"),
    "silent": ("unknown", "Silent"),
    "never": ("unknown", "Never reported"),
    "behind": ("risk", "Drifting"),
    "draining": ("neutral", "Draining"),
    "in_force": ("ok", "As desired"),
}


def link(name: str, *args: Any) -> str:
    """The address of a page, empty while no app brings it."""
    try:
        return reverse(name, args=args)
    except NoReverseMatch:
        return ""


def pools_of(reading: Reading, contract: Contract) -> list[Pool]:
    """Pools whose home class is the contract's class; all of them for a class that is nobody's home."""
    return reading.homes(contract.workload_class.slug).pools


def promise(contract: Contract, version: ContractVersion) -> str:
    """The promise in one short line."""
    if version.objective == "deadline":
        by = version.finished_by.strftime("%H:%M") if version.finished_by else "—"
        return f"{share_text(version.target_ppm)} by {by} {version.zone}"
    return f"{share_text(version.target_ppm)} ≤ {version.threshold_ms:,} ms, {span_text(version.window_s)}"


@dataclass(frozen=True, slots=True)
class Listed:
    """Contracts in the order of attention: all of them counted, the first of them as rows."""

    standings: list[Standing]
    rows: list[dict[str, Any]]
    tally: dict[str, Any]

    @property
    def more(self) -> int:
        return len(self.standings) - len(self.rows)

    @property
    def why(self) -> str:
        """What the rows that are shown say of themselves."""
        return " ".join(row["why"] for row in self.rows if row["why"])


def listed(reading: Reading, shown: int, *, pool: Pool | None = None, tenant: Tenant | None = None) -> Listed:
    """Contracts by need of attention; `pool` and `tenant` keep those that concern them.

    A row takes twenty times as long as a grade, so only what is shown gets one.
    """
    found = []
    for standing in reading.standings:
        contract = standing.contract
        if pool is not None and pool not in pools_of(reading, contract):
            continue
        if tenant is not None and not _concerns(contract, tenant):
            continue
        grade, burn = _graded(reading, standing)
        found.append((GRADES.index(grade), -(burn or 0.0), contract.slug, standing))
    found.sort(key=itemgetter(0, 1, 2))
    return Listed(
        [standing for *_, standing in found],
        [_contract_row(reading, standing) for *_, standing in found[:shown]],
        tally([GRADES[place] for place, *_ in found]),
    )


def _concerns(contract: Contract, tenant: Tenant) -> bool:
    return contract.tenant_id == tenant.pk or (
        contract.tenant_id is None and contract.workload_class.slug in tenant.classes
    )


def _graded(reading: Reading, standing: Standing) -> tuple[str, float | None]:
    """The grade of a contract's row and its burn over 5 min, None where that is not shown."""
    contract = standing.contract
    evaluation, night = reading.evaluations.get(contract.pk), reading.nights.get(contract.pk)
    if standing.in_force is None:
        return "unknown", None
    if evaluation is not None:
        if reading.homes(contract.workload_class.slug).silent:
            return "unknown", None
        return evaluation.grade, evaluation.burn_over(FIVE_MINUTES_S)
    return ("unknown" if night is None else night.grade), None


def _contract_row(reading: Reading, standing: Standing) -> dict[str, Any]:
    contract, version = standing.contract, standing.in_force
    pools = pools_of(reading, contract)
    metric = (
        "deadline"
        if version and version.objective == "deadline"
        else METRICS.get(version.metric if version else "", "")
    )
    owner = contract.workload_class.slug + (f", {contract.tenant.slug}" if contract.tenant else "")
    row: dict[str, Any] = {
        "key": contract.slug,
        "name": contract.name or f"{owner} · {metric}",
        "detail": " · ".join(
            filter(None, [promise(contract, version) if version else "", ", ".join(p.slug for p in pools)])
        ),
        "url": link("contract", contract.slug) or link("contracts"),
        "grade": _graded(reading, standing)[0],
        "burn_5m": None,
        "burn_1h": None,
        "left": None,
        "left_pct": None,
        "meter": "unknown",
        "stage": "",
        "since": None,
        "why": "",
        "css": "",
    }
    evaluation, night = reading.evaluations.get(contract.pk), reading.nights.get(contract.pk)
    if version is None:
        row["why"] = f"{row['name']}: no version is in force yet."
    elif evaluation is not None:
        row |= _latency(reading, evaluation, pools)
    elif night is not None:
        row |= _night(night)
    return _finish(row)


def _finish(row: dict[str, Any]) -> dict[str, Any]:
    grade = row["grade"]
    row["word"] = WORDS[grade]
    row["css"] = {"bad": "bad", "unknown": "stale", "ok": "dim"}.get(grade, "")
    if row["left"] is not None:
        row["meter"] = "bad" if row["left"] <= 0 else "risk" if row["left"] < 0.5 else "ok"
        row["left_pct"] = row["left"] * 100
        row["bar"] = min(1.0, max(0.0, row["left"]))
    else:
        row["bar"] = 0.0
    return row


def _latency(reading: Reading, evaluation: Evaluation, pools: list[Pool]) -> dict[str, Any]:
    contract = evaluation.contract
    homes = reading.homes(contract.workload_class.slug)
    if homes.silent:
        heard = homes.heard
        text = (
            f"no report for {duration(int((reading.now - heard).total_seconds() * 1e6))}" if heard else "no report yet"
        )
        return {
            "since": iso(heard),
            "why": f"{contract.slug}: {text}. Its numbers are not shown because they may be wrong.",
        }
    grade = evaluation.grade
    worst = worst_of(reading, contract, pools)
    left = evaluation.budget_left
    return {
        "burn_5m": evaluation.burn_over(FIVE_MINUTES_S),
        "burn_1h": evaluation.burn_over(HOUR_S),
        "left": None if left is None else float(left),
        "stage": "" if worst is None else f"{worst.name} {worst.share * 100:.0f} %",
        "since": iso(burning_since(reading, contract.pk)) if grade in ("bad", "risk") else None,
        "why": _why_unknown(evaluation) if grade == "unknown" else "",
    }


def _why_unknown(evaluation: Evaluation) -> str:
    reason = evaluation.result.unknown_reason
    text = _UNKNOWN[reason] if reason is not None else "not known"
    return f"{evaluation.contract.slug}: {text}; a verdict needs {evaluation.version.min_events:,}."


def _night(night: Night) -> dict[str, Any]:
    result = night.result
    target = float(night.version.target_ppm) / 1_000_000
    share = None if result.share is None else float(result.share)
    left = None
    if share is not None and result.verdict in (Verdict.MET, Verdict.MISSED):
        left = 1 - (1 - share) / (1 - target)
    say = _UNKNOWN[result.unknown_reason] if result.unknown_reason is not None else ""
    return {
        "left": left,
        "stage": f"{result.finished_in_time} of {result.jobs} jobs done" if result.jobs else "",
        "why": f"{say}.".capitalize() if night.grade == "unknown" and say else "",
    }


def worst_of(reading: Reading, contract: Contract, pools: list[Pool]) -> stages.WorstStage | None:
    """The worst stage of the contract's class in the pool where the slowest requests take longest."""
    found = [stages.worst_stage(reading.stages, pool.pk, [contract.workload_class_id]) for pool in pools]
    return max((one for one in found if one is not None), key=lambda one: one.total_us, default=None)


def burning_since(reading: Reading, contract_id: int) -> datetime | None:
    """Since which minute without a break the 5 min burn is 1 or more; None when it is under now."""
    since = None
    for at, burn in reversed(reading.burn.get(contract_id, [])):
        if burn is None or burn < 1:
            break
        since = at
    return since


def tally(grades: list[str]) -> dict[str, Any]:
    """Counts by grade, the worst grade (`unknown` without contracts: nothing promised is nothing known) and a title."""
    counts = {grade: grades.count(grade) for grade in GRADES}
    worst = next((grade for grade in GRADES if counts[grade]), "unknown")
    title = f"{counts[worst]} {TALLY_WORDS[worst]}" if worst != "ok" and counts[worst] else ""
    return {"counts": counts, "state": worst, "title": title}


@dataclass(frozen=True, slots=True)
class Troubled:
    """An agent that is silent, refuses, drifts or drains; `word` is its last report where that is too old."""

    agent: AgentDrift
    state: str
    word: AgentWord | None

    @property
    def grade(self) -> str:
        return _DRIFT[self.state][0]


def troubled(reading: Reading) -> list[Troubled]:
    """Every such agent, worst first."""
    silent_now = {w.agent_id: w for words in reading.words.values() for w in words if not w.fresh(reading.now)}
    found = []
    for agent in reading.drift:
        word = silent_now.get(agent.agent_id)
        state = "silent" if word is not None and agent.state in ("in_force", "behind") else agent.state
        if state == "in_force" and agent.draining_since is not None:
            state = "draining"
        if state != "in_force":
            found.append(Troubled(agent, state, word))
    return found


def agent_rows(reading: Reading, agents: list[Troubled]) -> list[dict[str, Any]]:
    """Those agents as rows."""
    slots: dict[int | None, list[str]] = defaultdict(list)
    for own in reading.slots.values():
        for slot in own:
            slots[slot.agent_id].append(slot.name)
    return [_agent_row(one, slots.get(one.agent.agent_id, [])) for one in agents]


def _agent_row(one: Troubled, slots: list[str]) -> dict[str, Any]:
    agent, grade = one.agent, one.grade
    return {
        "key": str(agent.agent_id),
        "grade": grade,
        "word": _DRIFT[one.state][1],
        "name": agent.name,
        "where": ", ".join(filter(None, [agent.pool, "slots " + " ".join(slots) if slots else ""])),
        "text": agent.reason or _drift_text(agent, one.state),
        "at": iso(one.word.reported_at if one.word is not None else agent.reported_at),
        "css": "stale" if grade == "unknown" else "",
        "url": link("policy-drift") if grade in ("bad", "risk") else link("agent", agent.agent_id),
    }


def _drift_text(agent: Any, state: str) -> str:
    if state == "silent":
        return "No report. It goes on by itself under its last policy and its leases."
    if state == "draining":
        return "Drained by hand: it takes nothing new until somebody lets it serve again."
    return f"Runs revision {agent.applied or '—'}, desired {agent.desired or '—'}."


def populations(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The three populations side by side for the burning contract."""
    rows = []
    for name in Population:
        row = evaluation.result.populations[name]
        rows.append(
            {
                "key": str(name),
                "label": str(name).capitalize(),
                "share": None if row.compliance is None else float(row.compliance) * 100,
                "verdict": str(row.verdict),
            }
        )
    return rows
