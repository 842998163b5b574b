"""Everything that a tick of frames needs, read once for all pools: as many statements for one pool as for many."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.urls import reverse

from controlplane.alerts.models import Event
from controlplane.alerts.queries import Mark, marks
from controlplane.audit.models import AuditEntry
from controlplane.contracts.models import WorkloadClass
from controlplane.contracts.queries import Standing
from controlplane.core.reasons import BY_CODE
from controlplane.fleet.models import Agent, Pool, Slot, SlotInterval, SlotTenure
from controlplane.flex.models import Decision, Grant, Lend
from controlplane.flex.samples import figures_of
from controlplane.flex.telemetry import week_start
from controlplane.live import contracts, deadlines, job_risks, stages
from controlplane.live.act_kinds import ACTS
from controlplane.live.engines import Point
from controlplane.live.in_force import in_force
from controlplane.live.queues import AgentWord, QueueNames
from controlplane.live.strip import WINDOW, DecisionRow, Lane, SlotNow
from controlplane.policy.models import Revision
from controlplane.policy.queries import AgentDrift, drift
from controlplane.usage.models import RefusalMinute, SlotMinute
from controlplane.usage.uncounted import Uncounted, uncounted

REFUSALS_OVER = timedelta(minutes=15)
CHANGES_OVER = timedelta(hours=24)
CHANGES_SHOWN = 12

_SAMPLES = """
SELECT pool.id, sample.at, sample.p95_queue_us, sample.admitted_per_s, sample.safe_rate_per_s, sample.slack,
       sample.telemetry_age_us, sample.whole_at, sample.figures, whole.figures
  FROM fleet_pool AS pool
 CROSS JOIN LATERAL (SELECT * FROM flex_poolsample WHERE pool_id = pool.id ORDER BY at DESC LIMIT 1) AS sample
  LEFT JOIN flex_poolsample AS whole
         ON whole.pool_id = pool.id AND whole.at = sample.whole_at AND whole.whole_at IS NULL
 WHERE pool.archived_at IS NULL
"""

_LIMITS = """
SELECT pool.id, decision.snapshot, decision.checks, decision.at
  FROM fleet_pool AS pool
 CROSS JOIN LATERAL (
       SELECT snapshot, checks, at FROM flex_decision WHERE pool_id = pool.id ORDER BY at DESC LIMIT 1) AS decision
 WHERE pool.archived_at IS NULL
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """The controller's newest second of a pool."""

    at: datetime
    p95_queue_us: int | None
    admitted_per_s: float | None
    safe_rate_per_s: float | None
    slack: float | None
    telemetry_age_us: int | None
    whole_at: datetime | None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LastDecision:
    """The newest decision row: its limits explain the seconds after it."""

    limits: Mapping[str, Any]
    checks: Sequence[Mapping[str, Any]]
    at: datetime


@dataclass(frozen=True, slots=True)
class Change:
    """One thing somebody or something changed, for the lane "what changed"."""

    key: str
    at: datetime
    kind: str
    who: str
    what: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Homes:
    """The pools whose home class is a class, or all that have none for a class that is nobody's home."""

    pools: list[Pool]
    heard: datetime | None
    """The newest report among their agents."""
    silent: bool
    """There are such pools and nobody in them was heard lately: what they do is not known."""


@dataclass
class Reading:
    """All rows of a tick, by pool where that makes sense."""

    now: datetime
    pools: list[Pool]
    words: dict[int, list[AgentWord]]
    slots: dict[int, list[SlotNow]]
    lanes: dict[int, Lane]
    decisions: dict[int, list[DecisionRow]]
    lend_checks: dict[tuple[int, int], Sequence[Mapping[str, Any]]]
    samples: dict[int, Sample]
    last_decisions: dict[int, LastDecision]
    refused: dict[int, dict[tuple[int, int], dict[str, int]]]
    names: QueueNames
    classes: dict[str, WorkloadClass]
    standings: list[Standing]
    evaluations: dict[int, contracts.Evaluation]
    nights: dict[int, deadlines.Night]
    burn: Mapping[int, list[tuple[datetime, float | None]]]
    stages: stages.Breakdowns
    drift: list[AgentDrift]
    changes: list[Change]
    revision: int | None
    uncounted: Uncounted = field(default_factory=Uncounted)
    job_risks: job_risks.JobRisks = job_risks.NONE
    lends_this_week: dict[int, int] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    engine_points: dict[str, list[Point]] = field(default_factory=dict)
    """By the slug of a pool: what the publisher told of its engines in the last minutes."""

    _homes: dict[str, Homes] = field(default_factory=dict)

    def homes(self, class_slug: str) -> Homes:
        """Looked for once for each class: of thousands of contracts many share one."""
        if class_slug not in self._homes:
            own = [pool for pool in self.pools if class_slug in (pool.interactive_class, pool.batch_class)]
            pools = own or [pool for pool in self.pools if not (pool.interactive_class or pool.batch_class)]
            words = [word for pool in pools for word in self.words.get(pool.pk, [])]
            heard = max((word.reported_at for word in words if word.reported_at), default=None)
            silent = bool(pools) and not any(word.fresh(self.now) for word in words)
            self._homes[class_slug] = Homes(pools, heard, silent)
        return self._homes[class_slug]

    def class_ids(self, pool: Pool, kind: str = "interactive") -> list[int]:
        """Classes of a kind whose requests this pool serves: its home class, or all of the kind without one."""
        home = pool.interactive_class if kind == "interactive" else pool.batch_class
        rows = [row for row in self.classes.values() if row.kind == kind]
        return [row.pk for row in rows if row.slug == home or not home]


