"""What a real night came to, read from the rows of the control plane; imported once Django is set up."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.db.models import F, Sum
from django.utils import timezone

from controlplane.core.flex_decision import CheckUse
from controlplane.core.period import from_us, to_us
from controlplane.experiments.recorded import policy_in_force
from controlplane.fleet.models import Pool
from controlplane.flex.models import Decision, Lend
from controlplane.jobs.models import Batch
from controlplane.usage.models import UsageRecord
from controlplane.wire.policy import PolicyDocument


def document(pool: str) -> PolicyDocument:
    """The policy that the pool's agent had."""
    return policy_in_force(Pool.objects.get(slug=pool))


def real_figures(pool: str, batch_id: str, began_us: int) -> dict[str, Any]:
    """In the form that the simulator's are brought to; instants in seconds from the first arrival on."""
    job = Batch.objects.get(uuid=batch_id.removeprefix("batch_")).job
    assert job is not None, "a batch that was admitted has a job"
    loans = list(Lend.objects.filter(pool__slug=pool, lent_at__gte=from_us(began_us)).select_related("slot"))
    drains = [loan.drain_us for loan in loans if loan.drain_us is not None]
    lent_us = sum(to_us(loan.home_at) - to_us(loan.lent_at) for loan in loans if loan.home_at is not None)
    finished_s = None if job.finished_at is None else (to_us(job.finished_at) - began_us) / 1e6
    again = UsageRecord.objects.filter(job_id=job.pk).aggregate(again=Sum(F("attempt") - 1))["again"]
    spans = decided(pool, began_us, to_us(job.finished_at or timezone.now()))
    return {
        "lends": len(loans),
        "recalls": dict(sorted(Counter(loan.recall_reason for loan in loans if loan.recalled_at).items())),
        "lent_slot_s": lent_us / 1e6,
        "drains": len(drains),
        "drain_longest_s": max(drains) / 1e6 if drains else None,
        "overdue": sum(loan.overdue for loan in loans),
        "loans": [_loan(loan, began_us) for loan in loans],
        "not_lent_s": not_lent_s(spans),
        "frozen_us": frozen_us(spans),
        "job": {
            "items": job.items,
            "done": job.items_completed,
            "parked": job.items_parked,
            "finished_s": finished_s,
            "deadline_s": None if job.deadline is None else (to_us(job.deadline) - began_us) / 1e6,
            "deadline_met": job.finished_at is not None and job.deadline is not None
            and job.finished_at <= job.deadline,
            "gpu_s": job.gpu_us_done / 1e6,
            "preempted": again or 0,
        },
    }  # fmt: skip


def decided(pool: str, began_us: int, until_us: int) -> list[tuple[int, int, set[str]]]:
    """(from, to, checks that kept the controller from lending) in us from the first arrival on, in their order.

    A decision is written when a check flips, so each holds until the next one.
    """
    rows = Decision.objects.filter(pool__slug=pool, at__gte=from_us(began_us), at__lt=from_us(until_us))
    found = [
        (to_us(row.at) - began_us, {check["name"] for check in row.checks if _kept(check)})
        for row in rows.order_by("at", "id")
    ]
    ends = [*(at_us for at_us, _ in found[1:]), until_us - began_us]
    return [(at_us, end_us, names) for (at_us, names), end_us in zip(found, ends, strict=True)]


def _kept(check: dict[str, Any]) -> bool:
    return check["used_for"] == CheckUse.LEND and not check["held"]


def not_lent_s(spans: list[tuple[int, int, set[str]]]) -> dict[str, float]:
    """Seconds for which each check kept the controller from lending one more slot, the longest first."""
    found: Counter[str] = Counter()
    for begin_us, end_us, names in spans:
        for name in names:
            found[name] += end_us - begin_us
    return {name: us / 1e6 for name, us in found.most_common()}


def frozen_us(spans: list[tuple[int, int, set[str]]]) -> list[tuple[int, int]]:
    """When the band was frozen; what still was at the end is frozen on."""
    found = [(begin_us, end_us) for begin_us, end_us, names in spans if "frozen" in names]
    if found and spans[-1][1] == found[-1][1]:
        found[-1] = (found[-1][0], 1 << 62)
    return found


def _loan(loan: Lend, began_us: int) -> dict[str, Any]:
    def seconds(at: Any) -> float | None:
        return None if at is None else (to_us(at) - began_us) / 1e6

    return {
        "slot": loan.slot.name, "lent_s": seconds(loan.lent_at), "recalled_s": seconds(loan.recalled_at),
        "home_s": seconds(loan.home_at), "reason": loan.recall_reason,
        "drain_s": None if loan.drain_us is None else loan.drain_us / 1e6,
    }  # fmt: skip
