"""A pool that nothing happens to: until when, and within which figures, its next ticks decide as its last one did.

A tick of a calm pool compares a few numbers instead of deciding in full. It writes what the full tick would have
written: a sample, and renewals of what is lent. Whatever is not covered here ends the calm, and the pool is decided in
full: `step` may be wrong in that direction only. No input, no output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from controlplane.core.flex import elapsed_us, lasts
from controlplane.core.flex_decision import next_turn_us
from controlplane.core.flex_demand import demand_of, dues_of, most_required
from controlplane.core.flex_policy import FlexPolicy, SafeRate, exact
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot
from controlplane.core.slot_states import SlotState, admits_interactive
from controlplane.flex import evidence
from controlplane.flex.applying import Renewals, SampleRow
from controlplane.flex.deciding import PoolTick
from controlplane.flex.observing import LOST_AFTER_US
from controlplane.flex.reading import AgentRow, PoolReading, SlotRow, merged

FOR_EVER_US = 1 << 62

Slots = tuple[int, int]
"""A number of slots as numerator and denominator: whole numbers are compared as they are, and fastest."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool's slots for batch, and how many have to be required for slack to cross each of its limits."""

    slots: Slots
    #: Above it slack is under the limit of a new loan; None in a pool that decides nothing.
    lend: Slots | None
    #: For each kind of lent slots: under it slack without one is over the limit of a return.
    back: tuple[Slots, ...]


def capacity_of(slots: Iterable[FlexSlot], policy: FlexPolicy, available: Fraction, *, flex: bool) -> Capacity:
    """`available` is that of the pool's demand."""
    if not flex:
        return Capacity(available.as_integer_ratio(), None, ())
    lent = tuple([slot.batch_efficiency for slot in slots if slot.state is SlotState.LENT])
    return _capacity(*available.as_integer_ratio(), lent, policy.lend_slack, policy.return_slack)


@lru_cache(maxsize=4_096)
def _capacity(slots: int, of: int, lent: tuple[float, ...], lend_slack: float, return_slack: float) -> Capacity:
    available = Fraction(slots, of)
    back = 1 - exact(return_slack)
    return Capacity(
        slots=available.as_integer_ratio(),
        lend=(available * (1 - exact(lend_slack))).as_integer_ratio(),
        back=tuple(((available - exact(worth)) * back).as_integer_ratio() for worth in dict.fromkeys(lent)),
    )


@dataclass(slots=True)
class Backlog:
    """A pool's demand as whole numbers, and until when its comparisons with the limits of slack come out alike."""

    #: (deadline, work due by then) in us, by deadline.
    dues: tuple[tuple[int, int], ...]
    missed: bool
    until_us: int
    #: Slack under the limit of a loan, and over that of a return without each kind of lent slot.
    verdicts: list[bool]

    def figures(self, now_us: int, slots: Slots) -> tuple[float | None, float, float | None]:
        """(required, available, slack), None where infinite: the very floats that `Demand` gives."""
        count, of = slots
        available = count / of
        if self.missed:
            return None, available, None
        work, time = most_required(self.dues, now_us=now_us)
        if not work:
            return 0.0, available, 1.0
        if not count:
            return work / time, available, None
        whole = count * time
        return work / time, available, (whole - work * of) / whole


def backlog_of(jobs: Sequence[BatchJob], capacity: Capacity, grace_us: int, now_us: int) -> Backlog:
    """The backlog at an instant; `grace_us` is how long a job that missed its deadline makes slack minus infinity."""
    dues = dues_of(jobs, now_us=now_us)
    until_us, missed = dues[0][0] if dues else FOR_EVER_US, False
    for job in jobs:
        due_us = job.deadline_us
        if due_us is not None and due_us <= now_us < due_us + grace_us and job.remaining_gpu_us:
            until_us, missed = min(until_us, due_us + grace_us), True
    if capacity.lend is None:
        return Backlog(dues, missed, until_us, [])
    work, time = most_required(dues, now_us=now_us)
    count, of = capacity.lend
    short = missed or work * of > count * time
    if not short:
        until_us = min(until_us, _crossing_us(dues, capacity.lend, now_us))
    verdicts = [short]
    for slots in capacity.back:
        count, of = slots
        spared = not missed and (not work or work * of < count * time)
        if spared:
            until_us = min(until_us, _crossing_us(dues, slots, now_us))
        verdicts.append(spared)
    return Backlog(dues, missed, until_us, verdicts)


