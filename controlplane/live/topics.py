"""The state of each topic as JSON types, from one `Reading`: what first paint renders and what frames carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from controlplane.contracts.wording import share_text
from controlplane.fleet.models import Pool
from controlplane.flex.wording import REASONS
from controlplane.live import alerting, attention, engines, evidence_table, stages, strip
from controlplane.live.act_links import act_links
from controlplane.live.contracts import BURNS_SHOWN
from controlplane.live.queues import queue_rows
from controlplane.live.readings import Reading
from controlplane.live.strip import iso
from controlplane.policy.models import Delivery, Rollout, Wave
from controlplane.tenants.models import Tenant
from controlplane.web import figures
from controlplane.web.numerals import duration

State = dict[str, Any]
DECISIONS_SHOWN = 5
CONTRACTS_SHOWN, AGENTS_SHOWN, ALERTS_SHOWN = 50, 25, 25
"""Rows that a page and its frames hold: of thousands the first are what needs somebody, the lists have them all."""
DEMO_HINT = (
    "Demo values: hold times, cooldown and drain bound are short, so that the band moves while you watch."
    " Watch the slack of batch fall under its limit, a slot be lent, and come home when interactive waits."
)


def all_topics(reading: Reading) -> Iterator[tuple[str, State]]:
    """Every topic of a tick with its state."""
    yield "fleet", fleet(reading)
    yield "alerts", alerts(reading)
    for pool in reading.pools:
        yield f"pool:{pool.slug}", pool_state(reading, pool)
    yield from rollouts(reading)
    for tenant in Tenant.objects.exclude(state=Tenant.State.ARCHIVED):
        yield f"tenant:{tenant.slug}", tenant_state(reading, tenant)


def _seen(reading: Reading, pool: Pool) -> dict[int, bool]:
    words = {word.agent_id: word for word in reading.words.get(pool.pk, [])}
    return {
        slot.slot_id: slot.agent_id in words and words[slot.agent_id].fresh(reading.now)
        for slot in reading.slots.get(pool.pk, [])
        if slot.agent_id is not None
    }


def _cells(reading: Reading, pool: Pool) -> list[dict[str, Any]]:
    return strip.cells(reading.slots.get(pool.pk, []), _seen(reading, pool), pool.drain_bound_s, reading.now)


# ---- fleet ----


CALM = "Every agent reports and runs what it should."
NOBODY = "No agent is enrolled: nothing serves requests."


def fleet(reading: Reading) -> State:
    """The home page."""
    contracts = attention.listed(reading, CONTRACTS_SHOWN)
    pools = [_pool_row(reading, pool) for pool in reading.pools]
    agents = attention.troubled(reading)
    open_alerts = alerting.alert_rows(reading)
    return {
        "at": iso(reading.now),
        **_contracts_state(contracts),
        "hero": _hero(reading, contracts.rows),
        "burn_figure": _burn_figure(reading, contracts),
        "pools": pools,
        "band_meta": _band_meta(pools),
        "queues": [row for pool in reading.pools for row in _class_rows(reading, pool)],
        "decisions": _decisions(reading),
        "agents": attention.agent_rows(reading, agents[:AGENTS_SHOWN]),
        "agents_more": len(agents[AGENTS_SHOWN:]),
        "agents_meta": _agents_meta(reading, agents),
        "agents_calm": CALM if reading.drift else NOBODY,
        "alerts": open_alerts[:ALERTS_SHOWN],
        "alerts_more": len(open_alerts[ALERTS_SHOWN:]),
        "changes": [
            {"key": c.key, "at": iso(c.at), "kind": c.kind, "who": c.who, "what": c.what, "url": c.url}
            for c in reading.changes
        ],
        "spillover": [
            {
                "key": pool.slug,
                "name": pool.slug,
                "lends": reading.lends_this_week.get(pool.pk, 0),
                "budget": pool.spillover_per_week,
                "share": min(1.0, reading.lends_this_week.get(pool.pk, 0) / max(1, pool.spillover_per_week)),
                "meter": "risk" if reading.lends_this_week.get(pool.pk, 0) >= 0.8 * pool.spillover_per_week else "ok",
            }
            for pool in reading.pools
            if any(slot.band == "flex" for slot in reading.slots.get(pool.pk, []))
        ],
    }


def _contracts_state(contracts: attention.Listed) -> State:
    return {
        **contracts.tally,
        "contracts": contracts.rows,
        "contracts_more": contracts.more,
        "contracts_why": contracts.why,
    }


def _pool_row(reading: Reading, pool: Pool) -> dict[str, Any]:
    slots, cells = reading.slots.get(pool.pk, []), _cells(reading, pool)
    words = reading.words.get(pool.pk, [])
    silent = [word for word in words if not word.fresh(reading.now)]
    note = strip.band_note(slots, cells)
    if silent and len(silent) == len(words):
        note = f"Not seen: {', '.join(word.name for word in silent)}. {note}"
    elif not words:
        note = "No agent is enrolled in this pool."
    return {
        "key": pool.slug,
        "name": pool.slug,
        "url": attention.link("pool", pool.slug),
        "isolation": pool.isolation + (", frozen" if _frozen(pool, reading) else ""),
        "groups": [
            {"key": band, "cells": [row for row in cells if row["band"] == band]}
            for band in strip.BANDS
            if any(row["band"] == band for row in cells)
        ],
        "note": note,
        "css": "stale" if words and len(silent) == len(words) else "",
    }


def _frozen(pool: Pool, reading: Reading) -> bool:
    return pool.frozen_since is not None and (pool.frozen_until is None or pool.frozen_until > reading.now)


def _band_meta(pools: list[dict[str, Any]]) -> str:
    kinds = [cell["kind"] for row in pools for group in row["groups"] for cell in group["cells"]]
    said = [f"{kinds.count(kind)} {kind}" for kind in ("lent", "draining", "overdue", "unobserved") if kind in kinds]
    return f"{len(kinds)} slots" + (f": {', '.join(said)}" if said else "")


def _class_rows(reading: Reading, pool: Pool) -> list[dict[str, Any]]:
    rows = _queue(reading, pool)
    return [
        {**row, "key": f"{pool.slug}-{row['key']}", "pool": pool.slug, "url": attention.link("pool", pool.slug)}
        for row in rows
        if not row["level"]
    ]


def _queue(reading: Reading, pool: Pool, tenant_id: int | None = None) -> list[dict[str, Any]]:
    return queue_rows(
        reading.words.get(pool.pk, []),
        reading.names,
        reading.refused.get(pool.pk, {}),
        reading.now,
        tenant_id=tenant_id,
    )


def _decisions(reading: Reading) -> list[dict[str, Any]]:
    rows = []
    for pool in reading.pools:
        for mark in strip.marks(reading.decisions.get(pool.pk, [])):
            rows.append({**mark, "pool": pool.slug, "key": f"{pool.slug}-{mark['key']}"})
    return sorted(rows, key=lambda row: row["at"], reverse=True)[:DECISIONS_SHOWN]


def _agents_meta(reading: Reading, rows: list[attention.Troubled]) -> str:
    total = len(reading.drift)
    silent = sum(row.grade == "unknown" for row in rows)
    draining = sum(row.state == "draining" for row in rows)
    drifting = len(rows) - silent - draining
    if not total:
        return "none enrolled"
    parts = [f"{silent} silent" if silent else "", f"{drifting} drifting" if drifting else ""]
    parts.append(f"{draining} draining" if draining else "")
    return ", ".join([part for part in parts if part] + [f"{total - len(rows)} as desired"])


def _hero(reading: Reading, contracts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The contract that burns most, and which stage of the path takes its time; None when none is in trouble."""
    first = next((row for row in contracts if row["grade"] in ("bad", "risk") and row["burn_5m"] is not None), None)
    if first is None:
        return None
    standing = next(s for s in reading.standings if s.contract.slug == first["key"])
    evaluation = reading.evaluations[standing.contract.pk]
    pools = attention.pools_of(reading, standing.contract)
    found = [(stages.worst_stage(reading.stages, p.pk, [standing.contract.workload_class_id]), p) for p in pools]
    worst, pool = max(
        ((w, p) for w, p in found if w is not None), key=lambda pair: pair[0].total_us, default=(None, None)
    )
    since = attention.burning_since(reading, standing.contract.pk)
    return {
        "key": first["key"],
        "name": first["name"],
        "url": first["url"],
        "grade": first["grade"],
        "word": first["word"],
        "burn": first["burn_5m"],
        "burning": "is burning" if (first["burn_5m"] or 0) >= 1 else "has little budget left",
        "stage": "" if worst is None else worst.name,
        "share": None if worst is None else worst.share * 100,
        "pool": "" if pool is None else pool.slug,
        "pool_url": "" if pool is None else attention.link("pool", pool.slug),
        "acts": [] if pool is None else act_links(reading, pool, frozen=_frozen(pool, reading)),
        "since": None if worst is None else iso(worst.since),
        "total_us": None if worst is None else worst.total_us,
        "parts": []
        if pool is None
        else stages.strip_parts(reading.stages, pool.pk, [standing.contract.workload_class_id]),
        "left": first["left_pct"],
        "burning_for": None if since is None else duration(int((reading.now - since).total_seconds() * 1_000_000)),
        "populations": attention.populations(evaluation),
        "out_of_range": evaluation.window.minutes_out_of_range,
        "objective": f"{share_text(evaluation.version.target_ppm)} within {evaluation.version.threshold_ms:,} ms",
    }


