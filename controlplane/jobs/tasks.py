"""Work of batches for the worker: doorbells with row ids, and sweeps that do what a lost bell left undone."""

from celery import shared_task
from django.utils import timezone

from controlplane.core.reasons import Outcome
from controlplane.jobs import assembly, batch_import, batch_sweep, progress
from controlplane.jobs.admitting import give_back
from controlplane.jobs.batch_capacity import measure_efficiencies
from controlplane.jobs.item_sweep import sweep_items
from controlplane.wakeups.bells import ring_now

# One task stays well inside its time limit; what is left of a file is the next one's.
CHUNKS_A_TASK = 400


@shared_task(name="jobs.import_batch")
def import_batch(batch_id: int) -> None:
    """Validates and imports a batch's file, from where the last commit stands."""
    if batch_import.import_batch(batch_id, timezone.now(), chunks_most=CHUNKS_A_TASK):
        ring_now("jobs.import_batch", batch_id=batch_id)


@shared_task(name="jobs.assemble")
def assemble(batch_id: int) -> None:
    """Writes the files of a batch whose job ended."""
    now = timezone.now()
    assembly.begin(batch_id, now)
    assembly.assemble(batch_id, now)


@shared_task(name="jobs.sweep")
def sweep() -> None:
    """Lapsed leases, cancelled and expired jobs, money of those that ended, and what a lost bell should have begun."""
    now = timezone.now()
    batch_sweep.expire(now)
    sweep_items(now)
    give_back(now)
    progress.sample(now)
    batch_sweep.end_cancelled_imports(now)
    for batch_id in batch_sweep.to_import():
        ring_now("jobs.import_batch", batch_id=batch_id)
    for batch_id in batch_sweep.to_assemble():
        ring_now("jobs.assemble", batch_id=batch_id)


@shared_task(name="jobs.retention")
def retention() -> None:
    """Erases files and rows whose time is over; makes the partitions of the days ahead."""
    now = timezone.now()
    batch_sweep.erase_files(now)
    batch_sweep.purge_rows(now)
    progress.purge(now)


@shared_task(name="jobs.measure_efficiency")
def measure_efficiency() -> None:
    """What a batch slot of each pool was worth in the last hour."""
    measure_efficiencies(timezone.now(), completed=Outcome.COMPLETED.code)
