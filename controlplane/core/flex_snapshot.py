"""The frozen picture of one pool at one tick, as the flex-band decision sees it.

Instants and durations are integer microseconds; ``None`` stands for "not known" wherever it is allowed, and not known
is never good. ``now_us`` and the instants must come from one clock (the database's), for an instant that lies in the
future counts as not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.core.flex_policy import FlexPolicy, SafeRate
from controlplane.core.slot_states import Band, SlotState


@dataclass(frozen=True, kw_only=True)
class FlexSlot:
    """One slot of the pool. Raises ``ValueError`` for a floor slot that claims to be lent."""

    name: str
    band: Band
    state: SlotState = SlotState.HOME
    #: Slots of ordinary batch work that this one is worth while it serves batch.
    batch_efficiency: float = 1.0
    fence: int = 0
    lent_at_us: int | None = None
    grant_expires_at_us: int | None = None
    recalled_at_us: int | None = None
    cancelled_at_us: int | None = None
    running_batch_gpu_us: int = 0
    #: What it runs is retry_safe and its backend cancels.
    cancellable: bool = False
    #: Since when slack without this slot has stayed above return_slack; overrides the pool's single instant.
    slack_above_return_since_us: int | None = None

    def above_return_slack(self, since_us: int | None) -> FlexSlot:
        """The same slot with the instant since when slack without it has stayed above; nothing else to be checked."""
        if self.slack_above_return_since_us == since_us:
            return self
        slot = object.__new__(FlexSlot)
        slot.__dict__.update(self.__dict__, slack_above_return_since_us=since_us)
        return slot

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a slot needs a name")
        if self.band is not Band.FLEX and self.state not in (SlotState.HOME, SlotState.LOST):
            raise ValueError(f"slot {self.name} belongs to the {self.band} floor and cannot be {self.state}")
        if not math.isfinite(self.batch_efficiency) or self.batch_efficiency < 0:
            raise ValueError(f"slot {self.name}: batch efficiency must be a finite number of 0 or more")
        if self.running_batch_gpu_us < 0 or self.fence < 0:
            raise ValueError(f"slot {self.name}: running batch work and fence must be 0 or more")
        if self.state is SlotState.DRAINING and self.recalled_at_us is None:
            raise ValueError(f"slot {self.name} is draining, so the instant of its recall must be given")


@dataclass(frozen=True, kw_only=True)
class InteractiveFigures:
    """What the pool's agents last reported about interactive work."""

    admitted_per_s: float | None
    p95_queue_us: int | None
    #: Since when p95 was under the limit at every tick.
    p95_below_since_us: int | None
    #: The oldest report among the agents that count.
    telemetry_at_us: int | None

    def __post_init__(self) -> None:
        rate = self.admitted_per_s
        if rate is not None and (not math.isfinite(rate) or rate < 0):
            raise ValueError(f"admitted_per_s must be a finite number of 0 or more, not {rate}")
        if self.p95_queue_us is not None and self.p95_queue_us < 0:
            raise ValueError("p95_queue_us must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """Backlog of one declared job. Without a deadline it is best effort and never a reason to lend."""

    name: str
    remaining_gpu_us: int
    deadline_us: int | None

    def with_left(self, remaining_gpu_us: int) -> BatchJob:
        """The same job with other work left, 0 or more; nothing else to be checked."""
        if self.remaining_gpu_us == remaining_gpu_us:
            return self
        job = object.__new__(BatchJob)
        job.__dict__.update(self.__dict__, remaining_gpu_us=remaining_gpu_us)
        return job

    def __post_init__(self) -> None:
        if self.remaining_gpu_us < 0:
            raise ValueError(f"job {self.name}: remaining work must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class FlexSnapshot:
    """Everything that a decision depends on. Raises ``ValueError`` when two slots share a name."""

    now_us: int
    policy: FlexPolicy
    #: ``None`` when nothing was ever tested: then nothing is lent, and what is lent comes home.
    safe_rate: SafeRate | None
    slots: tuple[FlexSlot, ...]
    interactive: InteractiveFigures
    jobs: tuple[BatchJob, ...] = ()
    lends_this_week: int = 0
    frozen: bool = False
    last_recall_at_us: int | None = None
    last_lend_at_us: int | None = None
    slack_above_return_since_us: int | None = None
    #: Slots that a person asked back.
    manual_recalls: frozenset[str] = frozenset()
    #: Slots whose agent pulled its local tripwire under their present fence and was not answered yet.
    trips: frozenset[str] = frozenset()

    def marked(
        self,
        slots: tuple[FlexSlot, ...],
        *,
        p95_below_since_us: int | None,
        last_lend_at_us: int | None,
        last_recall_at_us: int | None,
    ) -> FlexSnapshot:
        """The same picture with the controller's memory in it; `slots` are these, marked, in their order.

        Nothing of it has to be checked or put in order again.
        """
        interactive = object.__new__(InteractiveFigures)
        interactive.__dict__.update(self.interactive.__dict__, p95_below_since_us=p95_below_since_us)
        filled = object.__new__(FlexSnapshot)
        filled.__dict__.update(
            self.__dict__,
            slots=slots,
            interactive=interactive,
            slack_above_return_since_us=None,
            last_lend_at_us=last_lend_at_us,
            last_recall_at_us=last_recall_at_us,
        )
        return filled

    def __post_init__(self) -> None:
        if len({slot.name for slot in self.slots}) != len(self.slots):
            raise ValueError("two slots of one pool share a name")
        if self.lends_this_week < 0:
            raise ValueError("lends_this_week must be 0 or more")
        object.__setattr__(self, "slots", tuple(sorted(self.slots, key=lambda slot: slot.name)))
