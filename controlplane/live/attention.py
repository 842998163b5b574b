"""What needs attention: contract rows, alerts and agents, worst first. Pure over a `Reading`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.urls import NoReverseMatch, reverse

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.contracts.queries import Standing
from controlplane.contracts.wording import share_text, span_text
from controlplane.core.slo import Population, UnknownReason, Verdict
from controlplane.fleet.models import Pool
from controlplane.live import stages
from controlplane.live.contracts import FIVE_MINUTES_S, HOUR_S, Evaluation
from controlplane.live.deadlines import Night
from controlplane.live.readings import Reading
from controlplane.live.strip import iso
from controlplane.web.numerals import duration

GRADES = ("bad", "risk", "unknown", "ok")
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
    slug = contract.workload_class.slug
    homes = [pool for pool in reading.pools if slug in (pool.interactive_class, pool.batch_class)]
    return homes or [pool for pool in reading.pools if not (pool.interactive_class or pool.batch_class)]


def last_heard(reading: Reading, pools: list[Pool]) -> datetime | None:
    """The newest report among the pools' agents."""
    heard = [word.reported_at for pool in pools for word in reading.words.get(pool.pk, []) if word.reported_at]
    return max(heard, default=None)


def is_silent(reading: Reading, pools: list[Pool]) -> bool:
    """Nobody was heard lately: what the pools do is not known."""
    words = [word for pool in pools for word in reading.words.get(pool.pk, [])]
    return not any(word.fresh(reading.now) for word in words)


def promise(contract: Contract, version: ContractVersion) -> str:
    """The promise in one short line."""
    if version.objective == "deadline":
        by = version.finished_by.strftime("%H:%M") if version.finished_by else "—"
        return f"{share_text(version.target_ppm)} by {by} {version.zone}"
    return f"{share_text(version.target_ppm)} ≤ {version.threshold_ms:,} ms, {span_text(version.window_s)}"


def contract_rows(reading: Reading, *, pool: Pool | None = None, tenant_id: int | None = None) -> list[dict[str, Any]]:
    """Contracts by need of attention; `pool` and `tenant_id` keep those that concern them."""
    rows = []
    for standing in reading.standings:
        contract = standing.contract
        pools = pools_of(reading, contract)
        if pool is not None and pool not in pools:
            continue
        if tenant_id is not None and contract.tenant_id not in (None, tenant_id):
            continue
        rows.append(_contract_row(reading, standing, pools))
    return sorted(rows, key=lambda row: (GRADES.index(row["grade"]), -(row["burn_5m"] or 0.0), row["key"]))


def _contract_row(reading: Reading, standing: Standing, pools: list[Pool]) -> dict[str, Any]:
    contract, version = standing.contract, standing.in_force
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
        "grade": "unknown",
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
    if pools and is_silent(reading, pools):
        heard = last_heard(reading, pools)
        text = (
            f"no report for {duration(int((reading.now - heard).total_seconds() * 1e6))}" if heard else "no report yet"
        )
        return {
            "grade": "unknown",
            "since": iso(heard),
            "why": f"{contract.slug}: {text}. Its numbers are not shown because they may be wrong.",
        }
    grade = evaluation.grade
    worst = worst_of(reading, contract, pools)
    left = evaluation.budget_left
    return {
        "grade": grade,
        "burn_5m": evaluation.burn[FIVE_MINUTES_S],
        "burn_1h": evaluation.burn[HOUR_S],
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
        "grade": night.grade,
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


def tally(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by grade, the worst grade (`unknown` without contracts: nothing promised is nothing known) and a title."""
    counts = {grade: sum(row["grade"] == grade for row in rows) for grade in GRADES}
    worst = next((grade for grade in GRADES if counts[grade]), "unknown")
    title = f"{counts[worst]} {TALLY_WORDS[worst]}" if worst != "ok" and counts[worst] else ""
    return {"counts": counts, "state": worst, "title": title}


def agent_rows(reading: Reading) -> list[dict[str, Any]]:
    """Agents that are silent, refuse or drift."""
    slots = {
        slot.agent_id: [s.name for s in rows if s.agent_id == slot.agent_id]
        for rows in reading.slots.values()
        for slot in rows
    }
    silent_now = {w.agent_id: w for words in reading.words.values() for w in words if not w.fresh(reading.now)}
    rows = []
    for agent in reading.drift:
        state = agent.state
        word = silent_now.get(agent.agent_id)
        if word is not None and state in ("in_force", "behind"):
            state = "silent"
        if state == "in_force":
            continue
        grade, text = _DRIFT[state]
        rows.append(
            {
                "key": str(agent.agent_id),
                "grade": grade,
                "word": text,
                "name": agent.name,
                "where": ", ".join(
                    filter(
                        None,
                        [
                            agent.pool,
                            "slots " + " ".join(slots.get(agent.agent_id, [])) if slots.get(agent.agent_id) else "",
                        ],
                    )
                ),
                "text": agent.reason or _drift_text(agent, state),
                "at": iso(word.reported_at if word is not None else agent.reported_at),
                "css": "stale" if grade == "unknown" else "",
                "url": link("agents") if grade == "unknown" else link("policy-drift"),
            }
        )
    return rows


def _drift_text(agent: Any, state: str) -> str:
    if state == "silent":
        return "No report. It goes on by itself under its last policy and its leases."
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