def _crossing_us(dues: Iterable[tuple[int, int]], slots: Slots, now_us: int) -> int:
    """When what is required may first reach so many slots: as time goes on the same work needs more of them."""
    count, of = slots
    first_us = FOR_EVER_US
    for deadline_us, due_us in dues:
        first_us = min(first_us, now_us + 1 if count <= 0 else deadline_us + -due_us * of // count)
    return max(now_us + 1, first_us)


@dataclass(frozen=True, slots=True)
class Rates:
    """Admitted rates, from the first up to the second, at which the load is on the same side of its limits."""

    least: float
    below: float


def rates_of(policy: FlexPolicy, table: SafeRate | None, serving: int, admitted_per_s: float) -> Rates:
    """The rates around an admitted one within which neither the load nor that with one slot less crosses its limit."""
    least, below = 0.0, math.inf
    for slots in (serving, serving - 1):
        limit = None if table is None else _limit_of(policy.load_limit, table, slots)
        if limit is None:
            continue
        if admitted_per_s < limit:
            below = min(below, limit)
        else:
            least = max(least, limit)
    return Rates(least, below)


@lru_cache(maxsize=32_768)
def _limit_of(load_limit: float, table: SafeRate, slots: int) -> float | None:
    """The least float that, read as the decimal that it is written as, makes the limit of the load; None where no slot
    serves and any rate is too much.
    """
    safe = table.at(slots)
    if not safe:
        return None
    limit = exact(load_limit) * safe
    rate = float(limit)
    while rate > 0 and exact(rate) >= limit:
        rate = math.nextafter(rate, -math.inf)
    while exact(rate) < limit:
        rate = math.nextafter(rate, math.inf)
    return rate


@dataclass(slots=True)
class Loan:
    """A lent slot of a calm pool, and the batch work that its agent said runs there."""

    slot_id: int
    agent_id: int
    fence: int
    running_batch_gpu_us: int


@dataclass(slots=True)
class Calm:
    """One pool's calm; `step` goes a tick on."""

    pool_id: int
    flex: bool
    ticked_us: int
    #: Until when all but the backlog stays as it is.
    rest_until_us: int
    stale_us: int
    ttl_us: int
    #: When all its loans end, and when they were renewed last; None: not since the calm began.
    expires_us: int
    grace_us: int
    capacity: Capacity
    backlog: Backlog
    p95_us: int | None
    p95_least_us: float
    p95_below_us: float
    admitted_per_s: float | None
    rates: Rates
    safe_rate_per_s: float | None
    #: (agent, slot, batch work that the agent said runs there) of flex slots at home.
    home: tuple[tuple[int, int, int], ...]
    #: In the order of their names.
    loans: tuple[Loan, ...]
    #: When the sample was written that these differ from, and the jobs since then; None: as they were.
    whole_at_us: int
    #: What was decided on last: `restating` decides on it again with the figures of now.
    snapshot: FlexSnapshot
    jobs: str | None = None
    renewed_us: int | None = None
    #: Of the last step: the oldest report that counts, and whether it ended by nothing but the load's crossing a limit.
    telemetry_at_us: int | None = None
    crossed: bool = False

    def step(
        self,
        reading: PoolReading,
        samples: list[SampleRow],
        renewals: Renewals,
        *,
        now_us: int,
        heard: bool,
        interactive_classes: frozenset[int],
    ) -> bool:
        """Adds this tick's rows; False, with nothing added, when the pool has to be decided in full.

        `heard`: any of its agents reported since the last tick. After False the calm is of no more use, unless it
        `crossed` and is restated.
        """
        self.crossed = False
        if (
            now_us >= self.rest_until_us
            or now_us >= self.backlog.until_us
            or (self.loans and now_us >= self.expires_us)
        ):
            return False
        if not 0 <= now_us - self.ticked_us < self.stale_us:
            return False
        oldest_us, agents = None, []
        for agent in reading.agents.values():
            at_us = agent.reported_at_us
            if at_us is None or not 0 <= now_us - at_us < self.stale_us:
                return False
            if agent.counts:
                agents.append(agent)
                if oldest_us is None or at_us < oldest_us:
                    oldest_us = at_us
        self.telemetry_at_us = oldest_us
        if heard and not self._hear(reading, agents, interactive_classes):
            return False
        self.go_on(samples, renewals, now_us)
        return True

    def go_on(self, samples: list[SampleRow], renewals: Renewals, now_us: int) -> None:
        """Adds the rows of a tick in which nothing happens."""
        oldest_us, loans = self.telemetry_at_us, self.loans
        required, available, slack = self.backlog.figures(now_us, self.capacity.slots)
        difference = evidence.difference_text(
            self.expires_us if loans else None, [loan.running_batch_gpu_us for loan in loans], self.jobs
        )
        samples.append(
            (
                self.pool_id, self.p95_us, self.admitted_per_s, self.safe_rate_per_s, required, available, slack,
                None if oldest_us is None else now_us - oldest_us, self.whole_at_us, False, difference,
            )
        )  # fmt: skip
        self.ticked_us = now_us
        if loans and not lasts(self.expires_us, now_us=now_us, ttl_us=self.ttl_us):
            self._renew(renewals, now_us)

    def work(self, reading: PoolReading, now_us: int) -> bool:
        """Takes another backlog in; False when slack crossed a limit with it."""
        backlog = backlog_of(reading.jobs, self.capacity, self.grace_us, now_us)
        if backlog.verdicts != self.backlog.verdicts:
            return False
        self.backlog = backlog
        self.jobs = evidence.as_text(evidence.jobs_as_json(reading.jobs))
        self.rest_until_us = min(self.rest_until_us, reading.valid_until_us)
        return True

    def kept(self, slot: SlotRow) -> SlotRow:
        """The slot with its grant as it was renewed last."""
        if self.renewed_us is None or slot.grant is None:
            return slot
        if not any(loan.slot_id == slot.slot_id for loan in self.loans):
            return slot
        return slot.under(slot.grant.renewed(self.renewed_us, self.expires_us, self.ttl_us))

    def _hear(self, reading: PoolReading, agents: Sequence[AgentRow], interactive_classes: frozenset[int]) -> bool:
        """Takes new reports in, `agents` are those that count; False when they say something to be decided on."""
        if not agents:
            return False
        for agent in agents:
            if agent.classes is None:
                return False
        admitted, p95_us = merged(agents, interactive_classes)
        if not self.p95_least_us <= p95_us < self.p95_below_us:
            return False
        for agent_id, slot_id, gpu_us in self.home:
            if _running_gpu_us(reading, agent_id, slot_id) != gpu_us:
                return False
        for loan in self.loans:
            loan.running_batch_gpu_us = _running_gpu_us(reading, loan.agent_id, loan.slot_id)
        self.admitted_per_s, self.p95_us = admitted, p95_us
        self.crossed = not self.rates.least <= admitted < self.rates.below
        return not self.crossed

    def _renew(self, renewals: Renewals, now_us: int) -> None:
        """Renews the loans, as `decide` does when a third of their TTL has passed."""
        self.expires_us, self.renewed_us = now_us + self.ttl_us, now_us
        for loan in self.loans:
            renewals.add(loan.slot_id, loan.fence, self.ttl_us)


def _running_gpu_us(reading: PoolReading, agent_id: int, slot_id: int) -> int:
    """Batch work that an agent said runs on a slot."""
    agent = reading.agents.get(agent_id)
    return 0 if agent is None else agent.work.get(slot_id, 0)


_CALM_STATES = frozenset({SlotState.HOME, SlotState.LENT})


def calm_of(reading: PoolReading, tick: PoolTick) -> Calm | None:
    """The calm after a tick that was decided in full; None when the next one has to be, too."""
    if not tick.settled or [slot for slot in reading.slots if slot.state not in _CALM_STATES]:
        return None
    snapshot, flex = tick.snapshot, tick.decision is not None
    policy, figures, now_us = snapshot.policy, snapshot.interactive, snapshot.now_us
    if flex and not _is_known(snapshot):
        return None
    loans = _loans(reading, snapshot)
    expires = {tick.grants[loan.slot_id].expires_at_us for loan in loans}
    expires_us = expires.pop() if expires else FOR_EVER_US
    if expires_us is None or expires:
        return None
    serving = len([slot for slot in snapshot.slots if admits_interactive(slot.band, slot.state)])
    below = figures.p95_queue_us is not None and figures.p95_queue_us < policy.lend_p95_us
    demanded = demand_of(snapshot) if tick.decision is None else tick.decision.demand
    capacity = capacity_of(snapshot.slots, policy, demanded.available_exact, flex=flex)
    return Calm(
        pool_id=reading.pool.pool_id,
        flex=flex,
        ticked_us=now_us,
        rest_until_us=min([reading.valid_until_us, *_ends(tick, reading.pool.turn_us)]),
        stale_us=min(policy.telemetry_stale_us, LOST_AFTER_US),
        ttl_us=policy.grant_ttl_us,
        expires_us=expires_us,
        grace_us=policy.missed_grace_us,
        capacity=capacity,
        backlog=backlog_of(snapshot.jobs, capacity, policy.missed_grace_us, now_us),
        p95_us=figures.p95_queue_us,
        p95_least_us=policy.lend_p95_us if flex and not below else 0,
        p95_below_us=policy.lend_p95_us if flex and below else math.inf,
        admitted_per_s=figures.admitted_per_s,
        rates=rates_in(snapshot, serving) if flex else Rates(0.0, math.inf),
        safe_rate_per_s=None if snapshot.safe_rate is None else float(snapshot.safe_rate.at(serving)),
        home=_home(reading) if flex else (),
        loans=loans,
        whole_at_us=now_us,
        snapshot=snapshot,
    )


def _is_known(snapshot: FlexSnapshot) -> bool:
    figures = snapshot.interactive
    age_us = elapsed_us(figures.telemetry_at_us, snapshot.now_us)
    fresh = age_us is not None and 0 <= age_us < snapshot.policy.telemetry_stale_us
    return fresh and figures.p95_queue_us is not None and figures.admitted_per_s is not None


def rates_in(snapshot: FlexSnapshot, serving: int) -> Rates:
    """`rates_of` a snapshot that knows its rate."""
    assert snapshot.interactive.admitted_per_s is not None
    return rates_of(snapshot.policy, snapshot.safe_rate, serving, snapshot.interactive.admitted_per_s)


def _ends(tick: PoolTick, turn_us: int) -> list[int]:
    """The instants ahead at which a check flips by the passing of time alone, and when a row is due anyway."""
    assert tick.memory.kept_us is not None
    rows = [next_turn_us(tick.memory.kept_us, turn_us)]
    if tick.decision is None or tick.memory.recorded is None:
        return rows
    rows.append(next_turn_us(tick.memory.recorded.at_us, turn_us))
    snapshot, policy = tick.snapshot, tick.snapshot.policy
    waits = [
        (snapshot.interactive.p95_below_since_us, policy.lend_hold_us),
        (snapshot.last_recall_at_us, policy.cooldown_us),
        (snapshot.last_lend_at_us, policy.decision_interval_us),
        (None if snapshot.safe_rate is None else snapshot.safe_rate.valid_until_us, 0),
    ]
    for slot in snapshot.slots:
        if slot.state is SlotState.LENT:
            waits.append((slot.lent_at_us, policy.min_hold_us))
            waits.append((slot.slack_above_return_since_us, policy.return_hold_us))
    ends = [since_us + max(wait_us, 0) for since_us, wait_us in waits if since_us is not None]
    return [*rows, *(end_us for end_us in ends if end_us > snapshot.now_us)]


def _home(reading: PoolReading) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (slot.agent_id, slot.slot_id, _running_gpu_us(reading, slot.agent_id, slot.slot_id))
        for slot in reading.slots
        if slot.is_flex and slot.agent_id is not None and slot.state is SlotState.HOME
    )


def _loans(reading: PoolReading, snapshot: FlexSnapshot) -> tuple[Loan, ...]:
    """Lent slots in the order of the snapshot."""
    rows = {slot.name: slot for slot in reading.slots}
    loans = []
    for seen in snapshot.slots:
        slot = rows[seen.name]
        if slot.is_flex and slot.agent_id is not None and slot.grant is not None and slot.state is SlotState.LENT:
            loans.append(Loan(slot.slot_id, slot.agent_id, slot.grant.fence, seen.running_batch_gpu_us))
    return tuple(loans)
