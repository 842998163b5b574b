"""Reading pools, slots and agents as the pages and the REST interface show them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Count, Q, QuerySet
from django.http import Http404

from controlplane.fleet.desired import desired_revisions
from controlplane.fleet.models import Agent, AgentLive, EnrolmentToken, Pool, Slot, SlotInterval

# A report is due every one to two seconds: after this the last one says nothing about now.
SILENT_AFTER = timedelta(seconds=10)
CLOCK_OFF_US = 1_000_000
BANDS = (Slot.Band.INTERACTIVE, Slot.Band.BATCH, Slot.Band.FLEX)


def pools(*, archived: bool = False) -> QuerySet[Pool]:
    return Pool.objects.filter(archived_at__isnull=not archived).select_related("model")


def pool_for(slug: str) -> Pool:
    """A pool in use by its short name, else Http404."""
    pool = pools().filter(slug=slug).first()
    if pool is None:
        raise Http404("There is no such pool.")
    return pool


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool in the list. `bands` counts slots; `silent` counts active agents whose last report is too old."""

    pool: Pool
    bands: Counter[str]
    agents: int
    silent: int
    pending: int
    problem: tuple[str, str, str]

    @property
    def grade(self) -> str:
        return self.problem[0]

    @property
    def word(self) -> str:
        return self.problem[1]

    @property
    def note(self) -> str:
        return self.problem[2]

    @property
    def interactive(self) -> int:
        return self.bands[Slot.Band.INTERACTIVE]

    @property
    def batch(self) -> int:
        return self.bands[Slot.Band.BATCH]

    @property
    def flex(self) -> int:
        return self.bands[Slot.Band.FLEX]


_ORDER = ("bad", "risk", "unknown", "neutral", "ok")
POOL_SORTS: dict[str, Callable[[PoolRow], tuple[Any, ...]]] = {
    "attention": lambda row: (_ORDER.index(row.grade), row.pool.slug),
    "name": lambda row: (row.pool.slug,),
    "newest": lambda row: (-row.pool.created_at.timestamp(), row.pool.slug),
}


def pool_rows(now: datetime, *, text: str = "", archived: bool = False, sort: str = "attention") -> list[PoolRow]:
    """Every pool in use, or every archived one, that holds the text, by `sort` (of POOL_SORTS); three statements
    whatever their number.
    """
    found = pools(archived=archived)
    if text:
        found = found.filter(
            Q(slug__icontains=text) | Q(name__icontains=text) | Q(model__name__icontains=text)
            | Q(interactive_class__icontains=text) | Q(batch_class__icontains=text)
        )  # fmt: skip
    bands: dict[int, Counter[str]] = {}
    counted = Slot.objects.filter(removed_at__isnull=True).values_list("pool_id", "band").annotate(n=Count("id"))
    for pool_id, band, count in counted:
        bands.setdefault(pool_id, Counter())[band] = count
    fresh = Q(state="active", live__reported_at__gt=now - SILENT_AFTER)
    agents = {
        row["pool_id"]: row
        for row in Agent.objects.exclude(state="retired")
        .values("pool_id")
        .annotate(
            active=Count("id", filter=Q(state="active")),
            fresh=Count("id", filter=fresh),
            pending=Count("id", filter=Q(state="pending")),
        )
    }
    rows = []
    for pool in found.order_by("slug"):
        counts = agents.get(pool.pk, {"active": 0, "fresh": 0, "pending": 0})
        mine = bands.get(pool.pk, Counter())
        silent = counts["active"] - counts["fresh"]
        problem = _problem_of(pool, mine, counts["active"], silent, now)
        rows.append(PoolRow(pool, mine, counts["active"], silent, counts["pending"], problem))
    return sorted(rows, key=POOL_SORTS[sort])


def _problem_of(pool: Pool, bands: Counter[str], active: int, silent: int, now: datetime) -> tuple[str, str, str]:
    if pool.archived_at is not None:
        return "neutral", "Archived", f"Since {pool.archived_at:%Y-%m-%d}"
    if not bands.total():
        return "neutral", "No slots", "Add slots to it before you push."
    if not active:
        return "neutral", "No agents", "Enrol an agent that runs its slots."
    if silent == active:
        return "unknown", "Silent", f"None of {active} agents reports."
    if silent:
        return "unknown", "Partly silent", f"{silent} of {active} agents do not report."
    if pool.frozen_since is not None and (pool.frozen_until is None or pool.frozen_until > now):
        return "risk", "Lending frozen", f"By {pool.frozen_by}: {pool.freeze_reason}"
    if bands[Slot.Band.FLEX] and pool.isolation == Pool.Isolation.RESERVED:
        if not (pool.safe_rate or {}).get("entries"):
            return "risk", "No safe rate", "Its flex slots are never lent until the safe rate is tested."
        until = safe_rate_until(pool)
        if until is not None and until <= now:
            return "risk", "Safe rate expired", f"Since {until:%Y-%m-%d}; nothing is lent."
    return "ok", "Reporting", ""


