"""Admitting a job: its deadline against what the pool has promised, then its money, in the transaction of its caller.

Jobs of one pool are decided one after the other, so that two at once are never promised the same slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import connection, transaction

from controlplane.budgets.job_reservations import Reserved, open_reservations, release, reserve
from controlplane.core.estimate import prompt_tokens_bound
from controlplane.core.flex_snapshot import BatchJob
from controlplane.core.job_admission import IfLate, JobAdmission, JobVerdict, admit_job
from controlplane.core.job_money import JobSize, job_bound_nanos, job_estimate_nanos
from controlplane.core.money import NANOS_PER_UNIT
from controlplane.core.period import format_utc, from_us, to_us
from controlplane.core.pricing import RateCard
from controlplane.jobs.batch_capacity import capacity_of, efficiencies
from controlplane.jobs.direct_work import direct_work
from controlplane.jobs.models import Job
from controlplane.jobs.queries import MISSED_GRACE, demanded_gpu_us, estimate_of
from controlplane.ledger.rate_queries import live_cards

DEADLINE_CODE: Final = "deadline_cannot_be_met"
MONEY_CODE: Final = "budget_exhausted"
# A declared job says tokens, agents reserve by bytes: no usual text has more bytes a token than this.
BYTES_A_TOKEN: Final = 8
_GRACE_US: Final = int(MISSED_GRACE.total_seconds() * 1_000_000)


class NotAdmitted(ValidationError):
    """A job that was refused, with what it would have needed. `retry_at` is when the window that blocks ends."""

    def __init__(self, code: str, message: str, arithmetic: dict[str, Any], retry_at: datetime | None = None) -> None:
        super().__init__({"deadline" if code == DEADLINE_CODE else "job": message})
        self.refusal = code
        self.words = message
        self.arithmetic = arithmetic
        self.retry_at = retry_at


@dataclass(frozen=True, slots=True)
class Bounds:
    """Sums over a job's items of what they can be at most: bytes of their prompts and tokens of their outputs."""

    prompt_bytes: int
    output_tokens: int


def declared_bounds(job: Job) -> Bounds:
    """Those of a job whose items only its client knows."""
    row = job.workload_class
    output = max(job.expected_output_tokens, min(row.default_output_tokens, row.max_output_tokens))
    return Bounds(job.items * job.prompt_tokens * BYTES_A_TOKEN, job.items * output)


