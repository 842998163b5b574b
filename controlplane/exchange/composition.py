"""One transaction of reports: what every part of the system takes from them, in one fixed order.

Rows that only one agent writes come first, rows that agents share (refusals, objectives, jobs, budget windows) last
and in key order, so their locks are held shortly and no two transactions wait for each other in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from django.conf import settings
from msgspec import Struct
from msgspec.structs import replace
from psycopg import Connection, Cursor

from controlplane.budgets import ingest as budgets
from controlplane.budgets.shares import DemandRow, forget_demand, note_demand
from controlplane.contracts.ingest import add_objectives
from controlplane.core.period import US_PER_QUARTER, from_us
from controlplane.core.reasons import Outcome
from controlplane.exchange.catalogue import catalogue
from controlplane.exchange.checking import Checked, check_records, check_rest, read_records
from controlplane.exchange.items import note_item_room, settle_items
from controlplane.exchange.messages import Incoming
from controlplane.fleet.ingest import LiveRow, note_live
from controlplane.flex.ingest import note_slots, note_trips
from controlplane.jobs import ingest as jobs
from controlplane.jobs.item_settling import JobChange
from controlplane.policy import watch
from controlplane.policy.ingest import note_revisions
from controlplane.tenants.ingest import note_key_use
from controlplane.usage import cursors, ingest
from controlplane.usage.cursors import Verdict
from controlplane.usage.ingest import SetAside
from controlplane.usage.records import Records
from controlplane.usage.validation import Bounds, Fault
from controlplane.wire.clock import ahead_us
from controlplane.wire.report import FLAG_NOT_CHARGED

_COMPLETED = Outcome.COMPLETED.code
_UNKNOWN_IDS = {Fault.UNKNOWN_TENANT, Fault.UNKNOWN_CLASS, Fault.UNKNOWN_MODEL, Fault.UNKNOWN_SLOT, Fault.UNKNOWN_RATE}
_UNKNOWN_REASONS = {fault.reason for fault in _UNKNOWN_IDS} | {"unknown_contract", "slot_minute_unknown_slot"}


class Result(Struct, frozen=True):
    """What became of a report: `through` is the last seq taken of its epoch, `set_aside` its quarantined records.

    `before` is how far its epoch was taken when it came.
    """

    verdict: Verdict
    through: int
    set_aside: int = 0
    before: int = 0


def commit_group(connection: Connection[Any], group: Sequence[Incoming], now: datetime) -> list[Result]:
    """Takes a group of reports in one transaction; (agent, epoch) pairs must differ. All or nothing."""
    with connection.transaction(), connection.cursor() as cursor:
        results = _judged(cursor, group, now)
        taken = [
            _as_it_follows(incoming, result)
            for incoming, result in zip(group, results, strict=True)
            if result.verdict is Verdict.TAKEN
        ]
        if not taken:
            return results
        set_aside = _store(cursor, taken, now)
    counts = iter(set_aside)
    return [
        Result(result.verdict, result.through, next(counts)) if result.verdict is Verdict.TAKEN else result
        for result in results
    ]


def commit_as_poisoned(connection: Connection[Any], incoming: Incoming, reason: str, now: datetime) -> Result:
    """Takes a report that the database refuses: it goes to quarantine whole, its cursor moves, nothing is lost."""
    with connection.transaction(), connection.cursor() as cursor:
        result = _judged(cursor, [incoming], now)[0]
        if result.verdict is not Verdict.TAKEN:
            return result
        incoming = _as_it_follows(incoming, result)
        envelope, records = incoming.envelope, len(incoming.rows)
        payload = {"report": incoming.as_json(), "error": reason}
        row = SetAside(envelope.agent_id, envelope.epoch, envelope.seq, "refused_by_database", payload, records)
        ingest.quarantine(cursor, [row], now)
        cursors.advance(cursor, [_step(incoming, 0)], now)
        if incoming.report.seal:
            budgets.close_epochs(cursor, [(envelope.agent_id, envelope.epoch)], now)
    return Result(Verdict.TAKEN, envelope.seq, records)


def _judged(cursor: Cursor[Any], group: Sequence[Incoming], now: datetime) -> list[Result]:
    positions = cursors.lock_positions(cursor, [(i.envelope.agent_id, i.envelope.epoch) for i in group])
    results, repeats = [], []
    for incoming in group:
        envelope = incoming.envelope
        key = (envelope.agent_id, envelope.epoch)
        position = positions.get(key)
        verdict = cursors.judge(position, envelope)
        through = position.last_seq if position is not None else 0
        results.append(Result(verdict, envelope.seq if verdict is Verdict.TAKEN else through, before=through))
        if verdict is Verdict.REPEAT:
            repeats.append(key)
        elif verdict is Verdict.CONFLICT:
            payload = {"report": incoming.as_json(), "digest": envelope.digest.hex()}
            row = SetAside(*key, envelope.seq, "conflict", payload, len(incoming.rows))
            cursors.keep_conflict(cursor, row, envelope.digest.hex(), now)
    if repeats:
        cursors.count_repeats(cursor, repeats)
    return results


def _as_it_follows(incoming: Incoming, result: Result) -> Incoming:
    """A report that comes next has no gap before it: what its agent takes for lost was taken, unheard by the agent."""
    if not incoming.envelope.lost_from or incoming.envelope.seq != result.before + 1:
        return incoming
    return replace(
        incoming,
        envelope=replace(incoming.envelope, lost_from=0),
        report=replace(incoming.report, lost=None),
    )


def _step(incoming: Incoming, records: int) -> cursors.Step:
    envelope = incoming.envelope
    follows = envelope.lost_from - 1 if envelope.lost_from else envelope.seq - 1
    seal = incoming.report.seal
    return cursors.Step(envelope.agent_id, envelope.epoch, envelope.seq, envelope.digest, records, seal, follows)


def _gaps(taken: Sequence[Incoming]) -> list[SetAside]:
    """What agents say they have lost: kept beside what was set aside, for nothing else will ever tell of it."""
    return [
        SetAside(
            incoming.envelope.agent_id,
            incoming.envelope.epoch,
            incoming.envelope.seq,
            "reports_lost",
            {"first_seq": lost.first_seq, "last_seq": incoming.envelope.seq - 1, "records": _known(lost.records)},
            max(0, lost.records),
        )
        for incoming in taken
        if (lost := incoming.report.lost) is not None
    ]


def _known(count: int) -> int | None:
    return None if count < 0 else count


def _store(cursor: Cursor[Any], taken: Sequence[Incoming], now: datetime) -> list[int]:
    """Writes everything of the taken reports; returns how many records of each were set aside."""
    checked = _check(cursor, taken, now)
    stored = np.bincount(checked.records.source, minlength=len(taken)).tolist()
    item_jobs = _number_jobs(cursor, checked.records)
    settled = settle_items(cursor, taken, checked, now)
    cursors.advance(cursor, [_step(i, n) for i, n in zip(taken, stored, strict=True)], now)
    ingest.store_records(cursor, checked.records, now)
    ingest.add_slot_usage(cursor, checked.slot_usage)
    ingest.add_slot_meters(cursor, checked.slot_meters)
    ingest.store_samples(cursor, checked.samples)
    _note_agents(cursor, taken, now)
    aside = [*checked.aside, *_gaps(taken)]
    if aside:
        ingest.quarantine(cursor, aside, now)
    ingest.add_refusals(cursor, checked.refusals)
    add_objectives(cursor, checked.objectives, now)
    counts = (count for _, count in checked.objectives)
    watch.note_counts(cursor, zip(checked.objective_agents, counts, strict=True))
    note_key_use(cursor, _key_use(checked.records), now)
    jobs.note_progress(cursor, _job_progress(checked.records, item_jobs, settled.jobs), now)
    _settle(cursor, taken, checked.records, settled.waivers, now)
    return [checked.aside_records.get(at, 0) for at in range(len(taken))]


def _check(cursor: Cursor[Any], taken: Sequence[Incoming], now: datetime) -> Checked:
    bounds = Bounds.at(taken[0].received_us, spool_age_us=settings.SPOOL_AGE_LIMIT_S * 1_000_000)
    read = read_records(taken)
    known = catalogue.known(cursor, read.revisions)
    checked = check_records(taken, read, known, bounds)
    check_rest(cursor, taken, checked, known, bounds)
    if any(row.reason in _UNKNOWN_REASONS for row in checked.aside):
        # what is unknown may have been made a moment ago
        known = catalogue.known(cursor, read.revisions, fresh=True)
        checked = check_records(taken, read, known, bounds)
        check_rest(cursor, taken, checked, known, bounds)
    return checked


def _number_jobs(cursor: Cursor[Any], records: Records) -> set[int]:
    """Writes the ids of their jobs to the records; returns those of jobs whose items are rows."""
    texts = set(records.jobs)
    texts.discard("")
    if not texts:
        return set()
    found = jobs.resolve(cursor, texts)
    tenants = records.column("tenant_id").tolist()
    for at, text in enumerate(records.jobs):
        job = found.get(text)
        # a job of another tenant is nobody's business: the record counts without it
        if job is not None and job.tenant_id == tenants[at]:
            records.job_ids[at] = job.id
    return {job.id for job in found.values() if job.has_items}


def _key_use(records: Records) -> dict[int, datetime]:
    """The newest arrival of each key's requests."""
    keys, at = np.unique(records.column("key_id"), return_inverse=True)
    newest = np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(newest, at, records.column("arrived_us"))
    return {key: from_us(us) for key, us in zip(keys.tolist(), newest.tolist(), strict=True)}


