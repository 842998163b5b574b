"""What came of an act of on-call: what was expected when it was done, beside what was measured since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.audit.models import AuditEntry
from controlplane.fleet.models import Agent, AgentLive, Pool, Slot
from controlplane.flex.models import Grant, Lend, PoolSample
from controlplane.live import effects
from controlplane.live.attention import link
from controlplane.tenants.models import Tenant
from controlplane.web.numerals import DASH, duration, fixed

#: Slack and load follow an act with the next reports: they are read from the first sample after so much time.
MEASURED_AFTER: Final = timedelta(seconds=30)
#: After so much time nothing more is waited for.
MEASURED_WITHIN: Final = timedelta(minutes=3)


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was expected, and what came: in words, with its instant where it has one."""

    label: str
    expected: str
    measured: str
    at: datetime | None = None
    grade: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """An act with its lines; `open` while more is to be measured. `back` leads to what it was done to."""

    entry: AuditEntry
    title: str
    lines: tuple[Line, ...]
    open: bool
    back: str
    back_label: str
    note: str = ""


def story(entry: AuditEntry, now: datetime) -> Story | None:
    """What came of an audit entry; None for one that is no act of on-call, or whose object is gone."""
    tell = _TELLERS.get(entry.action)
    return None if tell is None else tell(entry, now)


def _noted(entry: AuditEntry) -> Mapping[str, Any]:
    return entry.after or {}


def _since(at: datetime | None, begin: datetime) -> str:
    return DASH if at is None else f"after {_span(at, begin)}"


def _span(at: datetime, begin: datetime) -> str:
    return duration(max(0, round((at - begin).total_seconds() * 1_000_000))) if at > begin else "0 s"


def _within(us: int | None) -> str:
    return f"within {duration(us)}" if us else DASH


# ---- the flex band ----


def _recall(entry: AuditEntry, now: datetime) -> Story | None:
    slot = Slot.objects.select_related("pool").filter(pk=int(entry.object_id)).first()
    if slot is None:
        return None
    noted = _noted(entry)
    loan = Lend.objects.filter(slot=slot, fence=noted.get("fence") or 0).first()
    bound_us = noted.get("bound_us")
    recalled_at = None if loan is None else loan.recalled_at
    home_at = None if loan is None else loan.home_at
    late = loan is not None and loan.overdue
    usual = noted.get("home_expected_us")
    return Story(
        entry=entry,
        title=f"Recall of {slot.name}",
        lines=(
            Line("Recalled by the controller", "within 1 s", _since(recalled_at, entry.at), recalled_at),
            Line("Stopped taking batch, by the agent's clock", "within 2 s", "", loan.stop_admit_at if loan else None),
            Line("Last token, by the agent's clock", DASH, "", loan.last_token_at if loan else None),
            Line("Drained", _within(bound_us) + (f", usually {duration(usual)}" if usual else ""),
                 duration(loan.drain_us) if loan is not None and loan.drain_us is not None else DASH,
                 loan.drained_at if loan else None, "bad" if late else ""),
            Line("Known to be home", _within(bound_us), _since(home_at, entry.at), home_at, "bad" if late else ""),
            _slack(slot.pool, entry, now),
        ),
        open=_open(entry, now) or (home_at is None and loan is not None and now - entry.at < timedelta(hours=1)),
        back=link("pool", slot.pool.slug),
        back_label=slot.pool.slug,
        note=_another_reason(loan),
    )  # fmt: skip


def _another_reason(loan: Lend | None) -> str:
    if loan is None:
        return "The loan it was meant for is not in the ledger: the slot came home before the controller looked."
    if loan.recalled_at is not None and loan.recall_reason != "manual":
        return f"It came home for another reason first: {loan.recall_reason}."
    return "It was past its drain bound: what it ran could not be cancelled or did not obey." if loan.overdue else ""