@dataclass(slots=True)
class SlowParts:
    """What is read every few ticks only: judged contracts, breakdown, drift, meters and the lane of changes."""

    at: datetime
    standings: list[Standing]
    evaluations: dict[int, contracts.Evaluation]
    nights: dict[int, deadlines.Night]
    burn: Mapping[int, list[tuple[datetime, float | None]]]
    stages: stages.Breakdowns
    drift: list[AgentDrift]
    changes: list[Change]
    observed: dict[int, frozenset[datetime]]
    lends_this_week: dict[int, int]
    uncounted: Uncounted
    job_risks: job_risks.JobRisks


def read_slow(now: datetime) -> SlowParts:
    """The parts that change by the minute."""
    rows = in_force(now)
    evaluations = contracts.evaluate(rows, now, with_causes=False)
    versions = [evaluation.version for evaluation in contracts.watched(evaluations.values())]
    return SlowParts(
        at=now,
        standings=rows,
        evaluations=evaluations,
        nights=deadlines.evaluate(rows, now),
        burn=contracts.burn_series(versions, now) if versions else {},
        stages=stages.read(now),
        drift=drift(now),
        changes=_changes(now),
        observed=_observed(now),
        lends_this_week=_lends_this_week(now),
        uncounted=uncounted(now),
        job_risks=job_risks.read(Pool.objects.filter(archived_at=None), now),
    )


def read(now: datetime, slow: SlowParts | None = None, *, with_lanes: bool = True) -> Reading:
    """One tick of everything; `slow` parts of an earlier tick may be given. Only pools' own pages show lanes."""
    slow = read_slow(now) if slow is None else slow
    pools = list(Pool.objects.filter(archived_at=None).select_related("model").order_by("slug"))
    classes = {row.slug: row for row in WorkloadClass.objects.exclude(state=WorkloadClass.State.ARCHIVED)}
    agents = _agents()
    slots = _slots()
    refused = _refused(now)
    return Reading(
        now=now,
        pools=pools,
        words=_words(agents, slots),
        slots=_by_pool(slots),
        lanes=_lanes(now, slow.observed) if with_lanes else {},
        decisions=_decisions(now),
        lend_checks=_lend_checks(),
        samples=_samples(),
        last_decisions=_last_decisions(),
        refused=refused,
        names=QueueNames({row.pk: (row.slug, row.kind) for row in classes.values()}, _slugs_of_queued(agents, refused)),
        classes=classes,
        standings=slow.standings,
        evaluations=slow.evaluations,
        nights=slow.nights,
        burn=slow.burn,
        stages=slow.stages,
        drift=slow.drift,
        changes=slow.changes,
        revision=Revision.objects.order_by("-number").values_list("number", flat=True).first(),
        lends_this_week=slow.lends_this_week,
        uncounted=slow.uncounted,
        job_risks=slow.job_risks,
        marks=marks(now),
    )


def _agents() -> list[Agent]:
    rows = Agent.objects.filter(state=Agent.State.ACTIVE).select_related("live").order_by("name")
    return list(rows.only("name", "pool_id", "live__reported_at", "live__figures", "live__revision"))


def _slugs_of_queued(
    agents: Sequence[Agent], refused: Mapping[int, Mapping[tuple[int, int], object]]
) -> dict[int, str]:
    """Of the tenants that have a row in a queue: a few hundred of ten thousand."""
    ids = {tenant_id for rows in refused.values() for _, tenant_id in rows}
    for agent in agents:
        live = getattr(agent, "live", None)
        if live is not None:
            ids.update(row["tenant_id"] for row in live.figures.get("tenants", ()))
    with connection.cursor() as cursor:
        cursor.execute("SELECT id, slug FROM tenants_tenant WHERE id = ANY(%s)", [sorted(ids)])
        return dict(cursor.fetchall())


