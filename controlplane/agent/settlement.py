"""What an ended call comes to: tokens, charge lines and the record. Who pays follows how it ended."""

from __future__ import annotations

from typing import Final

from controlplane.agent.backends.request import TokenUsage
from controlplane.agent.call import Call
from controlplane.agent.journal_entries import UNKNOWN, Begun, Closed, ItemEnd, Mark, Verdict
from controlplane.agent.objectives import Measured
from controlplane.agent.purses import SlicePurse
from controlplane.core.pricing import ChargeLines, capped, charge
from controlplane.core.reasons import OUTCOME_CODES, Outcome
from controlplane.wire.report import (
    FLAG_CAPPED,
    FLAG_ESTIMATED,
    FLAG_NOT_CHARGED,
    FLAG_OUTAGE,
    FLAG_STREAMED,
    FLAG_TOKENLESS,
    UsageRow,
)

NOTHING: Final = ChargeLines(0, 0, 0, 0, 0)
PAID_IF_DELIVERED: Final = frozenset(
    {Outcome.UPSTREAM_ERROR, Outcome.CANCELLED_BY_DRAIN, Outcome.DISPLACED, Outcome.STAGE_TIMEOUT, Outcome.LOST}
)


class Settled:
    """Tokens and money of an ended call. `charged` false: its GPU time is repeated work.

    `excess_nanos` is what the engine produced beyond the reservation: the platform bears it.
    """

    __slots__ = ("charged", "excess_nanos", "lines", "usage")

    def __init__(self, usage: TokenUsage, lines: ChargeLines, charged: bool, excess_nanos: int = 0) -> None:
        self.usage = usage
        self.lines = lines
        self.charged = charged
        self.excess_nanos = excess_nanos


def is_charged(call: Call, outcome: Outcome) -> bool:
    """Whether the tenant pays for an attempt that ended so."""
    if outcome is Outcome.COMPLETED:
        return True
    if outcome is Outcome.CANCELLED_BY_CLIENT:
        return bool(call.prefill_us)
    return outcome in PAID_IF_DELIVERED and call.head_sent and call.output_tokens > 0


def settle(call: Call, usage: TokenUsage | None, gpu_us: int, *, charged: bool) -> Settled:
    """Charge what is to be paid: all of a completed request, what was delivered of a broken one.

    A client that cancels pays the prompt once its prefill had begun, and the output produced.
    """
    if usage is None:
        started = bool(call.prefill_us)
        usage = TokenUsage(call.prompt_tokens if started else 0, 0, call.output_tokens, estimated=True)
    if not charged:
        return Settled(usage, NOTHING, False)
    lines = charge(
        call.card,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=min(usage.cached_tokens, usage.prompt_tokens) if usage.cached_tokens else 0,
        output_tokens=usage.output_tokens,
        gpu_us=gpu_us,
        batch=call.klass.is_batch,
    )
    reservation = call.reservation
    if reservation is None or reservation.purse is None or lines.total_nanos <= reservation.amount_nanos:
        return Settled(usage, lines, True)
    return Settled(usage, capped(lines, reservation.amount_nanos), True, lines.total_nanos - reservation.amount_nanos)


def begun(call: Call, model_id: int, job: str, marks: list[Mark]) -> Begun:
    """The journal's entry of an admitted call."""
    flags = FLAG_ESTIMATED | FLAG_NOT_CHARGED | (FLAG_STREAMED if call.stream else 0)
    queued, reservation = call.queued, call.reservation
    if reservation is not None and isinstance(reservation.purse, SlicePurse):
        flags |= FLAG_OUTAGE
    if call.tokenless:
        flags |= FLAG_TOKENLESS
    return Begun(
        call.request_id, call.arrived_us, call.tenant.policy.id, call.key.live.id, call.klass.policy.id,
        call.asked.policy.id, model_id, job, call.revision, call.card.rate_version, flags,
        0 if queued is None else queued.gpu_us, call.exchange.client_request_id, marks,
    )  # fmt: skip


class Stages:
    """Time in each stage; they add up to the time from the last byte in to the last byte handed out."""

    __slots__ = (
        "admission_us", "batch_wait_us", "decode_us", "prefill_us", "preprocess_us", "queue_us", "return_us",
    )  # fmt: skip

    def __init__(
        self,
        admission_us: int,
        queue_us: int,
        batch_wait_us: int,
        preprocess_us: int,
        prefill_us: int,
        decode_us: int,
        return_us: int,
    ) -> None:
        self.admission_us = admission_us
        self.queue_us = queue_us
        self.batch_wait_us = batch_wait_us
        self.preprocess_us = preprocess_us
        self.prefill_us = prefill_us
        self.decode_us = decode_us
        self.return_us = return_us


