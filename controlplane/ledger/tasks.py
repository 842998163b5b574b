"""Calendar work of the book: attribution of what is open. It may run at any time, any number of times, doubled too."""

from celery import shared_task
from django.utils import timezone

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