def _job_progress(records: Records, item_jobs: set[int], changes: Mapping[int, JobChange]) -> list[jobs.Progress]:
    """Progress by job: of jobs whose items are rows from what was settled, of others from their requests."""
    of_jobs = np.flatnonzero(records.job_ids).tolist()
    completed: dict[int, int] = defaultdict(int)
    failed: dict[int, int] = defaultdict(int)
    gpu: dict[int, int] = defaultdict(int)
    first: dict[int, int] = {}
    charges: dict[int, int] = defaultdict(int)
    prompts: dict[int, int] = defaultdict(int)
    outputs: dict[int, int] = defaultdict(int)
    outcomes, statuses, flags = (records.column(name) for name in ("outcome", "status", "flags"))
    charged = records.rows("charge_prompt_nanos", "charge_gpu_nanos").sum(axis=0)
    for at in of_jobs:
        job_id = int(records.job_ids[at])
        # an attempt that was put back in its queue has answered nobody: its status is 0
        ended = int(statuses[at]) != 0
        done = ended and int(outcomes[at]) == _COMPLETED
        if job_id not in item_jobs:
            completed[job_id] += done
            failed[job_id] += ended and not done
        charges[job_id] += int(charged[at])
        if not flags[at] & FLAG_NOT_CHARGED:
            # what ran twice is nobody's tokens, as it is nobody's charge; its GPU time was spent all the same
            prompts[job_id] += int(records.column("prompt_tokens")[at])
            outputs[job_id] += int(records.column("output_tokens")[at])
        gpu[job_id] += int(records.column("gpu_us")[at])
        started_us = int(records.column("arrived_us")[at] + max(0, records.column("queue_us")[at]))
        first[job_id] = min(started_us, first.get(job_id, started_us))
    nothing = JobChange()
    return [
        jobs.Progress(
            job_id=job_id,
            completed=completed[job_id] + changes.get(job_id, nothing).completed,
            failed=failed[job_id] + changes.get(job_id, nothing).failed,
            gpu_us=gpu[job_id],
            first_attempt_at=from_us(first[job_id]) if job_id in first else None,
            parked=changes.get(job_id, nothing).parked,
            cancelled=changes.get(job_id, nothing).cancelled,
            charge_nanos=charges[job_id],
            prompt_tokens=prompts[job_id],
            output_tokens=outputs[job_id],
        )
        for job_id in sorted({*first, *changes})
    ]