def stages_of(call: Call, ended_us: int) -> Stages:
    """Stages that were not reached took no time; the stage in which the call ended takes the rest."""
    # Every instant is at least the one before it: what was not reached is the end.
    arrived, dispatched = call.arrived_us, call.dispatched_us
    parsed = call.parsed_us or ended_us
    admitted = call.admitted_us or ended_us
    admitted = admitted if admitted > parsed else parsed
    if not dispatched:
        return Stages(
            admitted - parsed, ended_us - admitted if ended_us > admitted else 0, 0, parsed - arrived, 0, 0, 0
        )
    dispatched = dispatched if dispatched > admitted else admitted
    batched = (call.batched_us or ended_us) if call.gathers else dispatched
    batched = batched if batched > dispatched else dispatched
    began = call.prefill_us or batched
    began = began if began > batched else batched
    first = call.first_us or ended_us
    first = first if first > began else began
    last = call.last_us or ended_us
    last = last if last > first else first
    return Stages(
        admitted - parsed,
        dispatched - admitted,
        batched - dispatched,
        parsed - arrived + began - batched,
        first - began,
        last - first,
        ended_us - last if ended_us > last else 0,
    )


def closed_row(
    call: Call,
    opened: Begun,
    outcome: Outcome,
    status: int,
    settled: Settled,
    stages: Stages,
    *,
    gpu_us: int,
    ended_us: int,
    slot_id: int,
) -> UsageRow:
    """The record of an ended call."""
    usage, lines, queued = settled.usage, settled.lines, call.queued
    prompt, cached = usage.prompt_tokens, usage.cached_tokens
    flags = opened.flags & (FLAG_STREAMED | FLAG_OUTAGE | FLAG_TOKENLESS)
    flags |= (FLAG_ESTIMATED if usage.estimated else 0) | (0 if settled.charged else FLAG_NOT_CHARGED)
    flags |= FLAG_CAPPED if settled.excess_nanos else 0
    ttft_us = call.first_us - call.arrived_us if call.stream and call.first_us else UNKNOWN
    return UsageRow(
        call.request_id, call.arrived_us, ended_us, 1 if queued is None else queued.attempt, slot_id,
        opened.tenant_id, opened.key_id, opened.class_id, opened.asked_class_id, opened.model_id, opened.job,
        opened.revision, opened.rate_version, OUTCOME_CODES[outcome], status, flags,
        prompt, cached if cached < prompt else prompt, usage.output_tokens,
        stages.admission_us, stages.queue_us, stages.batch_wait_us, stages.preprocess_us, stages.prefill_us,
        stages.decode_us, stages.return_us, ttft_us, gpu_us, opened.estimated_gpu_us,
        lines.prompt_nanos, lines.cached_nanos, lines.output_nanos, lines.gpu_nanos, opened.client_request_id,
    )  # fmt: skip


def closed_entry(
    call: Call,
    outcome: Outcome,
    status: int,
    settled: Settled,
    verdicts: list[Verdict],
    end: ItemEnd | None,
    *,
    gpu_us: int,
    ended_us: int,
    slot_id: int,
) -> Closed:
    """The journal's entry of an ended call, whose reservation is settled: its record and what its lease has spent."""
    assert call.opened is not None
    stages = stages_of(call, ended_us)
    row = closed_row(
        call, call.opened, outcome, status, settled, stages, gpu_us=gpu_us, ended_us=ended_us, slot_id=slot_id
    )
    purse = None if call.reservation is None else call.reservation.purse
    if purse is None:
        return Closed(row, verdicts, False, end)
    return Closed(row, verdicts, False, end, purse.lease_id, purse.settled_nanos)


def measured(call: Call, outcome: Outcome, ended_us: int) -> Measured:
    """What contracts look at."""
    tokens = call.output_tokens
    decode_us = call.last_us - call.first_us
    return Measured(
        call.first_dispatch_us - call.arrived_us if call.first_dispatch_us else None,
        call.first_us - call.arrived_us if call.first_us else None,
        (decode_us // (tokens - 1) if tokens > 1 else 0) if call.first_us else None,
        ended_us - call.arrived_us,
        outcome is Outcome.COMPLETED,
        outcome is Outcome.CANCELLED_BY_CLIENT,
        outcome,
        call.downgraded,
    )