def _freeze(entry: AuditEntry, now: datetime) -> Story | None:
    pool = Pool.objects.filter(slug=entry.object_id).first()
    if pool is None:
        return None
    begun = Lend.objects.filter(pool=pool, lent_at__gt=entry.at, lent_at__lte=_end_of_freeze(pool, entry, now)).count()
    lent = Grant.objects.filter(slot__pool=pool, state="lent").count()
    asked = AuditEntry.objects.filter(
        action="flex.recall", at=entry.at, object_id__in=_slot_ids(pool), actor_id=entry.actor_id
    )
    recalls = [f"{(row.before or {}).get('slot')}" for row in asked]
    expected = "0" if recalls else fixed(_noted(entry).get("lent"))
    return Story(
        entry=entry,
        title=f"Freeze of lending in {pool.slug}",
        lines=(
            Line("Loans begun while frozen", "0", fixed(begun), None, "bad" if begun else ""),
            Line("Slots lent now", expected, fixed(lent)),
            *(Line("Recalled with it", ", ".join(recalls), _homes(pool, entry)) for _ in range(bool(recalls))),
            _slack(pool, entry, now, key="slack_expected_recalled" if recalls else "slack_expected"),
        ),
        open=_open(entry, now),
        back=link("pool", pool.slug),
        back_label=pool.slug,
    )


def _slot_ids(pool: Pool) -> list[str]:
    return [str(pk) for pk in Slot.objects.filter(pool=pool).values_list("pk", flat=True)]


def _end_of_freeze(pool: Pool, entry: AuditEntry, now: datetime) -> datetime:
    """When the freeze of an entry ended: by hand, by another one, by time; now while it holds."""
    later = AuditEntry.objects.filter(
        noun="pool", object_id=pool.slug, pk__gt=entry.pk, action__in=("flex.unfreeze", "flex.freeze_ended")
    )
    return later.order_by("id").values_list("at", flat=True).first() or now


def _homes(pool: Pool, entry: AuditEntry) -> str:
    """How long the slots that were recalled with it took home."""
    loans = Lend.objects.filter(pool=pool, recalled_at__gte=entry.at, recalled_at__lte=entry.at + MEASURED_WITHIN)
    took = [_span(loan.home_at, entry.at) for loan in loans.order_by("home_at") if loan.home_at is not None]
    return f"home after {', '.join(took)}" if took else "on their way"


def _unfreeze(entry: AuditEntry, now: datetime) -> Story | None:
    pool = Pool.objects.filter(slug=entry.object_id).first()
    if pool is None:
        return None
    first = Lend.objects.filter(pool=pool, lent_at__gt=entry.at).select_related("slot").order_by("lent_at").first()
    said = DASH if first is None else f"{first.slot.name}, {_since(first.lent_at, entry.at)}"
    return Story(
        entry=entry,
        title=f"Lending allowed in {pool.slug}",
        lines=(
            Line("First loan since", "when every check holds", said, first.lent_at if first else None),
            _slack(pool, entry, now),
        ),
        open=_open(entry, now),
        back=link("pool", pool.slug),
        back_label=pool.slug,
    )


# ---- agents and tenants ----


def _drain(entry: AuditEntry, now: datetime) -> Story | None:
    agent = Agent.objects.select_related("pool").filter(pk=int(entry.object_id)).first()
    if agent is None:
        return None
    noted, present = _noted(entry), effects.present_on(agent, now)
    live = AgentLive.objects.filter(agent=agent).first()
    told = live is not None and live.reported_at > entry.at
    draining = entry.action == "agent.drain"
    counts = (
        Line("Requests that run on it", f"from {fixed(noted.get('running'))} to 0", fixed(present.running)),
        Line("Requests that wait on it", f"from {fixed(noted.get('waiting'))} to 0", fixed(present.waiting)),
    )
    return Story(
        entry=entry,
        title=f"{'Drain of' if draining else 'Serving again:'} {agent.name}",
        lines=(
            Line("Told to the agent", "with its next report", "yes" if told else "not yet",
                 live.reported_at if told and live else None),
            *(counts if draining else ()),
            _load(agent.pool, entry, now),
            _slack(agent.pool, entry, now),
        ),
        open=_open(entry, now) or (draining and bool(present.running or present.waiting) and _newest(entry)),
        back=link("agent", agent.pk),
        back_label=agent.name,
        note="" if present.heard else "It has not reported for 10 s: what it runs is not known.",
    )  # fmt: skip


def _newest(entry: AuditEntry) -> bool:
    """Nothing was done to the same object since."""
    return not AuditEntry.objects.filter(noun=entry.noun, object_id=entry.object_id, pk__gt=entry.pk).exists()


