"""A calm pool whose load crossed a limit, and nothing else: decided by the core on the picture that it had last.

Only the instant, the reports' figures, the backlog and the end of the loans are others than when it was decided in
full. Where a slot would change by it, the pool is decided in full. No input, no output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from controlplane.core.flex import decide
from controlplane.core.flex_decision import FlexDecision
from controlplane.core.flex_snapshot import FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.slot_states import SlotState, admits_interactive
from controlplane.flex import evidence
from controlplane.flex.applying import Changes
from controlplane.flex.calm import Calm, rates_in
from controlplane.flex.deciding import Memory, record
from controlplane.flex.reading import PoolReading


@dataclass(frozen=True, slots=True)
class Restated:
    """The decision, and the memory to keep once it is written."""

    decision: FlexDecision
    memory: Memory


def restate(calm: Calm, reading: PoolReading, memory: Memory, changes: Changes, *, now_us: int) -> Restated | None:
    """Decides a pool whose calm has just `crossed` and adds its rows to `changes`; the calm goes on.

    None, with nothing added, when a slot would change: the pool has to be decided in full.
    """
    admitted_per_s = calm.admitted_per_s
    if admitted_per_s is None or not 0 <= admitted_per_s < math.inf:
        return None
    snapshot = _as_it_is(calm, reading, now_us)
    decision = decide(snapshot)
    if decision.acts:
        return None
    marks = replace(memory.marks, ticked_at_us=now_us)
    if record(changes, reading, snapshot, evidence.snapshot_text(snapshot), decision, memory):
        memory = Memory(marks, decision, (snapshot.policy, snapshot.safe_rate), memory.kept_us)
    else:
        memory = replace(memory, marks=marks)
    calm.snapshot = snapshot
    serving = len([slot for slot in snapshot.slots if admits_interactive(slot.band, slot.state)])
    calm.rates = rates_in(snapshot, serving)
    calm.go_on(changes.samples, changes.renewals, now_us)
    return Restated(decision, memory)


def _as_it_is(calm: Calm, reading: PoolReading, now_us: int) -> FlexSnapshot:
    """The snapshot with the figures of now; what else it says, the calm vouches for."""
    before = calm.snapshot
    interactive, snapshot = object.__new__(InteractiveFigures), object.__new__(FlexSnapshot)
    interactive.__dict__.update(
        before.interactive.__dict__,
        admitted_per_s=calm.admitted_per_s,
        p95_queue_us=calm.p95_us,
        telemetry_at_us=calm.telemetry_at_us,
    )
    loans = iter(calm.loans)
    slots = before.slots
    if calm.loans:
        slots = tuple(
            [
                _lent(slot, calm.expires_us, next(loans).running_batch_gpu_us) if slot.state is SlotState.LENT else slot
                for slot in slots
            ]
        )
    snapshot.__dict__.update(before.__dict__, now_us=now_us, slots=slots, interactive=interactive, jobs=reading.jobs)
    return snapshot


def _lent(before: FlexSlot, expires_us: int, running_batch_gpu_us: int) -> FlexSlot:
    slot = object.__new__(FlexSlot)
    slot.__dict__.update(
        before.__dict__, grant_expires_at_us=expires_us, running_batch_gpu_us=max(0, running_batch_gpu_us)
    )
    return slot
