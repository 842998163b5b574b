"""Work of alerts for the worker."""

from celery import shared_task
from django.utils import timezone

from controlplane.alerts.delivering import PER_ROUND, send_due
from controlplane.wakeups.bells import ring_now


@shared_task(name="alerts.send")
def send() -> None:
    """Sends the messages that are due; rings again while a round is full."""
    if send_due(timezone.now()) >= PER_ROUND:
        ring_now("alerts.send")
