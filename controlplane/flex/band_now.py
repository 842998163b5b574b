"""A pool's band as arithmetic: what its slots serve, load, slack and every job's room, now and if slots moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fractions import Fraction
from math import inf
from operator import itemgetter
from typing import Any, Final

from controlplane.contracts.models import WorkloadClass
from controlplane.core.flex import decide
from controlplane.core.flex_decision import FlexDecision
from controlplane.core.flex_demand import Room, available_slots, dues_of, room_at
from controlplane.core.flex_policy import FlexPolicy, SafeRate
from controlplane.core.flex_snapshot import BatchJob, FlexSlot
from controlplane.core.period import to_us
from controlplane.core.slot_states import Band, SlotState, admits_batch, admits_interactive
from controlplane.fleet.models import AgentLive, Pool
from controlplane.flex import evidence, queries
from controlplane.flex.models import Decision, PoolSample
from controlplane.flex.reading import Terms
from controlplane.flex.samples import sample_at
from controlplane.flex.terms import POLICY_FIELDS, saved_terms, terms_in_force
from controlplane.jobs.batch_capacity import efficiencies
from controlplane.jobs.models import Job
from controlplane.jobs.queries import PoolSlack, backlog_jobs, direct_backlog, slack_for

#: What is older says nothing of now: a dash.
FRESH: Final = timedelta(seconds=10)
#: Ten years: what takes longer is never done.
FAR_US: Final = 3_650 * 86_400 * 1_000_000

Work = tuple[int, datetime | None]
"""(remaining GPU time in us, deadline)"""


@dataclass(frozen=True, slots=True)
class JobRoom:
    """A job with a deadline ahead and its slack over all work due by then; None: nothing serves batch.

    `required` is how many slots that work asks for, `done_at` when they have done it, the earliest deadlines first.
    """

    job: Job
    slack: float | None
    required: float | None = None
    done_at: datetime | None = None

    @property
    def in_time(self) -> bool:
        return self.slack is not None and self.slack >= 0


@dataclass(frozen=True, slots=True)
class BandFigures:
    """What a set of slots amounts to. `load` is admitted over tested safe rate, None where one is not known."""

    interactive: int
    batch: int
    load: float | None
    slack: PoolSlack
    rooms: tuple[JobRoom, ...]

    @property
    def in_time(self) -> int:
        """Jobs whose slack is not negative."""
        return sum(room.in_time for room in self.rooms)


@dataclass(frozen=True)
class BandNow:
    """One pool, read once: ask it for figures of its slots, or of the slots as they would be."""

    pool: Pool
    now: datetime
    terms: Terms
    slots: tuple[queries.BandSlot, ...]
    worth: float
    work: tuple[tuple[Job | None, int, datetime | None], ...]
    sample: PoolSample | None
    limits: Mapping[str, Any] | None
    live: Mapping[int, AgentLive]
    """Last words by agent id."""

    @property
    def policy(self) -> FlexPolicy:
        """Of the revision in force; the defaults where its numbers contradict each other."""
        return self.terms.policy or FlexPolicy()

    @property
    def cancellable(self) -> bool:
        """Batch of the pool may be cancelled and tried again; as saved where nothing was pushed."""
        if self.terms.cancellable is not None:
            return self.terms.cancellable
        rows = WorkloadClass.objects.filter(slug=self.terms.batch_class, retry_safe=True, cancellable=True)
        return rows.exists()

    @property
    def admitted_per_s(self) -> float | None:
        """Interactive requests admitted, by a sample that is fresh."""
        fresh = self.sample is not None and timedelta(0) <= self.now - self.sample.at <= FRESH
        return self.sample.admitted_per_s if fresh and self.sample is not None else None

    @property
    def best_effort(self) -> int:
        """Jobs without a deadline."""
        return sum(job is not None and deadline is None for job, _, deadline in self.work)

    def lent(self) -> list[queries.BandSlot]:
        return [slot for slot in self.slots if slot.state == SlotState.LENT]

    def at_home(self) -> list[queries.BandSlot]:
        """Flex slots that could be lent."""
        return [slot for slot in self.slots if slot.band == Band.FLEX and slot.state == SlotState.HOME]

    def figures(
        self, *, home: Sequence[int] = (), lent: Sequence[int] = (), without: Sequence[int] = ()
    ) -> BandFigures:
        """With these slots (by id) home, lent, or gone; as it is without any of them."""
        slots = [self._slot(slot, home, lent) for slot in self.slots if slot.slot_id not in without]
        interactive = sum(admits_interactive(slot.band, slot.state) for slot in slots)
        all_work: list[Work] = [(us, deadline) for _, us, deadline in self.work]
        return BandFigures(
            interactive=interactive,
            batch=sum(admits_batch(slot.band, slot.state) for slot in slots),
            load=self._load(interactive),
            slack=slack_for(all_work, slots, self.now),
            rooms=tuple(self._rooms(slots)),
        )

    def _slot(self, slot: queries.BandSlot, home: Sequence[int], lent: Sequence[int]) -> FlexSlot:
        state = SlotState(slot.state)
        if slot.slot_id in home:
            state = SlotState.HOME
        elif slot.slot_id in lent:
            state = SlotState.LENT
        elif state not in (SlotState.HOME, SlotState.LENT):
            state = SlotState.LOST  # on its way home it serves neither, and its drain is nothing to reckon with
        return FlexSlot(name=slot.name, band=Band(slot.band), state=state, batch_efficiency=self.worth)

    def _load(self, interactive: int) -> float | None:
        table: SafeRate | None = self.terms.safe_rate
        rate = None if table is None else float(table.at(interactive))
        return self.admitted_per_s / rate if rate and self.admitted_per_s is not None else None

    def _rooms(self, slots: Sequence[FlexSlot]) -> list[JobRoom]:
        now_us, available = to_us(self.now), available_slots(slots)
        dues = dues_of(
            (
                BatchJob(name="", remaining_gpu_us=us, deadline_us=to_us(deadline))
                for _, us, deadline in self.work
                if deadline is not None
            ),
            now_us=now_us,
        )
        ahead = sorted(
            ((deadline, job.pk, job) for job, _, deadline in self.work if job and deadline and deadline > self.now),
            key=itemgetter(0, 1),
        )
        return [self._room(job, room_at(dues, to_us(deadline), now_us=now_us), available) for deadline, _, job in ahead]

    def _room(self, job: Job, room: Room, available: Fraction) -> JobRoom:
        takes_us = room.due_us / float(available) if available else inf
        done_at = self.now + timedelta(microseconds=takes_us) if takes_us < FAR_US else None
        return JobRoom(job, room.slack(available), room.required, done_at)

    def decision(self, *, frozen: bool | None = None) -> FlexDecision | None:
        """What the controller's function says to its newest sample; None without one. `frozen` changes that alone."""
        if self.sample is None or self.limits is None or "seen" not in self.sample.figures:
            return None
        seen = evidence.read_snapshot(self.sample.figures["seen"], self.limits)
        return decide(seen if frozen is None else replace(seen, frozen=frozen))