_Slots = list[tuple[int, SlotNow]]


def _slots() -> _Slots:
    rows = Slot.objects.filter(removed_at=None, pool__archived_at=None).order_by("name")
    columns = rows.values_list("pk", "pool_id", "name", "band", "agent_id", "agent__name")
    grants = {grant.slot_id: grant for grant in Grant.objects.all()}
    spans = SlotInterval.objects.filter(ended_at=None).values_list("slot_id", "state", "started_at")
    open_now = {slot_id: (state, since) for slot_id, state, since in spans}
    found = []
    for pk, pool_id, name, band, agent_id, agent_name in columns:
        grant, span = grants.get(pk), open_now.get(pk)
        found.append((pool_id, _slot(pk, name, band, agent_id, agent_name or "", grant=grant, span=span)))
    return found


def _slot(
    slot_id: int,
    name: str,
    band: str,
    agent_id: int | None,
    agent_name: str,
    *,
    grant: Grant | None,
    span: tuple[str, datetime] | None,
) -> SlotNow:
    kept, since = span or ("home", None)
    flex = band == Slot.Band.FLEX or (grant is not None and grant.state not in ("home", "lost"))
    state = grant.state if flex and grant is not None and kept != "lost" else kept
    return SlotNow(
        slot_id=slot_id,
        name=name,
        band=band,
        agent_id=agent_id,
        state=state,
        since=since,
        recalled_at=None if grant is None else grant.recalled_at,
        lent_at=None if grant is None else grant.lent_at,
        expires_at=None if grant is None else grant.expires_at,
        reason="" if grant is None else grant.reason,
        fence=0 if grant is None else grant.fence,
        agent_name=agent_name,
    )


def _by_pool(slots: _Slots) -> dict[int, list[SlotNow]]:
    found: dict[int, list[SlotNow]] = defaultdict(list)
    for pool_id, slot in slots:
        found[pool_id].append(slot)
    return dict(found)


def _words(agents: Sequence[Agent], slots: _Slots) -> dict[int, list[AgentWord]]:
    own: dict[int | None, list[int]] = defaultdict(list)
    for _, slot in slots:
        own[slot.agent_id].append(slot.slot_id)
    found: dict[int, list[AgentWord]] = defaultdict(list)
    for agent in agents:
        live = getattr(agent, "live", None)
        found[agent.pool_id].append(
            AgentWord(
                agent_id=agent.pk,
                name=agent.name,
                pool_id=agent.pool_id,
                reported_at=None if live is None else live.reported_at,
                figures={} if live is None else live.figures,
                revision=0 if live is None else live.revision,
                slots=tuple(own.get(agent.pk, ())),
            )
        )
    return dict(found)


def _lanes(now: datetime, observed: Mapping[int, frozenset[datetime]]) -> dict[int, Lane]:
    start = now - WINDOW
    history: dict[int, list[tuple[str, datetime, datetime | None]]] = defaultdict(list)
    rows = SlotInterval.objects.exclude(ended_at__lte=start).order_by("slot_id", "started_at")
    for slot_id, state, begins, ends in rows.values_list("slot_id", "state", "started_at", "ended_at"):
        history[slot_id].append((state, begins, ends))
    tenures = dict(SlotTenure.objects.filter(ended_at=None).values_list("slot_id", "started_at"))
    return {
        slot_id: Lane(tuple(history.get(slot_id, ())), tenures.get(slot_id), observed.get(slot_id, frozenset()))
        for slot_id in {*history, *tenures}
    }


def _observed(now: datetime) -> dict[int, frozenset[datetime]]:
    """Minutes of the last hour in which a slot's meter covered at least half."""
    found: dict[int, set[datetime]] = defaultdict(set)
    rows = SlotMinute.objects.filter(minute__gte=now - WINDOW - timedelta(minutes=1), observed_us__gte=30_000_000)
    for slot_id, minute in rows.values_list("slot_id", "minute"):
        found[slot_id].add(minute)
    return {slot_id: frozenset(minutes) for slot_id, minutes in found.items()}


def _decisions(now: datetime) -> dict[int, list[DecisionRow]]:
    found: dict[int, list[DecisionRow]] = defaultdict(list)
    rows = Decision.objects.filter(at__gte=now - WINDOW).exclude(actions=[]).order_by("at")
    for decision_id, pool_id, at, checks, actions in rows.values_list("id", "pool_id", "at", "checks", "actions"):
        if any(action["kind"] != "renew" for action in actions):
            found[pool_id].append(DecisionRow(decision_id, at, checks, actions))
    return dict(found)


