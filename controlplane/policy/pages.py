"""What the policy pages show, as plain values: a revision's row, a review, a rollout with its agents."""

from dataclasses import asdict, dataclass
from datetime import datetime

from controlplane.contracts.queries import rest_of_ttft_ms
from controlplane.fleet.models import Agent
from controlplane.policy.actions import OPEN_ROLLOUTS, plan_of
from controlplane.policy.compile import load_source
from controlplane.policy.diff import Change, Group, groups, tally
from controlplane.policy.drafts import compared
from controlplane.policy.models import Delivery, Revision, Rollout, Wave
from controlplane.policy.queries import (
    SILENT_AFTER,
    AgentDrift,
    Progress,
    latest_revision,
    progress,
    rollouts_by_revision,
)
from controlplane.policy.validation import Facts, Finding, Rule, Severity, validate
from controlplane.policy.wave_facts import verdict_of
from controlplane.policy.wave_plan import Gates, WavePlan, gates_of

ROLLOUT_CHIPS = {
    Rollout.State.REQUESTED: ("neutral", "Requested"),
    Rollout.State.RUNNING: ("neutral", "Running"),
    Rollout.State.DONE: ("ok", "Done"),
    Rollout.State.SUPERSEDED: ("neutral", "Superseded"),
    Rollout.State.STOPPED: ("bad", "Stopped"),
}


@dataclass(frozen=True)
class RevisionRow:
    """A line of the list of revisions."""

    revision: Revision
    rollout: Rollout | None
    progress: Progress | None
    chip: str
    word: str


def revision_rows(revisions: list[Revision]) -> list[RevisionRow]:
    """Three queries, however many revisions."""
    by_revision = rollouts_by_revision(revisions)
    counts = progress(by_revision.values())
    return [_revision_row(revision, by_revision.get(revision.number), counts) for revision in revisions]


def _revision_row(revision: Revision, rollout: Rollout | None, counts: dict[int, Progress]) -> RevisionRow:
    count = counts.get(rollout.pk) if rollout else None
    return RevisionRow(revision, rollout, count, *rollout_chip(rollout, count))


def reach(agents: list[AgentDrift]) -> str:
    """Whom a push or a rollback of everything reaches now, in words."""
    pools = len({row.pool for row in agents})
    heard = sum(row.state not in ("silent", "never") for row in agents)
    if not agents:
        return "No agent is in use: nobody is asked to apply it."
    word = "agent" if len(agents) == 1 else "agents"
    later = "" if heard == len(agents) else "; the others apply it with their next report"
    return (
        f"It goes to {len(agents):,} {word} in {pools:,} pool{'' if pools == 1 else 's'}. {heard:,} of them report now"
        f" and apply it within seconds{later}. The rollout's page counts them."
    )


def rollout_chip(rollout: Rollout | None, count: Progress | None) -> tuple[str, str]:
    """State as shape and word; a rollout that is over with refusals or silence does not look healthy."""
    if rollout is None:
        return "unknown", "Unknown"
    if rollout.state == Rollout.State.DONE and count is not None:
        if count.nacked:
            return "bad", f"Refused by {count.nacked}"
        if count.timed_out:
            return "risk", f"No answer from {count.timed_out}"
    return ROLLOUT_CHIPS[Rollout.State(rollout.state)]


@dataclass(frozen=True)
class Review:
    """The configuration that is saved now against the latest revision."""

    against: Revision | None
    digest: str
    changes: list[Change]
    groups: list[Group]
    tally: str
    findings: list[Finding]
    rules: int
    rules_held: int
    agents: int
    pools: int

    @property
    def errors(self) -> list[Finding]:
        return [item for item in self.findings if item.severity == Severity.ERROR]

    @property
    def warnings(self) -> list[Finding]:
        return [item for item in self.findings if item.severity == Severity.WARNING]

    @property
    def unchanged(self) -> bool:
        return self.against is not None and self.against.digest == self.digest


def review(now: datetime) -> Review:
    source = load_source(now)
    findings = validate(source, Facts(now=now, rest_of_ttft_ms=rest_of_ttft_ms(now)))
    against = latest_revision()
    found = compared(source, against, now)
    broken = {item.rule for item in findings}
    return Review(
        against=against,
        digest=found.digest,
        changes=found.changes,
        groups=groups(found.changes),
        tally=tally(found.changes),
        findings=findings,
        rules=len(Rule),
        rules_held=len(Rule) - len(broken),
        agents=Agent.objects.filter(state=Agent.State.ACTIVE, pool__archived_at__isnull=True).count(),
        pools=len(source.pools),
    )