def _burn_figure(reading: Reading, contracts: attention.Listed) -> dict[str, Any] | None:
    """Burn over 5 min windows of up to three contracts, worst first; a gap where nothing was counted."""
    series_of = ((standing.contract, reading.burn.get(standing.contract.pk, [])) for standing in contracts.standings)
    known = ((one, points) for one, points in series_of if any(burn is not None for _, burn in points))
    chosen = list(islice(known, BURNS_SHOWN))
    if not chosen:
        return None
    bad = {row["key"] for row in contracts.rows if row["grade"] == "bad"}
    series = [
        figures.Series(
            contract.slug,
            [None if burn is None else round(burn, 2) for _, burn in points],
            "var(--bad-edge)" if contract.slug in bad else "",
        )
        for contract, points in chosen
    ]
    minutes = [at for at, _ in chosen[0][1]]
    return figures.line_series(minutes, series, unit="×", threshold=1, threshold_label="1 = on budget", height_px=190)


# ---- one pool ----


def pool_state(reading: Reading, pool: Pool) -> State:
    """The pool page."""
    slots = reading.slots.get(pool.pk, [])
    words = reading.words.get(pool.pk, [])
    contracts = attention.listed(reading, CONTRACTS_SHOWN, pool=pool)
    sample = reading.samples.get(pool.pk)
    heard = [word.reported_at for word in words if word.reported_at is not None]
    cells = _cells(reading, pool)
    return {
        "at": iso(reading.now),
        # Of the newest report: rows of an agent that is silent say so themselves, and the others are still true.
        "telemetry_at": iso(max((at for at in heard if at <= reading.now), default=None)),
        **_contracts_state(contracts),
        "facts": {
            "slots": len(slots),
            "agents": len(words),
            "silent": sum(not word.fresh(reading.now) for word in words),
            "revision": reading.revision,
            "p95_us": None if sample is None else sample.p95_queue_us,
            "admitted": None if sample is None else sample.admitted_per_s,
            "safe_rate": None if sample is None else sample.safe_rate_per_s,
            "slack": None if sample is None else sample.slack,
            "sample_at": None if sample is None else iso(sample.at),
        },
        "frozen": _frozen_words(pool, reading),
        "acts": act_links(reading, pool, frozen=_frozen(pool, reading)),
        "demo": DEMO_HINT if pool.demo_values else "",
        "queue": _queue(reading, pool),
        "cells": cells,
        "band_note": strip.band_note(slots, cells),
        "lanes": strip.lanes(slots, reading.lanes, cells, reading.now),
        "marks": strip.marks(reading.decisions.get(pool.pk, [])),
        "flex": _flex(reading, pool, cells),
        **_engines(reading, pool),
        **stages.stage_state(reading.stages, pool.pk, reading.class_ids(pool)),
    }


