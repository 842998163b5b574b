"""The flex band as the agent keeps it: fenced grants with a time to live, the local tripwire, and the way home.

The rules are `core.grants` and `core.slot_states`; here are their clock (CLOCK_BOOTTIME), their file and their effects
on the scheduler. The file holds the fence and a trip of each slot: both outlive the process, a loan does not. It is
written before a loan begins, so that no process can take a fence twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from controlplane.agent.atomic_file import write_atomic
from controlplane.core import grants as rules
from controlplane.core.flex_policy import FlexPolicy
from controlplane.core.grants import Grant, GrantKind, Receipt, SlotGrant, TripCause, TripSign
from controlplane.core.slot_states import Band, SlotEvent, SlotState, apply_event
from controlplane.wire.policy import SlotPolicy
from controlplane.wire.report import Grant as GrantMessage
from controlplane.wire.report import Trip as TripMessage

log = logging.getLogger(__name__)

FLEX_FILE = "flex.json"
LEND = "lend"
ON_THE_WAY_HOME = frozenset({SlotState.DRAINING, SlotState.CANCELLING, SlotState.OVERDUE})


class StoredTrip(msgspec.Struct, frozen=True):
    """A trip as it is reported: again by each process until a higher fence came, for a report may be lost with one."""

    at_us: int
    reason: str
    value: float


class StoredSlot(msgspec.Struct, frozen=True):
    """What outlives a restart."""

    fence: int
    lent: bool
    tripped: bool
    trip: StoredTrip | None = None


class FlexHost(Protocol):
    """What the band needs of the engine."""

    def set_slot_state(self, name: str, state: SlotState) -> None:
        """Tell the scheduler."""

    def batch_running(self, name: str) -> int:
        """Batch requests that run on a slot."""

    def cancel_batch(self, name: str) -> int:
        """Put what can be cancelled on a slot back into its queue; returns how many cannot."""

    def interactive_signs(self, *, with_p95: bool) -> InteractiveSigns:
        """Age of the oldest waiting interactive request, and this agent's p95 wait of the last 60 s."""


@dataclass(slots=True)
class FlexSlot:
    """One flex slot: the grant, the state that follows from it, and the instants of its drain in Unix us."""

    slot_id: int
    grant: SlotGrant
    state: SlotState = SlotState.HOME
    trip: StoredTrip | None = None
    unix_shift_us: int = 0
    """From the boot clock to Unix time when the last drain began."""


@dataclass(frozen=True, slots=True)
class DrainInstants:
    """Unix microseconds."""

    stop_admit_us: int | None = None
    last_token_us: int | None = None
    home_us: int | None = None


@dataclass(frozen=True, slots=True)
class InteractiveSigns:
    """What the tripwire looks at; None is nothing waiting, or no figure."""

    oldest_waiting_us: int | None
    p95_60s_us: int | None


