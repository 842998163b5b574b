"""Open alerts from a `Reading`: burn, absence, slots, agents, jobs, uncounted usage; how they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from controlplane.alerts.models import Severity
from controlplane.alerts.observing import Observed, Seen, observe
from controlplane.core.burn import Severity as Rule
from controlplane.fleet.models import Pool
from controlplane.live.attention import (
    burning_since,
    link,
    worst_of,
)
from controlplane.live.contracts import GRADES, Evaluation
from controlplane.live.drift_alerts import drift_alerts
from controlplane.live.job_alerts import job_alerts
from controlplane.live.readings import Homes, Reading, SlotNow
from controlplane.live.strip import iso
from controlplane.live.uncounted_alert import uncounted_alerts
from controlplane.web.numerals import duration

#: An alert names so many slots and counts the rest.
SLOTS_NAMED = 8
#: Changes from so long before a burn are named as what may have caused it.
CHANGES_BEFORE = timedelta(minutes=30)
CHANGES_NAMED = 3

Row = dict[str, Any]


def look(reading: Reading) -> Observed:
    """Raises, follows and resolves alerts by what the reading shows."""
    return observe([seen(row) for row in conditions(reading)], reading.now, unknown=unjudged(reading))


def unjudged(reading: Reading) -> set[str]:
    """Groups of contracts whose agents are all silent: their burn has not ended, nobody sees it."""
    found = set()
    for evaluation in reading.evaluations.values():
        if reading.homes(evaluation.contract.workload_class.slug).silent:
            found.add(group_of(contract=evaluation.contract.slug))
    return found


def group_of(*, contract: str = "", pool: str = "") -> str:
    """What is told in one message: all that concerns a contract, or a pool, or the records of all."""
    if contract:
        return f"contract:{contract}"
    return f"pool:{pool}" if pool else "records"


def seen(row: Row) -> Seen:
    """A condition as it is kept."""
    return Seen(
        key=row["key"],
        kind=row["kind"],
        severity=Severity.TICKET if row["grade"] == "risk" else Severity.PAGE,
        grade=row["grade"],
        word=row["word"],
        group=group_of(contract=row["contract"], pool=row["pool"]),
        title=row["title"],
        text=row["text"],
        url=row["url"],
        pool=row["pool"],
        contract=row["contract"],
        since=datetime.fromisoformat(row["since"]) if row["since"] else None,
        causes=row["causes"],
    )


def alert_rows(reading: Reading) -> list[Row]:
    """Open alerts with what people did about them: what nobody looks after first, then the loudest."""
    rows = [_marked(reading, row) for row in conditions(reading)]
    return sorted(rows, key=lambda row: (bool(row["note"]), GRADES.index(row["grade"]), row["since"] or "", row["key"]))


def _marked(reading: Reading, row: Row) -> Row:
    mark = reading.marks.get(row["key"])
    if mark is None:
        return {**row, "id": None, "note": "", "css": ""}
    note = ""
    if mark.acknowledged_at is not None:
        note = f"Acknowledged by {mark.acknowledged_by} at {mark.acknowledged_at:%H:%M} UTC."
    elif mark.silenced_until is not None:
        note = f"Silenced until {mark.silenced_until:%H:%M} UTC: nobody is told."
    return {**row, "id": mark.alert_id, "note": note, "css": "dim" if note else "", "url": link("alert", mark.alert_id)}


def conditions(reading: Reading) -> Iterator[Row]:
    """Everything that is wrong now and that somebody should know of."""
    for evaluation in reading.evaluations.values():
        yield from _burn_alerts(reading, evaluation)
    for pool in reading.pools:
        slots = reading.slots.get(pool.pk, [])
        yield from (_overdue(pool, slot) for slot in slots if slot.state == "overdue")
        yield from _lost_alerts(pool, slots)
    yield from job_alerts(reading)
    yield from drift_alerts(reading)
    yield from uncounted_alerts(reading.uncounted)


def _overdue(pool: Pool, slot: SlotNow) -> Row:
    return {
        "key": f"overdue-{pool.slug}-{slot.name}",
        "kind": "overdue",
        "pool": pool.slug,
        "contract": "",
        "causes": [],
        "grade": "bad",
        "word": "Overdue",
        "title": f"{slot.name} in {pool.slug} is past its drain bound",
        "text": f"Batch work on it has not ended after {pool.drain_bound_s} s. It admits no more.",
        "since": iso(slot.recalled_at or slot.since),
        "url": link("pool", pool.slug),
    }


def _lost_alerts(pool: Pool, slots: list[SlotNow]) -> list[Row]:
    """One open incident for each agent that vanished, until it reports again or is retired."""
    lost: dict[tuple[int | None, str], list[SlotNow]] = {}
    for slot in slots:
        if slot.state == "lost":
            lost.setdefault((slot.agent_id, slot.agent_name), []).append(slot)
    return [_lost_alert(pool, agent_id, name, rows) for (agent_id, name), rows in lost.items()]


def _lost_alert(pool: Pool, agent_id: int | None, name: str, slots: list[SlotNow]) -> Row:
    names = ", ".join(slot.name for slot in slots[:SLOTS_NAMED])
    more = f" and {len(slots) - SLOTS_NAMED} more" if len(slots) > SLOTS_NAMED else ""
    plural = "slots are" if len(slots) > 1 else "slot is"
    return {
        "key": f"lost-{pool.slug}-{agent_id}",
        "kind": "lost",
        "pool": pool.slug,
        "contract": "",
        "causes": [],
        "grade": "unknown",
        "word": "Lost",
        "title": f"{name or 'An agent'} in {pool.slug} has vanished: {len(slots)} {plural} unobserved",
        "text": (
            f"{names}{more}. What runs there is not known, and nothing is lent in the pool meanwhile. Lent slots come"
            " home by the end of their grants. Reach its machine; if it is gone, retire it on its page."
        ),
        "since": min((iso(slot.since) or "" for slot in slots), default=None) or None,
        "url": link("agent", agent_id) if agent_id is not None else link("pool", pool.slug),
    }


def _burn_alerts(reading: Reading, evaluation: Evaluation) -> list[Row]:
    contract, rows = evaluation.contract, []
    homes = reading.homes(contract.workload_class.slug)
    pools, silent = homes.pools, homes.silent
    if not (_is_missed(evaluation, homes, reading.now) if silent else evaluation.firing):
        return []
    name = contract.name or contract.slug
    url = link("contract", contract.slug) or link("contracts")
    causes = likely_causes(reading, evaluation, pools) if evaluation.firing and not silent else []
    for state in evaluation.firing if not silent else ():
        page = state.rule.severity is Rule.PAGE
        long_text, short_text = duration(state.rule.long_us), duration(state.rule.short_us)
        rows.append(
            {
                "key": f"burn-{contract.slug}-{float(state.rule.factor):g}",
                "kind": "burn",
                "pool": "",
                "contract": contract.slug,
                "causes": causes,
                "grade": "bad" if page else "risk",
                "word": "Page" if page else "Ticket",
                "title": f"{name} burns over {float(state.rule.factor):g}×",
                "text": (
                    f"{float(state.long.burn_rate or 0):.1f}× over {long_text} and"
                    f" {float(state.short.burn_rate or 0):.1f}× over {short_text}."
                ),
                "since": iso(burning_since(reading, contract.pk)),
                "url": url,
            }
        )
    if silent and homes.heard is not None:
        rows += _absence(evaluation, name, url, homes.heard, reading.now)
    return rows


def _is_missed(evaluation: Evaluation, homes: Homes, now: datetime) -> bool:
    """Whether nobody was heard for so long that it could have burned what an alert is for."""
    return homes.heard is not None and _silence_us(homes.heard, now) >= evaluation.absence.warn_us


def _silence_us(heard: datetime, now: datetime) -> int:
    return int((now - heard).total_seconds() * 1_000_000)


def _absence(evaluation: Evaluation, name: str, url: str, heard: datetime, now: datetime) -> list[Row]:
    silence_us = _silence_us(heard, now)
    page = silence_us >= evaluation.absence.page_us
    pages_at = heard + timedelta(microseconds=evaluation.absence.page_us)
    share = silence_us / evaluation.absence.page_us * 5
    return [
        {
            "key": f"absence-{evaluation.contract.slug}",
            "kind": "absence",
            "pool": "",
            "contract": evaluation.contract.slug,
            "causes": [],
            "grade": "bad" if page else "risk",
            "word": "Page" if page else "Warning",
            "title": f"{name} has no telemetry",
            "text": (
                f"Silent for {duration(silence_us)}. That could have burned {share:.1f} % of the budget"
                + ("." if page else f"; it pages at 5 %, at {pages_at:%H:%M:%S} UTC.")
            ),
            "since": iso(heard),
            "url": url,
        }
    ]


def likely_causes(reading: Reading, evaluation: Evaluation, pools: list[Pool]) -> list[dict[str, str]]:
    """What most often explains a burn, with its value now: the worst stage, silent agents, frozen pools, changes."""
    found = []
    worst = worst_of(reading, evaluation.contract, pools)
    if worst is not None:
        value = f"{worst.name}, {worst.share * 100:.0f} % of the slowest requests' time"
        found.append({"label": "Worst stage", "value": value, "url": link("pool", pools[0].slug)})
    for pool in pools:
        quiet = [word.name for word in reading.words.get(pool.pk, []) if not word.fresh(reading.now)]
        if quiet:
            value = f"{len(quiet)} of {len(reading.words[pool.pk])} in {pool.slug}: {', '.join(quiet[:3])}"
            found.append({"label": "Silent agents", "value": value, "url": link("agents")})
    began = burning_since(reading, evaluation.contract.pk) or reading.now
    recent = [change for change in reading.changes if change.at >= began - CHANGES_BEFORE]
    for change in sorted(recent, key=lambda one: abs(one.at - began))[:CHANGES_NAMED]:
        found.append(
            {"label": f"Changed at {change.at:%H:%M:%S} UTC", "value": f"{change.what}, by {change.who}", "url": ""}
        )
    return found