def _note_agents(cursor: Cursor[Any], taken: Sequence[Incoming], now: datetime) -> None:
    present = [incoming for incoming in taken if incoming.envelope.epoch == incoming.envelope.sender_epoch]
    note_live(cursor, [_live_row(incoming) for incoming in present], now)
    note_item_room(cursor, present, now)
    going_on = [i for i in present if not i.report.seal]
    note_demand(cursor, [DemandRow(i.envelope.agent_id, i.pool_id, i.report.demand) for i in going_on], now)
    forget_demand(cursor, [i.envelope.agent_id for i in present if i.report.seal])
    slots = [(i.envelope.agent_id, i.report.figures.slots) for i in present if i.report.figures is not None]
    if slots:
        note_slots(cursor, slots, now)
    trips = [(i.envelope.agent_id, i.report.trips) for i in taken if i.report.trips]
    if trips:
        note_trips(cursor, trips, now)
    revisions = [
        (i.envelope.agent_id, i.report.revision, i.report.refused_revision, i.report.refused_reason) for i in present
    ]
    if revisions:
        note_revisions(cursor, revisions, now)


def _live_row(incoming: Incoming) -> LiveRow:
    envelope, report = incoming.envelope, incoming.report
    return LiveRow(
        agent_id=envelope.agent_id,
        epoch=envelope.epoch,
        seq=envelope.seq,
        revision=report.revision,
        live_number=report.live_number,
        refused_revision=report.refused_revision,
        refused_reason=report.refused_reason,
        # An agent that does not measure it: right for a report that was sent as soon as it was cut.
        clock_offset_us=report.sent_us - incoming.received_us if report.clock is None else report.clock.offset_us,
        figures=report.figures,
    )


def _settle(
    cursor: Cursor[Any],
    taken: Sequence[Incoming],
    records: Records,
    waivers: Sequence[budgets.Waiver],
    now: datetime,
) -> None:
    reports = [
        budgets.SpendReport(i.envelope.agent_id, i.report.sent_us - ahead_us(i.report.clock), i.report.spends)
        for i in taken
        if i.report.spends
    ]
    sealed = [(i.envelope.agent_id, i.envelope.epoch) for i in taken if i.report.seal]
    overspent = budgets.settle(cursor, reports, now, sealed, waivers)
    if overspent:
        ingest.quarantine(cursor, [_overspent_aside(row, taken) for row in overspent], now)
    budgets.settle_soft(cursor, ingest.charges_by_tenant(records, US_PER_QUARTER))


def _overspent_aside(row: budgets.Overspent, taken: Sequence[Incoming]) -> SetAside:
    envelope = next(i.envelope for i in taken if i.envelope.agent_id == row.agent_id)
    payload = {"lease": row.lease_id, "amount_nanos": row.amount_nanos, "spent_nanos": row.spent_nanos}
    return SetAside(row.agent_id, envelope.epoch, envelope.seq, "lease_overspent", payload, 0)