class FlexBand:
    """All flex slots of this agent."""

    log = log

    def __init__(self, state_dir: Path, host: FlexHost, unix_us: Callable[[], int], boot_us: Callable[[], int]) -> None:
        self._path = state_dir / FLEX_FILE
        self._host = host
        self._unix_us = unix_us
        self._boot_us = boot_us
        self._policy = FlexPolicy()
        self._stored = self._load()
        self._looked_at_p95_us = 0
        self._unsaved = False
        self.on_trip: Callable[[], None] = lambda: None
        """Called when the wire was pulled: the control plane should hear of it at once."""
        self.slots: dict[str, FlexSlot] = {}
        self.trips: list[TripMessage] = []
        """Trips that no report has carried yet."""
        self.any_lent = False
        self.any_draining = False
        self.places_most = 1
        """Requests that run at once on the largest of these slots."""

    def _load(self) -> dict[str, StoredSlot]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, StoredSlot])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            # Fences only grow, so forgetting them is safe for order; a trip that is forgotten is told of here.
            self.log.error("%s cannot be read (%s): slots start at home and wait for a new grant", self._path, error)
            return {}

    def _save(self) -> bool:
        """Write fences and trips down; False, and again with the next step, when the disk takes nothing."""
        for name, slot in self.slots.items():
            held = slot.grant
            trip = slot.trip if held.tripped else None
            self._stored[name] = StoredSlot(held.fence, held.kind is GrantKind.LENT, held.tripped, trip)
        try:
            write_atomic(self._path, msgspec.json.encode(self._stored))
        except OSError as error:
            if not self._unsaved:
                self.log.critical("%s cannot be written (%s): no loan begins until it can", self._path, error)
            self._unsaved = True
            return False
        self._unsaved = False
        return True

    def configure(self, slots: list[SlotPolicy], policy: FlexPolicy) -> None:
        """Take the flex slots and limits of a revision; what a slot is doing goes on."""
        self._policy = policy
        flex = {slot.name: slot for slot in slots if slot.band == Band.FLEX}
        for name in self.slots.keys() - flex.keys():
            del self.slots[name]
        for name, slot in flex.items():
            if name not in self.slots:
                self.slots[name] = self._restored(name, slot.id)
        self.places_most = max((slot.places for slot in flex.values()), default=1)
        for name, held in self.slots.items():
            self._host.set_slot_state(name, held.state)

    def _restored(self, name: str, slot_id: int) -> FlexSlot:
        stored = self._stored.get(name)
        if stored is None:
            return FlexSlot(slot_id, SlotGrant(slot=name, band=Band.FLEX))
        kind = GrantKind.LENT if stored.lent else GrantKind.RECALLED
        held = SlotGrant(slot=name, band=Band.FLEX, fence=stored.fence, kind=kind, tripped=stored.tripped)
        slot = FlexSlot(slot_id, rules.after_restart(held))
        if slot.grant.tripped:
            slot.trip = stored.trip or StoredTrip(self._unix_us(), TripCause.RESTARTED.value, 0.0)
            self._tell(slot)
        return slot

    def _tell(self, slot: FlexSlot) -> None:
        trip = slot.trip
        assert trip is not None
        self.trips.append(TripMessage(slot.slot_id, slot.grant.fence, trip.at_us, trip.reason, trip.value))

    # Grants

    def apply(self, messages: list[GrantMessage], *, sent_boot_us: int) -> list[Receipt]:
        """Take the grants of an answer to a report that was sent at `sent_boot_us` (boot clock)."""
        by_id = {slot.slot_id: name for name, slot in self.slots.items()}
        before = {name: slot.grant for name, slot in self.slots.items()}
        receipts, changed = [], False
        for message in messages:
            name = by_id.get(message.slot_id)
            if name is None:
                receipts.append(Receipt.REFUSED_UNKNOWN_SLOT)
                continue
            kind = GrantKind.LENT if message.action == LEND else GrantKind.RECALLED
            if message.fence < 1 or (kind is GrantKind.LENT and message.ttl_us <= 0):
                continue
            grant = Grant(slot=name, fence=message.fence, kind=kind, ttl_us=message.ttl_us)
            receipt = self._receive(name, grant, sent_boot_us)
            receipts.append(receipt)
            changed = changed or receipt is Receipt.TAKEN
            if receipt is Receipt.REFUSED_CONFLICT:
                self.log.error(
                    "slot %s: a %s under fence %d contradicts what that fence said before", name, kind, grant.fence
                )
        if changed and not self._save():
            self._give_back(before)
        self._follow()
        return receipts

    def _give_back(self, before: Mapping[str, SlotGrant]) -> None:
        """Loans that could not be written down are not begun: after a kill their fence would be taken as new.

        What stood before is over all the same, for a recall came between.
        """
        now_us = self._boot_us()
        for name, slot in self.slots.items():
            fence = slot.grant.fence
            if slot.grant.kind is not GrantKind.LENT or fence == before[name].fence:
                continue
            slot.grant = before[name]
            if fence > 1:
                recall = Grant(slot=name, fence=fence - 1, kind=GrantKind.RECALLED)
                slot.grant = rules.receive(slot.grant, recall, report_sent_at_us=now_us, now_us=now_us).grant

    def _receive(self, name: str, grant: Grant, sent_boot_us: int) -> Receipt:
        slot, now_us = self.slots[name], self._boot_us()
        held = slot.grant
        goes_on = grant.fence == held.fence and held.kind is GrantKind.LENT and not held.tripped
        if slot.state in ON_THE_WAY_HOME and grant.kind is GrantKind.LENT and (grant.fence > held.fence or goes_on):
            # It has to be home before it is lent again, also under a fence that only ran out: a renewal that comes late
            # would take the bound off its drain. The grant comes with every answer and is taken then.
            return Receipt.REPEATED
        received = rules.receive(slot.grant, grant, report_sent_at_us=sent_boot_us, now_us=now_us)
        slot.grant = received.grant
        return received.receipt

    def recall(self, slot_id: int, fence: int) -> bool:
        """A nudge recalls a slot ahead of the next answer; True when it was news."""
        message = GrantMessage(slot_id=slot_id, fence=fence, action="recall", ttl_us=0)
        return self.apply([message], sent_boot_us=self._boot_us()) == [Receipt.TAKEN]

    # Every scheduling step

    def step(self) -> None:
        """Let loans lapse, look at the wire, and bring draining slots on their way."""
        if not self.slots:
            return
        if self._unsaved:
            self._save()
        now_us = self._boot_us()
        for slot in self.slots.values():
            slot.grant = rules.lapse(slot.grant, now_us=now_us)
        if self.any_lent:
            with_p95 = now_us - self._looked_at_p95_us >= 200_000
            if with_p95:
                self._looked_at_p95_us = now_us
            signs = self._host.interactive_signs(with_p95=with_p95)
            sign = rules.trip_sign(
                lend_p95_us=self._policy.lend_p95_us,
                oldest_waiting_us=signs.oldest_waiting_us,
                p95_60s_us=signs.p95_60s_us,
                refused_by_reason={},
            )
            if sign is not None:
                self._pull(sign)
        self._follow()

    def refused(self, reason: str) -> None:
        """An interactive request was refused; that pulls the wire when it shows a lack of slots."""
        if not self.any_lent:
            return
        sign = rules.trip_sign(
            lend_p95_us=self._policy.lend_p95_us, oldest_waiting_us=None, p95_60s_us=None, refused_by_reason={reason: 1}
        )
        if sign is not None:
            self._pull(sign)
            self._follow()

    def _pull(self, sign: TripSign) -> None:
        now_us = self._boot_us()
        pulled = rules.pull([slot.grant for slot in self.slots.values()], sign, now_us=now_us)
        for held in pulled.grants:
            self.slots[held.slot].grant = held
        if pulled.trips:
            at_us = self._unix_us()
            for trip in pulled.trips:
                slot = self.slots[trip.slot]
                slot.trip = StoredTrip(at_us, trip.cause.value, float(trip.value))
                self._tell(slot)
            self.log.warning("tripped by %s (%d): %s", sign.cause, sign.value, ", ".join(t.slot for t in pulled.trips))
            self._save()
            self.on_trip()

    def token_seen(self, name: str) -> None:
        """Batch work on a draining slot made a token."""
        slot = self.slots.get(name)
        if slot is not None and slot.grant.draining:
            slot.grant = rules.token_seen(slot.grant, now_us=self._boot_us())

    def _follow(self) -> None:
        """Bring each slot's state up to its grant, through the one table of transitions."""
        now_us = self._boot_us()
        for name, slot in self.slots.items():
            before = slot.state
            if slot.grant.lent_at(now_us):
                if before is SlotState.HOME:
                    self._enter(name, slot, SlotEvent.LEND)
            elif before is SlotState.LENT:
                slot.unix_shift_us = self._unix_us() - now_us
                self._enter(name, slot, SlotEvent.RECALL)
            if slot.state in ON_THE_WAY_HOME:
                self._drain(name, slot, now_us)
        self.any_lent = any(slot.state is SlotState.LENT for slot in self.slots.values())
        self.any_draining = any(slot.state in ON_THE_WAY_HOME for slot in self.slots.values())

    def _drain(self, name: str, slot: FlexSlot, now_us: int) -> None:
        if slot.state is SlotState.DRAINING and self._host.batch_running(name) and self._bound_reached(slot, now_us):
            self._enter(name, slot, SlotEvent.CANCEL)
            if self._host.cancel_batch(name):
                self._enter(name, slot, SlotEvent.OVERDUE)
                self.log.error("slot %s is overdue: it runs batch that cannot be cancelled", name)
        if not self._host.batch_running(name):
            slot.grant = rules.came_home(slot.grant, now_us=now_us)
            self._enter(name, slot, SlotEvent.DRAINED)

    def _bound_reached(self, slot: FlexSlot, now_us: int) -> bool:
        return rules.must_cancel(slot.grant, now_us=now_us, drain_bound_us=self._policy.drain_bound_us)

    def _enter(self, name: str, slot: FlexSlot, event: SlotEvent) -> None:
        slot.state = apply_event(slot.state, event)
        self.log.info("slot %s is %s (fence %d)", name, slot.state, slot.grant.fence)
        self._host.set_slot_state(name, slot.state)

    # What is told

    def states(self) -> Mapping[str, SlotState]:
        return {name: slot.state for name, slot in self.slots.items()}

    def drain_instants(self, name: str) -> DrainInstants:
        """When the drain of the last loan stopped admitting, made its last token and was home.

        None is not yet, or never; all are None when the last loan never reached this process.
        """
        slot = self.slots.get(name)
        drain = None if slot is None else slot.grant.drain
        if slot is None or drain is None or not drain.stop_admit_at_us or drain.fence < slot.grant.fence - 1:
            return DrainInstants()
        shift_us = slot.unix_shift_us
        return DrainInstants(
            drain.stop_admit_at_us + shift_us,
            None if drain.last_token_at_us is None else drain.last_token_at_us + shift_us,
            None if drain.home_at_us is None else drain.home_at_us + shift_us,
        )

    def take_trips(self) -> list[TripMessage]:
        """Trips since the last report."""
        trips, self.trips = self.trips, []
        return trips
