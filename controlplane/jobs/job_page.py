"""What a job's page shows beside its row: its counts, its line over the flex strip, estimate beside actual."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection

from controlplane.contracts.models import WorkloadClass
from controlplane.core.estimate import WorkRates, raw_gpu_us
from controlplane.fleet.models import Slot, SlotInterval
from controlplane.jobs import progress, queries, timeline
from controlplane.jobs.direct_work import SILENT_S
from controlplane.jobs.downloads import batch_of
from controlplane.jobs.item_leases import in_turn
from controlplane.jobs.models import Batch, Job
from controlplane.jobs.queries import JobStatus
from controlplane.jobs.timeline import Figure, Span, Timeline
from controlplane.tenants.models import ApiKey, Tenant

SPANS_MOST = 2_000


@dataclass(frozen=True, slots=True)
class Estimated:
    """What was expected by tokens and the pool's constants, beside what was measured. None: not known yet."""

    item_us: int
    measured_item_us: int | None
    total_us: int
    spent_us: int
    finish_at: datetime | None
    charge_nanos: int | None
    expected_nanos: int | None
    reserved_nanos: int

    @property
    def ratio(self) -> float | None:
        """Measured over estimated, of one item."""
        return None if self.measured_item_us is None else self.measured_item_us / self.item_us


_PRESENT_SQL = """
SELECT sum(coalesce((t.row ->> 'running')::int + (t.row ->> 'depth')::int, 0))::int
FROM fleet_agentlive l
LEFT JOIN LATERAL jsonb_path_query(l.figures, '$.tenants[*]') AS t (row) ON (t.row ->> 'tenant_id')::int = %s
WHERE l.reported_at > %s
"""


@dataclass(frozen=True, slots=True)
class Places:
    """How many requests of a tenant may be there at once, and how many agents said are, items that began among them;
    `present` None: no agent said anything lately.
    """

    limit: int
    present: int | None

    @property
    def full(self) -> bool:
        return self.present is not None and self.present >= self.limit


def places_of(job: Job, now: datetime) -> Places | None:
    """The places that a running job's items share with everything else its tenant sends."""
    if job.state != Job.State.RUNNING or not job.has_items:
        return None
    with connection.cursor() as cursor:
        cursor.execute(_PRESENT_SQL, (job.tenant_id, now - timedelta(seconds=SILENT_S)))
        return Places(job.tenant.max_concurrency, cursor.fetchone()[0])


def held_back(job: Job) -> str:
    """Why no item of a running job is leased, whatever is free, and what ends it; empty where nothing holds it back."""
    if job.state != Job.State.RUNNING or not job.has_items:
        return ""
    if job.tenant.state != Tenant.State.ACTIVE:
        return f"The tenant {job.tenant.slug} is {job.tenant.state}: they go on when it is resumed."
    row = job.workload_class
    if row.state != WorkloadClass.State.ACTIVE:
        return f"The class {row.slug} is {row.state}: they go on when it is resumed."
    if job.key is not None and job.key.state != ApiKey.State.ACTIVE:
        return "The key that submitted it is revoked: cancel it, and submit the file again with a key in force."
    return ""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Jobs whose items are leased before a job's: how many, and how many items they have left."""

    jobs: int
    items: int