@dataclass(frozen=True)
class GateRow:
    """One gate of a wave: what it saw, what it allows, and why it does not hold."""

    gate: str
    title: str
    state: str
    chip: str
    word: str
    observed: str
    limit: str
    why: str


GATE_TITLES = {
    "refusals": "Refusals",
    "silence": "Fallen silent",
    "answers": "Answers",
    "burn": "Burn rate",
    "hold": "Hold time",
}
GATE_CHIPS = {
    "held": ("ok", "Holds"),
    "failed": ("bad", "Failed"),
    "waits": ("neutral", "Waits"),
    "asks": ("unknown", "Asks you"),
}


@dataclass(frozen=True)
class WaveRow:
    """A wave with how many of its agents answered, and its gates. `readings` are what they say, or said at its end."""

    number: int
    reaches: str
    percent: int | None
    state: str
    sent_at: datetime | None
    agents: int
    acked: int
    nacked: int
    silent: int
    chip: str
    word: str
    passed_at: datetime | None
    readings: list[GateRow]

    @property
    def gates_title(self) -> str:
        return f"Gates of wave {self.number}"

    @property
    def gates_id(self) -> str:
        return f"gates-{self.number}"


@dataclass(frozen=True)
class AgentRow:
    """One agent in a rollout. `state` is requested, delivered, active, refused, silent or waiting."""

    name: str
    pool: str
    wave: int
    state: str
    chip: str
    word: str
    reason: str
    sent_at: datetime | None
    answered_at: datetime | None
    reported_at: datetime | None


@dataclass(frozen=True)
class RolloutPage:
    revision: Revision
    rollout: Rollout
    progress: Progress
    waves: list[WaveRow]
    agents: list[AgentRow]
    chip: str
    word: str
    waits: bool
    gates: Gates | None

    @property
    def gate_lines(self) -> list[str]:
        """What may happen in a wave, as sentences."""
        return gate_lines(self.gates)

    @property
    def open(self) -> bool:
        return self.rollout.state in (Rollout.State.REQUESTED, Rollout.State.RUNNING)

    @property
    def counts(self) -> dict[str, int]:
        """State of agents -> how many, in the order of AGENT_STATES."""
        return {state: sum(row.state == state for row in self.agents) for state in AGENT_STATES}

    @property
    def parts(self) -> list[dict[str, object]]:
        """The bar of progress: share of the agents and colour token, what is done first."""
        total = len(self.agents)
        return [
            {"share": self.counts[state] / total, "colour": colour}
            for state, colour in BAR_COLOURS.items()
            if self.counts[state]
        ]


# Attention first; words as people read them.
AGENT_STATES = {
    "refused": ("bad", "Refused"),
    "silent": ("unknown", "Silent"),
    "requested": ("neutral", "Requested"),
    "delivered": ("neutral", "Delivered"),
    "waiting": ("plain", "Later wave"),
    "active": ("ok", "Active"),
}


BAR_COLOURS = {
    "active": "--series-1",
    "delivered": "--series-3",
    "requested": "--series-2",
    "waiting": "--line-strong",
    "refused": "--bad-fill",
    "silent": "--unknown-edge",
}


def rollout_page(rollout: Rollout, now: datetime) -> RolloutPage:
    deliveries = list(rollout.deliveries.select_related("agent__live", "agent__pool"))
    order = list(AGENT_STATES)
    agents = sorted(
        (_agent_row(delivery, now) for delivery in deliveries),
        key=lambda row: (order.index(row.state), row.pool, row.name),
    )
    waves = list(rollout.waves.order_by("number"))
    count = progress([rollout])[rollout.pk]
    return RolloutPage(
        revision=rollout.revision,
        rollout=rollout,
        progress=count,
        waves=[
            _wave_row(wave, [row for row in agents if row.wave == wave.number], _readings(rollout, wave, now))
            for wave in waves
        ],
        gates=gates_of(rollout),
        agents=agents,
        waits=rollout.state == Rollout.State.RUNNING and any(wave.state == Wave.State.PENDING for wave in waves),
        **dict(zip(("chip", "word"), rollout_chip(rollout, count), strict=True)),
    )