def _lend_checks() -> dict[tuple[int, int], Sequence[Mapping[str, Any]]]:
    """(slot, fence) -> the checks of the decision that made a loan which has not come home."""
    rows = Lend.objects.filter(home_at=None).values_list("slot_id", "fence", "lend_decision__checks")
    return {(slot_id, fence): checks for slot_id, fence, checks in rows}


def _samples() -> dict[int, Sample]:
    with connection.cursor() as cursor:
        cursor.execute(_SAMPLES)
        found = {}
        for pool_id, *columns, figures, whole in cursor.fetchall():
            sample = Sample(*columns)
            found[pool_id] = replace(sample, figures=figures_of(sample, figures, whole))
        return found


def _last_decisions() -> dict[int, LastDecision]:
    with connection.cursor() as cursor:
        cursor.execute(_LIMITS)
        return {
            pool_id: LastDecision(_json(limits), _json(checks), at) for pool_id, limits, checks, at in cursor.fetchall()
        }


def _json(value: Any) -> Any:
    # Django switches psycopg's JSON loader off for raw cursors, so jsonb arrives as text there.
    return json.loads(value) if isinstance(value, (str, bytes)) else value


def _refused(now: datetime) -> dict[int, dict[tuple[int, int], dict[str, int]]]:
    found: dict[int, dict[tuple[int, int], dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    rows = RefusalMinute.objects.filter(minute__gte=now - REFUSALS_OVER)
    for pool_id, class_id, tenant_id, code, count in rows.values_list(
        "pool_id", "class_id", "tenant_id", "reason", "count"
    ):
        counts = found[pool_id][class_id, tenant_id]
        reason = str(BY_CODE.get(code, f"reason {code}"))
        counts[reason] = counts.get(reason, 0) + count
    return {pool_id: dict(rows) for pool_id, rows in found.items()}


def _lends_this_week(now: datetime) -> dict[int, int]:
    """Loans begun since Monday 00:00 in the billing zone, by pool."""
    found: dict[int, int] = defaultdict(int)
    for pool_id in Lend.objects.filter(lent_at__gte=week_start(now)).values_list("pool_id", flat=True):
        found[pool_id] += 1
    return dict(found)


_NOUNS = {
    "revision": "revision", "rollout": "revision", "policy": "revision", "api_key": "key", "key": "key",
    "tenant": "tenant", "class": "class", "contract": "contract", "pool": "pool", "agent": "agent", "slot": "slot",
    "budget": "budget", "grant": "loan",
}  # fmt: skip


def _changes(now: datetime) -> list[Change]:
    """The newest changes by people, events posted from outside, loans and recalls by the controller, newest first."""
    since = now - CHANGES_OVER
    audit = (
        AuditEntry.objects.filter(at__gte=since).exclude(noun__in=("session", "event")).order_by("-id")[:CHANGES_SHOWN]
    )
    rows = [
        Change(
            f"a{e.pk}",
            e.at,
            _NOUNS.get(e.noun, e.noun),
            e.actor_name,
            _audit_words(e),
            reverse("act", args=[e.pk]) if e.action in ACTS else "",
        )
        for e in audit
    ]
    for lend in (
        Lend.objects.filter(lent_at__gte=since).select_related("slot", "pool").order_by("-lent_at")[:CHANGES_SHOWN]
    ):
        rows.append(
            Change(f"l{lend.pk}", lend.lent_at, "loan", "controller", f"lent {lend.slot.name} in {lend.pool.slug}")
        )
        if lend.recalled_at is not None:
            what = f"recalled {lend.slot.name} in {lend.pool.slug}: {lend.recall_reason}"
            rows.append(Change(f"r{lend.pk}", lend.recalled_at, "loan", "controller", what))
    for event in Event.objects.filter(at__gte=since).order_by("-at")[:CHANGES_SHOWN]:
        what = event.title + (f", pool {event.pool}" if event.pool else "")
        rows.append(Change(f"e{event.pk}", event.at, event.kind, event.created_by, what))
    return sorted(rows, key=lambda row: row.at, reverse=True)[:CHANGES_SHOWN]


def _audit_words(entry: AuditEntry) -> str:
    """`flex recall f1 in chat-70b`: by name where the entry has one, by number where it has not."""
    said = entry.before or entry.after or {}
    name = said.get("slot") or said.get("agent") or entry.object_id
    where = f" in {said['pool']}" if "slot" in said and said.get("pool") else ""
    return f"{entry.action.replace('.', ' ').replace('_', ' ')} {name}{where}".strip()