def ahead_of(job: Job, now: datetime) -> Ahead | None:
    """Who goes first in a running job's pool and class; None where nobody does, or its own turn does not come."""
    if job.state != Job.State.RUNNING or not job.has_items or not queries.unfinished_items(job):
        return None
    with connection.cursor() as cursor:
        line, _ = in_turn(cursor, job.pool_id, job.workload_class_id, now)
    places = {each.id: place for place, each in enumerate(line)}
    first = line[: places.get(job.pk, 0)]
    return Ahead(len(first), sum(each.unfinished for each in first)) if first else None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything of one job at one instant. `strip` is for staff: slots belong to the pool, not to a tenant."""

    status: JobStatus
    batch: Batch | None
    estimated: Estimated
    figure: Figure
    text: str
    strip: Timeline | None
    live: bool
    places: Places | None
    ahead: Ahead | None

    @property
    def job(self) -> Job:
        return self.status.job

    @property
    def held_back(self) -> str:
        return held_back(self.job)

    @property
    def title(self) -> str:
        """What the chart shows: the strip is under the line for staff only."""
        return (
            "Done over time, above the flex slots of its pool (thick: lent, thin: at home, dotted: on the way home)"
            if self.strip
            else "Done over time"
        )

    @property
    def verdict(self) -> str:
        """How it was admitted, in words."""
        return str((self.job.admission or {}).get("verdict", "")).replace("_", " ").capitalize()

    @property
    def attempts(self) -> int:
        """Attempts that ended with an answer or a failure; lapsed leases are none."""
        return self.job.items_completed + self.job.items_failed

    @property
    def counts(self) -> list[tuple[str, int, float, str]]:
        """(name, items, share of all, colour) that add up to all items."""
        job = self.job
        rows = [
            ("Done", job.items_completed, "var(--series-1)"),
            ("Parked", job.items_parked, "var(--series-2)"),
            ("Cancelled", job.items_cancelled, "var(--series-5)"),
            ("Left", self.status.unfinished, "var(--line-strong)"),
        ]
        return [(name, items, items / job.items, colour) for name, items, colour in rows]

    @property
    def written_deadline(self) -> str:
        """The deadline as its owner wrote it; empty where it was given otherwise."""
        return str(self.batch.metadata.get("deadline", "")) if self.batch else ""

    @property
    def told(self) -> list[tuple[str, str]]:
        """Metadata of the batch as it was sent."""
        return sorted(self.batch.metadata.items()) if self.batch else []

    @property
    def may_retry(self) -> bool:
        """Whether parked items can be tried again: their rows are kept, and no file is being written."""
        job, batch = self.job, self.batch
        if not job.items_parked or not job.has_items or job.rows_purged_at is not None:
            return False
        finalizing = batch is not None and batch.state == Batch.State.FINALIZING
        return job.state in (Job.State.RUNNING, Job.State.COMPLETED) and not finalizing


def facts_of(job: Job, now: datetime, *, staff: bool) -> Facts:
    """Reads what belongs to a job: its samples, and for staff the flex slots of its pool since its submission."""
    points = progress.points(job, now)
    strip = timeline.timeline(points, job.items, _spans(job, now), job.deadline, now) if staff else None
    figure = strip.figure if strip else timeline.figure_of_progress(points, job.items, job.deadline)
    return Facts(
        status=queries.status_of(job, now),
        batch=batch_of(job),
        estimated=_estimated(job, now),
        figure=figure,
        text=strip.text if strip else timeline.text_of_progress(points, job.items),
        strip=strip,
        live=job.state in (Job.State.RUNNING, Job.State.IMPORTING),
        places=places_of(job, now),
        ahead=ahead_of(job, now),
    )


def _spans(job: Job, now: datetime) -> list[Span]:
    rows = SlotInterval.objects.filter(
        slot__pool=job.pool, slot__band=Slot.Band.FLEX, started_at__lt=job.finished_at or now
    ).exclude(ended_at__lte=job.created_at)
    newest = rows.order_by("-started_at").values_list("slot__name", "state", "started_at", "ended_at")
    return [Span(*row) for row in newest[:SPANS_MOST]]


def _estimated(job: Job, now: datetime) -> Estimated:
    rates = WorkRates(job.pool.prefill_us_per_token, job.pool.decode_us_per_token)
    item_us = max(1, raw_gpu_us(rates, job.prompt_tokens, job.expected_output_tokens))
    measured = round(job.gpu_us_done / job.items_completed) if job.items_completed and job.gpu_us_done else None
    return Estimated(
        item_us=item_us,
        measured_item_us=measured,
        total_us=job.estimated_gpu_us or item_us * job.items,
        spent_us=job.gpu_us_done,
        finish_at=queries.estimated_finish(job, now),
        # only items that run here are charged to the job's own account
        charge_nanos=job.charge_nanos if job.has_items else None,
        expected_nanos=job.estimated_charge_nanos,
        reserved_nanos=job.reserved_nanos,
    )