def read(pool: Pool, now: datetime) -> BandNow:
    """Everything that previews of a pool need; some ten statements."""
    last = Decision.objects.filter(pool=pool).order_by("-at", "-id").values_list("snapshot", flat=True).first()
    work: list[tuple[Job | None, int, datetime | None]] = [
        (job, us, job.deadline) for job, us in backlog_jobs([pool.pk], now)
    ]
    work += [(None, us, deadline) for us, deadline in direct_backlog(pool.pk, now)]
    return BandNow(
        pool=pool,
        now=now,
        terms=terms_of(pool),
        slots=tuple(queries.band(pool.pk)),
        worth=efficiencies([pool.pk], now).get(pool.pk, 1.0),
        work=tuple(work),
        sample=sample_at(pool.pk, now),
        limits=last,
        live={row.agent_id: row for row in AgentLive.objects.filter(agent__pool=pool).select_related("agent")},
    )


def terms_of(pool: Pool) -> Terms:
    """Terms of the revision in force, or as saved where nothing was pushed."""
    pushed = terms_in_force([pool.pk]).get(pool.pk)
    if pushed is not None:
        return pushed
    names = ("isolation", "interactive_class", "batch_class", "safe_rate", *POLICY_FIELDS)
    return saved_terms(tuple(getattr(pool, name) for name in names))
