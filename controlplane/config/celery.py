"""The Celery application.

Messages are doorbells: they carry row ids and re-read intent from rows, so a lost one costs latency and a
doubled one nothing. Tasks acknowledge late and are idempotent.
"""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

app = Celery("flexband")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
