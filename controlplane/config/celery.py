"""The Celery application.

Messages are doorbells: they carry row ids and re-read intent from rows, so a lost one costs latency and a
doubled one nothing. Tasks acknowledge late and are idempotent.
"""

import os
from typing import Any

from celery import Celery
from celery.signals import worker_init

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

app = Celery("flexband")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@worker_init.connect
def leave_nothing_behind(sender: Any, **_: Any) -> None:
    """Workers tell each other nothing: what a killed one had bound to hear others would stay on the broker."""
    sender.options.update(without_gossip=True, without_mingle=True, without_heartbeat=True)