def _agent_row(delivery: Delivery, now: datetime) -> AgentRow:
    live = getattr(delivery.agent, "live", None)
    reported_at = live.reported_at if live is not None else None
    state = _agent_state(delivery, reported_at, now)
    chip, word = AGENT_STATES[state]
    return AgentRow(
        name=delivery.agent.name,
        pool=delivery.agent.pool.slug,
        wave=delivery.wave,
        state=state,
        chip=chip,
        word=word,
        reason=delivery.reason,
        sent_at=delivery.sent_at,
        answered_at=delivery.answered_at,
        reported_at=reported_at,
    )


def _agent_state(delivery: Delivery, reported_at: datetime | None, now: datetime) -> str:
    if delivery.state == Delivery.State.ACKED:
        return "active"
    if delivery.state == Delivery.State.NACKED:
        return "refused"
    if delivery.state == Delivery.State.PENDING:
        return "waiting"
    if delivery.state == Delivery.State.TIMED_OUT or reported_at is None or now - reported_at > SILENT_AFTER:
        return "silent"
    # A report's answer names the revision: whoever has reported since the wave went out has been told.
    told = delivery.sent_at is not None and reported_at > delivery.sent_at
    return "delivered" if told else "requested"


def gate_lines(gates: Gates | None) -> list[str]:
    if gates is None:
        return ["No gates: a refusal is shown and nothing rolls back by itself."]
    refusals = f"{gates.refusals_most}"
    if gates.refusals_most_percent:
        refusals += f" or {gates.refusals_most_percent} % of the wave, whichever is more"
    lines = [
        f"Refusals allowed: {refusals}.",
        f"Agents that may fall silent: {gates.silent_most}.",
        "Burn rate: not asked."
        if gates.burn_most is None
        else f"Burn rate of every contract among the wave's agents: under {gates.burn_most:g}.",
        f"Held for {gates.hold_s} s after the last answer; what is unknown {gates.gate_timeout_s} s later asks you.",
    ]
    return lines


def _readings(rollout: Rollout, wave: Wave, now: datetime) -> list[GateRow]:
    """Judged now while the rollout goes on; afterwards what the gates said last."""
    if not rollout.gated or wave.state == Wave.State.PENDING:
        return []
    if rollout.state in OPEN_ROLLOUTS:
        raw = [asdict(reading) for reading in verdict_of(rollout, wave, now).readings]
    else:
        raw = wave.readings
    return [
        GateRow(
            gate=str(row["gate"]),
            title=GATE_TITLES[row["gate"]],
            state=str(row["state"]),
            chip=GATE_CHIPS[row["state"]][0],
            word=GATE_CHIPS[row["state"]][1],
            observed=row["observed"],
            limit=row["limit"],
            why=row["why"],
        )
        for row in raw
    ]


def _reaches(plan: WavePlan) -> str:
    """`Up to 25 % of each pool`, or what the wave names."""
    if plan.percent == 100:
        return "Every agent"
    if plan.percent is not None:
        return f"Up to {plan.percent} % of each pool"
    return ", ".join([*(f"pool {name}" for name in plan.pools), *plan.agents])


def _wave_row(wave: Wave, agents: list[AgentRow], readings: list[GateRow]) -> WaveRow:
    acked = sum(row.state == "active" for row in agents)
    nacked = sum(row.state == "refused" for row in agents)
    silent = sum(row.state == "silent" for row in agents)
    if wave.state == Wave.State.PENDING:
        chip, word = "plain", "Waiting"
    elif nacked:
        chip, word = "bad", "Refused"
    elif any(row.state == "failed" for row in readings):
        chip, word = "bad", "Gate failed"
    elif any(row.state == "asks" for row in readings):
        chip, word = "unknown", "Asks you"
    elif acked == len(agents) and any(row.state == "waits" for row in readings):
        chip, word = "neutral", "Held"
    elif acked == len(agents):
        chip, word = "ok", "Active"
    elif silent:
        chip, word = "risk", "Silent agents"
    else:
        chip, word = "neutral", "Sent"
    return WaveRow(
        number=wave.number,
        reaches=_reaches(plan_of(wave)),
        percent=wave.percent,
        state=wave.state,
        sent_at=wave.sent_at,
        agents=len(agents),
        acked=acked,
        nacked=nacked,
        silent=silent,
        chip=chip,
        word=word,
        passed_at=wave.passed_at,
        readings=readings,
    )
