"""Doorbells: after the commit that wrote the intent, tell a worker to look. A lost ring costs latency only."""

import logging
from typing import Any

from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError

log = logging.getLogger(__name__)


def ring(task: str, **ids: Any) -> None:
    """Sends `task` with row ids once the present transaction commits; a broker that is down is logged, not raised.

    Beat sweeps the same rows, so what a lost ring would have started begins with the next sweep.
    """
    transaction.on_commit(lambda: ring_now(task, **ids))


def ring_now(task: str, **ids: Any) -> None:
    try:
        current_app.send_task(task, kwargs=ids, ignore_result=True)
    except (OperationalError, OSError) as error:
        log.warning("broker unreachable, %s waits for the next sweep: %s", task, error)