def _engines(reading: Reading, pool: Pool) -> dict[str, Any]:
    words, points = reading.words.get(pool.pk, []), reading.engine_points.get(pool.slug, [])
    names = {slot.slot_id: slot.name for slot in reading.slots.get(pool.pk, [])}
    return {
        "engines": engines.engine_rows(words, reading.now),
        "engine_slots": engines.slot_rows(words, names, reading.now),
        "engine_points": points,
        **engines.line_figures(points),
    }


def _frozen_words(pool: Pool, reading: Reading) -> str:
    if not _frozen(pool, reading):
        return ""
    until = "until someone unfreezes it" if pool.frozen_until is None else f"until {pool.frozen_until:%H:%M} UTC"
    reason = f" ({pool.freeze_reason})" if pool.freeze_reason else ""
    return (
        f"Lending is frozen by {pool.frozen_by or 'the controller'} {until}{reason}. Loans run on; nothing new is lent."
    )


def _flex(reading: Reading, pool: Pool, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a flex slot: what it does and the table of checks behind it."""
    sample, last = reading.samples.get(pool.pk), reading.last_decisions.get(pool.pk)
    checks: Sequence[Mapping[str, Any]] | None = None
    if sample is not None and last is not None:
        checks = evidence_table.checks_now(sample.figures, last.limits)
    if checks is None:
        checks = last.checks if last is not None else []
    kinds = {row["key"]: row for row in cells}
    entries = []
    for slot in sorted(reading.slots.get(pool.pk, []), key=lambda row: row.name):
        if slot.band != "flex":
            continue
        kind = kinds[slot.name]["kind"]
        lent = reading.lend_checks.get((slot.slot_id, slot.fence))
        words = REASONS.get(slot.reason, slot.reason)
        entries.append(
            {
                "key": slot.name,
                "name": slot.name,
                "kind": kind,
                "chip": kinds[slot.name]["chip"],
                "word": kinds[slot.name]["word"],
                "say": evidence_table.say(slot, kind, pool.batch_class, words, reading.now),
                "closest": evidence_table.closest(checks) if kind == "lent" else "",
                "rows": evidence_table.table(checks, slot.name, lent),
                "fence": slot.fence,
                "since": kinds[slot.name]["since"],
                "expires_at": iso(slot.expires_at) if kind == "lent" else None,
                "agent": slot.agent_name,
                "recall_url": attention.link("flex-recall", slot.slot_id),
                "recallable": kind == "lent",
            }
        )
    return entries


# ---- alerts, rollouts, tenants ----


def alerts(reading: Reading) -> State:
    """Open alerts alone, for pages that only show their number."""
    rows = alerting.alert_rows(reading)
    return {
        "at": iso(reading.now),
        "alerts": rows[:ALERTS_SHOWN],
        "alerts_more": len(rows[ALERTS_SHOWN:]),
        "pages": sum(row["grade"] == "bad" and not row["note"] for row in rows),
    }


def rollouts(reading: Reading) -> Iterator[tuple[str, State]]:
    """Progress of rollouts that are not over, and of the newest one."""
    open_states = (Rollout.State.REQUESTED, Rollout.State.RUNNING)
    rows = list(Rollout.objects.filter(state__in=open_states).order_by("-revision_id")[:5])
    newest = Rollout.objects.order_by("-revision_id").first()
    if newest is not None and newest not in rows:
        rows.append(newest)
    deliveries: dict[int, list[dict[str, Any]]] = {row.pk: [] for row in rows}
    values = Delivery.objects.filter(rollout__in=rows).values_list(
        "rollout_id", "agent__name", "agent__pool__slug", "wave", "state", "sent_at", "answered_at", "reason"
    )
    for rollout_id, name, pool, wave, state, sent_at, answered_at, reason in values.order_by("agent__name"):
        deliveries[rollout_id].append(
            {
                "key": name, "name": name, "pool": pool, "wave": wave, "state": state, "sent_at": iso(sent_at),
                "answered_at": iso(answered_at), "reason": reason,
            }
        )  # fmt: skip
    waves: dict[int, list[dict[str, Any]]] = {row.pk: [] for row in rows}
    for one in Wave.objects.filter(rollout__in=rows).order_by("number"):
        waves[one.rollout_id].append(
            {
                "key": str(one.number), "state": one.state, "sent_at": iso(one.sent_at),
                "passed_at": iso(one.passed_at), "gates": one.readings,
            }
        )  # fmt: skip
    for row in rows:
        agents = deliveries[row.pk]
        counts = {state: sum(one["state"] == state for one in agents) for state in Delivery.State.values}
        yield (
            f"rollout:{row.revision_id}",
            {
                "at": iso(reading.now), "state": row.state, "note": row.note, "counts": counts,
                "waves": waves[row.pk], "agents": agents,
            },
        )  # fmt: skip


def tenant_state(reading: Reading, tenant: Tenant) -> State:
    """What a tenant's own people see: their contracts, their requests in the queues, and nothing of anybody else."""
    contracts = attention.listed(reading, CONTRACTS_SHOWN, tenant=tenant)
    queue = [
        {**row, "key": f"p{pool.pk}{row['key']}", "pool": pool.model.name}
        for pool in reading.pools
        for row in _queue(reading, pool, tenant.pk)
    ]
    return {
        "at": iso(reading.now),
        **_contracts_state(contracts),
        "contracts": [{**row, "detail": row["detail"].split(" · ")[0], "stage": ""} for row in contracts.rows],
        "queue": queue,
    }
