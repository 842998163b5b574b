"""The agent's side of a grant: a lease that ends by itself, with a local tripwire, and no clock of its own.

Every instant here is microseconds on the boot clock of the agent's machine (CLOCK_BOOTTIME, which counts sleep), so no
clock of another machine is ever compared. A time to live counts from the instant at which the agent sent the report
that the grant answers, so a grant ends early, never late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from controlplane.core.estimate import BIAS_MAX
from controlplane.core.slot_states import Band


class GrantKind(StrEnum):
    """What the control plane says about a slot."""

    LENT = "lent"
    RECALLED = "recalled"


class GrantEnd(StrEnum):
    """Why a slot stopped admitting batch."""

    EXPIRED = "expired"
    RECALLED = "recalled"
    TRIPPED = "tripped"


class Receipt(StrEnum):
    """What became of a grant that arrived."""

    TAKEN = "taken"
    REPEATED = "repeated"
    IGNORED_LOWER_FENCE = "ignored_lower_fence"
    IGNORED_AFTER_TRIP = "ignored_after_trip"
    #: Same fence, other content: never sent by a sound control plane; refused and worth an alert.
    REFUSED_CONFLICT = "refused_conflict"
    REFUSED_NOT_FLEX = "refused_not_flex"
    REFUSED_UNKNOWN_SLOT = "refused_unknown_slot"


class TripCause(StrEnum):
    """What ended a fence at the agent, in the order in which it is looked at."""

    OLDEST_WAITING = "oldest_waiting"
    QUEUE_P95 = "queue_p95"
    REFUSED = "refused"
    #: A new process began while the slot was lent: what the old one had running is not known to have ended.
    RESTARTED = "restarted"


#: Refusals of interactive requests that show a lack of slots.
TRIPPING_REFUSALS = frozenset({"rate_limit", "queue_full", "wait_too_long"})


@dataclass(frozen=True, kw_only=True)
class Grant:
    """One message about one slot. Raises ``ValueError`` for a fence or time to live that makes no sense."""

    slot: str
    fence: int
    kind: GrantKind
    ttl_us: int = 0

    def __post_init__(self) -> None:
        if self.fence < 1:
            raise ValueError(f"grant for {self.slot}: a fence is 1 or more, not {self.fence}")
        if self.kind is GrantKind.LENT and self.ttl_us <= 0:
            raise ValueError(f"grant for {self.slot}: a loan needs a time to live above 0")


@dataclass(frozen=True, kw_only=True)
class Drain:
    """The measured way home of one loan."""

    slot: str
    fence: int
    end: GrantEnd
    stop_admit_at_us: int
    last_token_at_us: int | None = None
    home_at_us: int | None = None

    @property
    def drain_us(self) -> int | None:
        """From the last instant of admitting to home; ``None`` while it lasts."""
        return None if self.home_at_us is None else self.home_at_us - self.stop_admit_at_us


@dataclass(frozen=True, kw_only=True)
class SlotGrant:
    """What an agent knows about one of its slots. The fence and whether it tripped outlive a restart."""

    slot: str
    band: Band
    fence: int = 0
    kind: GrantKind = GrantKind.RECALLED
    expires_at_us: int = 0
    tripped: bool = False
    #: The drain that the last loan ended in; ``None`` while a loan runs, before the first and after a restart.
    drain: Drain | None = None

    def admits_batch(self, now_us: int) -> bool:
        """May batch start on this slot now? A grant is over at the instant at which it expires."""
        if self.band is Band.BATCH:
            return True
        return self.band is Band.FLEX and self.lent_at(now_us)

    def lent_at(self, now_us: int) -> bool:
        """Does an unexpired, untripped loan run?"""
        return self.kind is GrantKind.LENT and not self.tripped and now_us < self.expires_at_us

    @property
    def draining(self) -> bool:
        return self.drain is not None and self.drain.home_at_us is None


@dataclass(frozen=True, kw_only=True)
class Trip:
    """A pulled tripwire as it is reported; ``value`` is microseconds waited, refusals for ``refused``, else 0."""

    slot: str
    fence: int
    at_us: int
    cause: TripCause
    value: int


@dataclass(frozen=True, kw_only=True)
class Received:
    """A slot after a grant arrived, and what became of the grant."""

    grant: SlotGrant
    receipt: Receipt


def receive(held: SlotGrant, grant: Grant, *, report_sent_at_us: int, now_us: int) -> Received:
    """Take one grant under the fencing rules.

    A lower fence is ignored; an equal one with the same content is a repeat, which is how a renewal arrives; an equal
    one after a trip is ignored for good.
    """
    if grant.slot != held.slot:
        return Received(grant=held, receipt=Receipt.REFUSED_UNKNOWN_SLOT)
    if held.band is not Band.FLEX:
        return Received(grant=held, receipt=Receipt.REFUSED_NOT_FLEX)
    held = lapse(held, now_us=now_us)
    if grant.fence < held.fence:
        return Received(grant=held, receipt=Receipt.IGNORED_LOWER_FENCE)
    if grant.fence == held.fence:
        return _receive_equal(held, grant, report_sent_at_us=report_sent_at_us, now_us=now_us)
    if grant.kind is GrantKind.RECALLED:
        stopped = _stopped(held, GrantEnd.RECALLED, now_us)
        taken = replace(stopped, fence=grant.fence, kind=GrantKind.RECALLED, expires_at_us=0, tripped=False)
    else:
        expires_at_us = report_sent_at_us + grant.ttl_us
        taken = replace(
            held, fence=grant.fence, kind=GrantKind.LENT, expires_at_us=expires_at_us, tripped=False, drain=None
        )
    return Received(grant=taken, receipt=Receipt.TAKEN)


def _receive_equal(held: SlotGrant, grant: Grant, *, report_sent_at_us: int, now_us: int) -> Received:
    if held.tripped:
        return Received(grant=held, receipt=Receipt.IGNORED_AFTER_TRIP)
    if grant.kind is not held.kind:
        return Received(grant=held, receipt=Receipt.REFUSED_CONFLICT)
    if grant.kind is GrantKind.LENT:
        # An answer that was overtaken by a later one must not shorten what the later one gave.
        expires_at_us = max(held.expires_at_us, report_sent_at_us + grant.ttl_us)
        drain = None if now_us < expires_at_us else held.drain
        held = replace(held, expires_at_us=expires_at_us, drain=drain)
    return Received(grant=held, receipt=Receipt.REPEATED)


def lapse(held: SlotGrant, *, now_us: int) -> SlotGrant:
    """Note that a loan ran out: admitting ended at the instant of its expiry, whenever that is noticed."""
    if held.kind is GrantKind.LENT and not held.tripped and now_us >= held.expires_at_us:
        return _stopped(held, GrantEnd.EXPIRED, held.expires_at_us)
    return held


def _stopped(held: SlotGrant, end: GrantEnd, at_us: int) -> SlotGrant:
    """Begin the drain of a running loan; a drain that has begun keeps its first instant and its first reason."""
    if held.kind is not GrantKind.LENT or held.drain is not None:
        return held
    return replace(held, drain=Drain(slot=held.slot, fence=held.fence, end=end, stop_admit_at_us=at_us))


def after_restart(held: SlotGrant) -> SlotGrant:
    """What a new process may believe of what the old one wrote down: the fence and a trip, but no loan.

    The boot clock may have started afresh, and an inference server may still run what the old process had sent it. So
    a fence that was lent is over, as after a trip: batch comes back under a higher one, after the cooldown.
    """
    return replace(held, expires_at_us=0, drain=None, tripped=held.tripped or held.kind is GrantKind.LENT)


# The local tripwire


@dataclass(frozen=True, kw_only=True)
class TripSign:
    """Why the wire is to be pulled; ``value`` is microseconds waited, or a count for refusals."""

    cause: TripCause
    value: int


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """All slots after the wire was pulled, and the trips to persist and report."""

    grants: tuple[SlotGrant, ...]
    trips: tuple[Trip, ...]


def trip_sign(
    *,
    lend_p95_us: int,
    oldest_waiting_us: int | None,
    p95_60s_us: int | None,
    refused_by_reason: Mapping[str, int],
) -> TripSign | None:
    """Look at interactive work at a scheduling step: should the wire be pulled?

    ``oldest_waiting_us`` is the age of the oldest waiting interactive request and ``p95_60s_us`` this agent's own p95
    over 60 s with waiting ages, each ``None`` when there is none. ``refused_by_reason`` counts interactive refusals
    since a slot was lent.
    """
    if oldest_waiting_us is not None and oldest_waiting_us >= lend_p95_us:
        return TripSign(cause=TripCause.OLDEST_WAITING, value=oldest_waiting_us)
    if p95_60s_us is not None and p95_60s_us >= lend_p95_us:
        return TripSign(cause=TripCause.QUEUE_P95, value=p95_60s_us)
    refused = sum(count for reason, count in refused_by_reason.items() if reason in TRIPPING_REFUSALS)
    return TripSign(cause=TripCause.REFUSED, value=refused) if refused else None


def pull(grants: Iterable[SlotGrant], sign: TripSign, *, now_us: int) -> Pulled:
    """Trip every lent slot of the agent: each such fence is over for good, only a higher one lends again."""
    after, trips = [], []
    for held in grants:
        if held.lent_at(now_us):
            trips.append(Trip(slot=held.slot, fence=held.fence, at_us=now_us, cause=sign.cause, value=sign.value))
            held = replace(_stopped(held, GrantEnd.TRIPPED, now_us), tripped=True)
        after.append(held)
    return Pulled(grants=tuple(after), trips=tuple(trips))


# Admission and drain


def admits_batch(grants: Mapping[str, SlotGrant], slot: str, now_boottime_us: int) -> bool:
    """May batch start on a slot at this instant of the boot clock? A slot that is not known admits none."""
    held = grants.get(slot)
    return held is not None and held.admits_batch(now_boottime_us)


@dataclass(frozen=True, kw_only=True)
class BatchAttempt:
    """What decides whether a batch request may run on a lent slot."""

    #: How long it stays by its estimate, without the tenant's bias: its share of the slot's time x the requests that
    #: run there at once, and what it waits there for others.
    stay_us: int
    retry_safe: bool
    cancels_promptly: bool
    #: A byte of its response was sent, or will be before it ends, as in a stream.
    byte_sent: bool


def fits_loan(attempt: BatchAttempt, *, drain_bound_us: int) -> bool:
    """Only work that a recall can end in time: by cancelling it, or because even its longest stay fits the bound."""
    if attempt.retry_safe and attempt.cancels_promptly and not attempt.byte_sent:
        return True
    return attempt.stay_us * BIAS_MAX <= drain_bound_us


def must_cancel(held: SlotGrant, *, now_us: int, drain_bound_us: int) -> bool:
    """Is the drain bound reached, so that the agent cancels what it can without being told?"""
    return held.drain is not None and held.draining and now_us - held.drain.stop_admit_at_us >= drain_bound_us


def token_seen(held: SlotGrant, *, now_us: int) -> SlotGrant:
    """Note a token of batch work on a slot that drains."""
    if held.drain is None or not held.draining:
        return held
    return replace(held, drain=replace(held.drain, last_token_at_us=now_us))


def came_home(held: SlotGrant, *, now_us: int) -> SlotGrant:
    """Note that the last batch request left a draining slot; its drain is measured."""
    if held.drain is None or not held.draining:
        return held
    return replace(held, drain=replace(held.drain, home_at_us=now_us))