def admit(job: Job, *, if_late: IfLate, bounds: Bounds, now: datetime) -> JobAdmission:
    """Decides on a job that was just made, reserves its money, and writes both to its row.

    A job that is admitted as best effort though it asked for a deadline loses it. Must run in a transaction.
    Raises NotAdmitted.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('jobs_admission'), %s)", (job.pool_id,))
    decided = _decide(job, if_late, now)
    size = _size(job, bounds)
    estimate_us = job.items * estimate_of(job, job.pool).gpu_us_per_item
    cards = _cards(job, now)
    estimate_nanos = job_estimate_nanos(cards[0], size, gpu_us=estimate_us) if cards else None
    bound_nanos = job_bound_nanos(cards, size, stage_timeout_us=job.workload_class.stage_timeout_s * 1_000_000)
    arithmetic = as_json(decided) | {"estimated_charge_nanos": estimate_nanos, "bound_nanos": bound_nanos}
    if decided.verdict is JobVerdict.REFUSED:
        raise NotAdmitted(DEADLINE_CODE, _late_words(decided), arithmetic)
    with connection.cursor() as cursor:
        reserved = reserve(cursor, tenant_id=job.tenant_id, job=job.uuid, amount_nanos=bound_nanos, now=now)
    if reserved.blocked_by is not None:
        retry_at = from_us(reserved.blocked_by.ends_at_us)
        raise NotAdmitted(MONEY_CODE, _money_words(reserved, bound_nanos, estimate_nanos), arithmetic, retry_at)
    if decided.verdict is JobVerdict.BEST_EFFORT:
        job.deadline = None
    job.admission, job.reserved_nanos = arithmetic, reserved.amount_nanos
    job.estimated_gpu_us, job.estimated_charge_nanos = estimate_us, estimate_nanos
    job.save(update_fields=["deadline", "admission", "reserved_nanos", "estimated_gpu_us", "estimated_charge_nanos"])
    return decided


def _decide(job: Job, if_late: IfLate, now: datetime) -> JobAdmission:
    worth = efficiencies([job.pool_id], now).get(job.pool_id, 1.0)
    running = Job.objects.filter(pool_id=job.pool_id, state=Job.State.RUNNING, deadline__isnull=False)
    others = [_batch_job(other, demanded_gpu_us(other, job.pool, worth)) for other in running.exclude(pk=job.pk)]
    others += [
        BatchJob(name=f"direct {number}", remaining_gpu_us=us, deadline_us=to_us(due))
        for number, (us, due) in enumerate(direct_work([job.pool_id], now).get(job.pool_id, ()))
    ]
    new = _batch_job(job, job.items * estimate_of(job, job.pool).gpu_us_per_item)
    return admit_job(
        new, others, capacity_of(job.pool, now), if_late=if_late, now_us=to_us(now), missed_grace_us=_GRACE_US
    )


def _batch_job(job: Job, gpu_us: int) -> BatchJob:
    return BatchJob(
        name=str(job.uuid), remaining_gpu_us=gpu_us, deadline_us=None if job.deadline is None else to_us(job.deadline)
    )


def _size(job: Job, bounds: Bounds) -> JobSize:
    allowance = prompt_tokens_bound(0, job.workload_class.template_allowance_tokens)
    return JobSize(
        items=job.items,
        prompt_tokens=job.items * job.prompt_tokens,
        output_tokens=job.items * job.expected_output_tokens,
        prompt_bound_tokens=bounds.prompt_bytes + job.items * allowance,
        output_bound_tokens=bounds.output_tokens,
    )


def _cards(job: Job, now: datetime) -> list[RateCard]:
    """The card in force, then those that begin before the job is due; its items are charged by one of them."""
    until = job.deadline or datetime.max.replace(tzinfo=now.tzinfo)
    key = (job.workload_class.slug, job.pool.model_id)
    return [
        RateCard(
            row.prompt_nanos_per_mtok, row.cached_nanos_per_mtok, row.output_nanos_per_mtok,
            row.gpu_nanos_per_slot_hour, row.discount_ppm, row.pk,
        )
        for row in live_cards(now)
        if (row.class_slug, row.model_id) == key and row.effective_from <= until
    ]  # fmt: skip


def as_json(decided: JobAdmission) -> dict[str, Any]:
    """The arithmetic as it is kept and shown: slots as decimals, None where there is no number."""
    capacity = decided.capacity
    return {
        "verdict": decided.verdict.value,
        "required": _number(decided.required),
        "available": _number(capacity.floor),
        "available_with_band": _number(capacity.with_band),
        "slack": _number(decided.slack),
        "slack_with_band": _number(decided.slack_with_band),
        "work_gpu_us": decided.work_gpu_us,
        "due_at": None if decided.due_us is None else format_utc(from_us(decided.due_us)),
    }


def _number(value: Any) -> float | None:
    return None if value is None else round(float(value), 4)


def _late_words(decided: JobAdmission) -> str:
    assert decided.required is not None and decided.due_us is not None
    capacity = decided.capacity
    return (
        f"The deadline cannot be met: {decided.work_gpu_us / 3_600_000_000:,.2f} slot-hours are due by"
        f" {format_utc(from_us(decided.due_us))}, this job among them, which is {float(decided.required):,.2f} slots;"
        f" batch has {float(capacity.floor):,.2f} and {float(capacity.with_band):,.2f} with all that the flex band may"
        f" lend ({_slack_words(decided.slack)} and {_slack_words(decided.slack_with_band)})."
        " Choose a later deadline, send less, or set if_late to best_effort to have it run behind everything else."
    )


def _slack_words(slack: Any) -> str:
    return "no slack" if slack is None else f"slack {float(slack):,.2f}".replace("-", "\N{MINUS SIGN}")


def _money_words(reserved: Reserved, bound_nanos: int, estimate_nanos: int | None) -> str:
    blocked = reserved.blocked_by
    assert blocked is not None
    estimate = "" if estimate_nanos is None else f" (expected: {_money(estimate_nanos)})"
    return (
        f"The budget of {blocked.level}, {blocked.window}, has {_money(blocked.remaining_nanos)} left, and this job can"
        f" be charged up to {_money(bound_nanos)}{estimate}. The window ends at"
        f" {format_utc(from_us(blocked.ends_at_us))}. Send less, ask for fewer output tokens, or have the limit raised."
    )


def _money(nanos: int) -> str:
    units, rest = divmod(nanos, NANOS_PER_UNIT)
    return f"{units:,}.{rest // 100_000:04d}"


def reserve_again(job: Job, items: int, now: datetime) -> None:
    """Money for items of a job that ended and run again, as much for each as at its submission; none while the job
    still has its reservation. Raises NotAdmitted.
    """
    if not job.reserved_nanos or job.state == Job.State.RUNNING:
        return
    amount = -(-job.reserved_nanos * items // job.items)
    with connection.cursor() as cursor:
        # what a sweep has not yet given back must not stand in the way
        release(cursor, [job.uuid], now)
        reserved = reserve(cursor, tenant_id=job.tenant_id, job=job.uuid, amount_nanos=amount, now=now)
    if reserved.blocked_by is not None:
        retry_at = from_us(reserved.blocked_by.ends_at_us)
        raise NotAdmitted(MONEY_CODE, _money_words(reserved, amount, None), {"bound_nanos": amount}, retry_at)


def give_back(now: datetime) -> int:
    """Ends the reservations of jobs that run no longer; returns the nanos that no agent holds of them."""
    with connection.cursor() as cursor:
        named = open_reservations(cursor)
    going_on = (Job.State.RUNNING, Job.State.IMPORTING)
    ended = Job.objects.filter(uuid__in=named).exclude(state__in=going_on).order_by("pk").values_list("uuid", flat=True)
    back = 0
    for job in list(ended):
        with transaction.atomic(), connection.cursor() as cursor:
            # one that was made to run again meanwhile keeps its money
            held = Job.objects.select_for_update().filter(uuid=job).exclude(state__in=going_on)
            if held.exists():
                back += release(cursor, [job], now)
    return back