def _suspend(entry: AuditEntry, now: datetime) -> Story | None:
    tenant = Tenant.objects.filter(slug=entry.object_id).first()
    if tenant is None:
        return None
    noted, present = _noted(entry), effects.present_of(tenant, now)
    suspended = entry.action == "tenant.suspend"
    refused = effects.refused_as_suspended(tenant, entry.at, now)
    rows = (
        Line("Requests that run", f"from {fixed(noted.get('running'))} to 0", fixed(present.running)),
        Line("Requests that wait", f"from {fixed(noted.get('waiting'))} to 0", fixed(present.waiting)),
        Line("Refused since, by minute of arrival", _rate(noted.get("arrivals_per_s")), fixed(refused)),
    )
    resumed = (
        Line("Requests that run", DASH, fixed(present.running)),
        Line("Arriving, requests/s over 5 min", DASH, fixed(present.arrivals_per_s, 1)),
    )
    return Story(
        entry=entry,
        title=f"{'Suspension' if suspended else 'Resumption'} of {tenant.slug}",
        lines=(_in_force(tenant, entry, now), *(rows if suspended else resumed)),
        open=_open(entry, now),
        back=link("tenant", tenant.slug),
        back_label=tenant.slug,
    )


def _rate(arrivals_per_s: float | None) -> str:
    return DASH if arrivals_per_s is None else f"about {fixed(arrivals_per_s * 60)} a minute"


def _in_force(tenant: Tenant, entry: AuditEntry, now: datetime) -> Line:
    """On how many agents the live list has it; the list's number only grows, so a later change counts as this one."""
    live = AgentLive.objects.filter(agent__state=Agent.State.ACTIVE)
    agents = Agent.objects.filter(state=Agent.State.ACTIVE).count()
    has = live.filter(live_number__gte=tenant.live_number).count()
    late = now - entry.at > timedelta(seconds=15) and has < agents
    return Line(
        "Agents that have it", f"all {agents:,} within 2 s", f"{has:,} of {agents:,}", None, "risk" if late else ""
    )


# ---- what the controller measured ----


def _open(entry: AuditEntry, now: datetime) -> bool:
    return now - entry.at < MEASURED_WITHIN and _sample_due(entry, now)


def _sample_due(entry: AuditEntry, now: datetime) -> bool:
    return now - entry.at < MEASURED_AFTER + timedelta(seconds=5)


def _sample(pool: Pool, entry: AuditEntry) -> PoolSample | None:
    return (
        PoolSample.objects.filter(
            pool=pool, at__gte=entry.at + MEASURED_AFTER, at__lte=entry.at + MEASURED_WITHIN
        ).order_by("at").first()
    )  # fmt: skip


def _slack(pool: Pool, entry: AuditEntry, now: datetime, *, key: str = "slack_expected") -> Line:
    noted, sample = _noted(entry), _sample(pool, entry)
    expected = f"from {fixed(noted.get('slack_before'), 3)} to {fixed(noted.get(key), 3)}" if key in noted else DASH
    return Line("Batch slack of the pool", expected, _measured(None if sample is None else sample.slack, 3, entry, now),
                sample.at if sample else None)  # fmt: skip


def _load(pool: Pool, entry: AuditEntry, now: datetime) -> Line:
    noted, sample = _noted(entry), _sample(pool, entry)
    known = sample is not None and sample.admitted_per_s is not None and sample.safe_rate_per_s
    load = sample.admitted_per_s / sample.safe_rate_per_s if known else None  # type: ignore[union-attr,operator]
    expected = f"from {fixed(noted.get('load_before'), 2)} to {fixed(noted.get('load_expected'), 2)}"
    return Line("Interactive load", expected, _measured(load, 2, entry, now), sample.at if sample else None)


def _measured(value: float | None, places: int, entry: AuditEntry, now: datetime) -> str:
    if value is not None:
        return fixed(value, places)
    left = (entry.at + MEASURED_AFTER - now).total_seconds()
    return f"in {left:.0f} s" if left > 0 else DASH


_TELLERS: Final[dict[str, Callable[[AuditEntry, datetime], Story | None]]] = {
    "flex.recall": _recall,
    "flex.freeze": _freeze,
    "flex.unfreeze": _unfreeze,
    "agent.drain": _drain,
    "agent.undrain": _drain,
    "tenant.suspend": _suspend,
    "tenant.resume": _suspend,
}
