"""Calendar work of the book: attribution of what is open. It may run at any time, any number of times, doubled too."""

from celery import shared_task
from django.utils import timezone

from controlplane.ledger.balance_sums import fold_balances
from controlplane.ledger.charging import post_due_charges
from controlplane.ledger.exports import run_export, waiting_exports
from controlplane.ledger.invoice_uploads import drop_old_uploads
from controlplane.ledger.periods import settle_closed
from controlplane.ledger.settling import attribute_open as attribute_open_hours
from controlplane.tenants.models import Installation


class NotAttributed(Exception):
    """Hours of some pools could not be attributed: their slugs; the log says why for each."""


@shared_task(name="ledger.attribute_open", ignore_result=True)
def attribute_open() -> int:
    """Attributes open and changed hours of every pool; returns how many intervals changed.

    Raises NotAttributed after all pools were tried, so that the task counts as failed.
    """
    if not Installation.objects.filter(pk=1).exists():
        return 0
    settled = attribute_open_hours(timezone.now())
    if settled.failed:
        raise NotAttributed(", ".join(settled.failed))
    return settled.changed


@shared_task(name="ledger.post_charges", ignore_result=True)
def post_days() -> int:
    """Books what days that are over were charged; returns how many events were posted."""
    if not Installation.objects.filter(pk=1).exists():
        return 0
    return len(post_due_charges(timezone.now()))


@shared_task(name="ledger.settle_closed", ignore_result=True)
def settle_closed_months() -> int:
    """Late usage of closed months becomes adjustments of the open one; returns how many events were posted."""
    if not Installation.objects.filter(pk=1).exists():
        return 0
    return len(settle_closed(timezone.now()))


@shared_task(name="ledger.export", ignore_result=True)
def make_export(job_id: int) -> bool:
    """Makes one export that is asked for; a doubled message does nothing."""
    return run_export(job_id, now=timezone.now())


@shared_task(name="ledger.sweep_exports", ignore_result=True)
def sweep_exports() -> int:
    """Exports whose message or worker was lost, the end of old ones and of files that nobody imported.

    Returns how many exports were taken up.
    """
    now = timezone.now()
    drop_old_uploads(now)
    return sum(run_export(job_id, now=now) for job_id in waiting_exports(now))


@shared_task(name="ledger.fold_balances", ignore_result=True)
def fold() -> int:
    """Folds transfers into balances; returns how many numbers of transfers it went over."""
    return fold_balances(timezone.now())
