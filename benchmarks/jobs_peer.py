"""The peer: one Celery task per item, on the same broker and the same database, as a project would begin.

Each task reads its item, marks it done and writes its result through the ORM in one transaction.
"""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

import django

django.setup()

from celery import shared_task  # noqa: E402 - needs the app registry
from django.db import transaction  # noqa: E402
from django.utils import timezone  # noqa: E402

from controlplane.config.celery import app  # noqa: E402
from controlplane.jobs.models import Item, ItemBody, ItemResult  # noqa: E402

__all__ = ["app"]


@shared_task(name="benchmark.item", ignore_result=True)
def run_item(day: str, job_id: int, line: int) -> None:
    ItemBody.objects.get(day=day, job_id=job_id, line=line)
    with transaction.atomic():
        Item.objects.filter(day=day, job_id=job_id, line=line, state=0).update(state=2)
        ItemResult.objects.create(
            day=day, job_id=job_id, line=line, attempt=1, agent_id=1, outcome=1, status=200,
            request_id="00000000-0000-0000-0000-000000000000", finished_at=timezone.now(), response=b'{"ok":true}',
        )  # fmt: skip