def safe_rate_until(pool: Pool) -> datetime | None:
    """When the pool's tested safe rate ends to be valid; None without an end."""
    try:
        until = datetime.fromisoformat(str((pool.safe_rate or {}).get("valid_until") or ""))
    except ValueError:
        return None
    return until if until.tzinfo else until.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot with its present interval (None: it has no tenure now)."""

    slot: Slot
    interval: SlotInterval | None

    @property
    def state(self) -> str:
        return self.interval.state if self.interval else ""

    @property
    def gpus(self) -> float:
        return self.slot.gpu_share_ppm / 1_000_000

    @property
    def cell(self) -> str:
        """The name of the slot cell that shows it."""
        if self.interval is None or self.interval.state == "lost":
            return "unobserved"
        if self.interval.state in ("lent", "draining", "overdue"):
            return self.interval.state
        if self.interval.state == "cancelling":
            return "draining"
        return "batch" if self.slot.band == Slot.Band.BATCH else "interactive"


def slot_rows(*, pool: Pool | None = None, agent: Agent | None = None) -> list[SlotRow]:
    """Slots in the fleet of a pool or an agent, by band and name; two statements."""
    slots = Slot.objects.filter(removed_at__isnull=True).select_related("agent", "pool")
    if pool is not None:
        slots = slots.filter(pool=pool)
    if agent is not None:
        slots = slots.filter(agent=agent)
    present = {
        row.slot_id: row for row in SlotInterval.objects.filter(slot__in=slots, ended_at__isnull=True)
    }  # fmt: skip
    found = [SlotRow(slot, present.get(slot.pk)) for slot in slots]
    return sorted(found, key=lambda row: (BANDS.index(Slot.Band(row.slot.band)), row.slot.name))


def agents(*, retired: bool = False) -> QuerySet[Agent]:
    rows = Agent.objects.select_related("pool", "live")
    return rows.filter(state="retired") if retired else rows.exclude(state="retired")


def agent_for(agent_id: int) -> Agent:
    """An agent, retired ones too, else Http404."""
    agent = Agent.objects.select_related("pool", "live").filter(pk=agent_id).first()
    if agent is None:
        raise Http404("There is no such agent.")
    return agent


@dataclass(frozen=True, slots=True)
class AgentRow:
    """An agent with what it last said. `reported_at` None: it never did. `desired` None: nothing was pushed to it."""

    agent: Agent
    slots: list[str] = field(default_factory=list)
    reported_at: datetime | None = None
    applied: int | None = None
    desired: int | None = None
    refused: str = ""
    grade: str = "unknown"
    word: str = "Unknown"


def agent_rows(rows: Sequence[Agent], now: datetime) -> list[AgentRow]:
    """The agents in the given order, with slots and desired revision in two statements more."""
    ids = [agent.pk for agent in rows]
    desired = desired_revisions(ids) if ids else {}
    slots: dict[int, list[str]] = {}
    for agent_id, name in Slot.objects.filter(agent__in=ids).order_by("name").values_list("agent_id", "name"):
        slots.setdefault(agent_id, []).append(name)
    return [_agent_row(agent, slots.get(agent.pk, []), desired.get(agent.pk), now) for agent in rows]


def attention_first(rows: Sequence[AgentRow]) -> list[AgentRow]:
    return sorted(rows, key=lambda row: (_ORDER.index(row.grade), row.agent.pool.slug, row.agent.name))


def _agent_row(agent: Agent, slots: list[str], desired: int | None, now: datetime) -> AgentRow:
    live = getattr(agent, "live", None)
    grade, word = _agent_state(agent, live.reported_at if live else None, now)
    applied = live.revision if live else None
    if grade == "ok" and desired is not None and applied != desired:
        grade, word = ("bad", "Refused policy") if live and live.refused_revision == desired else ("risk", "Behind")
    return AgentRow(
        agent=agent,
        slots=slots,
        reported_at=live.reported_at if live else None,
        applied=applied,
        desired=desired,
        refused=live.refused if live and live.refused_revision == desired else "",
        grade=grade,
        word=word,
    )


def _agent_state(agent: Agent, reported_at: datetime | None, now: datetime) -> tuple[str, str]:
    if agent.state == Agent.State.RETIRED:
        return "neutral", "Retired"
    if agent.state == Agent.State.PENDING:
        return "risk", "Waits for approval"
    if reported_at is None:
        return "unknown", "Never reported"
    # a time in the future says as little about now as an old one
    if not timedelta(seconds=-2) <= now - reported_at <= SILENT_AFTER:
        return "unknown", "Silent"
    return ("neutral", "Draining") if agent.drain_requested_at else ("ok", "Reporting")


def open_tokens(now: datetime) -> list[EnrolmentToken]:
    """Tokens that can still be used, newest first."""
    rows = EnrolmentToken.objects.filter(used_at__isnull=True, expires_at__gt=now)
    return list(rows.select_related("pool").order_by("-id")[:50])


def free_slots(pool: Pool) -> int:
    """Slots of a pool that no agent runs: how many a new agent may take."""
    return Slot.objects.filter(pool=pool, agent__isnull=True, removed_at__isnull=True).count()


def clock_is_off(live: AgentLive | None) -> bool:
    """Whether an agent's clock is known to be wrong by more than what is warned of."""
    return live is not None and live.clock_offset_us is not None and abs(live.clock_offset_us) > CLOCK_OFF_US
