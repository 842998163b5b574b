"""What may be done to batches and their files: submit, cancel, retry what was parked, extend, delete."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.db.models import F

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.contracts.models import WorkloadClass
from controlplane.core.batch_items import ItemState
from controlplane.core.job_admission import IfLate
from controlplane.jobs.actions import (
    DEADLINE_MOST,
    IF_LATE_HOW,
    ITEMS_MOST,
    KEY_MOST,
    NAME_MOST,
    KeyReused,
    lock_batch_of,
)
from controlplane.jobs.admitting import reserve_again
from controlplane.jobs.batch_lines import CONTENT
from controlplane.jobs.deadlines import read_deadline
from controlplane.jobs.models import Batch, Job, StoredFile
from controlplane.jobs.uploads import store
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.wakeups.bells import ring

WINDOW: Final = "24h"
METADATA_PAIRS_MOST: Final = 16
METADATA_KEY_MOST: Final = 64
METADATA_VALUE_MOST: Final = 512
BEST_EFFORT_ENDS: Final = timedelta(days=30)
RETRY_FOR: Final = timedelta(hours=24)
RETRIES_MOST: Final = 100_000
REQUESTS_MOST: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """A batch as its owner asks for it. In `metadata`, `class`, `pool`, `deadline`, `best_effort`, `if_late` and `name`
    are read: the Batch form of OpenAI has no fields of its own for them.
    """

    input_file_id: str
    endpoint: str
    completion_window: str = WINDOW
    metadata: dict[str, str] | None = None

    def digest(self) -> str:
        plain = [self.input_file_id, self.endpoint, self.completion_window, self.metadata or {}]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def submit_batch(
    *,
    tenant: Tenant,
    key: ApiKey | None,
    order: BatchOrder,
    actor: Actor,
    now: datetime,
    idempotency_key: str | None = None,
) -> Batch:
    """Takes a batch; its file is validated and imported by a worker. Raises ValidationError by field, KeyReused."""
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= KEY_MOST:
        raise ValidationError({"idempotency_key": f"Use 1 to {KEY_MOST} characters."})
    if found := _known(tenant, order, idempotency_key):
        return found
    values = _checked(tenant, key, order, now)
    try:
        with transaction.atomic():
            batch = Batch.objects.create(
                tenant=tenant, key=key, endpoint=order.endpoint, completion_window=order.completion_window,
                metadata=order.metadata or {}, idempotency_key=idempotency_key, body_digest=order.digest(),
                created_by=actor.name, created_at=now, **values,
            )  # fmt: skip
            record(
                actor=actor, action="batch.submit", noun="batch", object_id=batch.uuid, now=now,
                tenant_slug=tenant.slug,
                after={"file": values["input_file"].uuid, "class": values["class_slug"], "deadline": batch.deadline},
            )  # fmt: skip
            ring("jobs.import_batch", batch_id=batch.pk)
    except IntegrityError:
        if found := _known(tenant, order, idempotency_key):
            return found
        raise
    return batch


def submit_rest(
    *,
    tenant: Tenant,
    key: ApiKey | None,
    values: dict[str, Any],
    actor: Actor,
    now: datetime,
    idempotency_key: str | None,
) -> Batch:
    """A batch by the fields of the REST interface: `input_file`, or `requests` that become a file here.

    The file of the same requests under the same idempotency key is found again. Raises as `submit_batch` does.
    """
    metadata = {name: str(values[name]) for name in ("class", "pool", "name") if values.get(name)}
    if values.get("deadline"):
        metadata["deadline"] = values["deadline"].text
    if values.get("best_effort"):
        metadata["best_effort"] = "true"
    else:
        metadata["if_late"] = values.get("if_late") or IfLate.REFUSE.value
    requests = values.get("requests")
    if requests is not None and values.get("input_file"):
        raise ValidationError({"requests": "Send either requests or input_file."})
    file_id = values.get("input_file", "")
    endpoint = values.get("endpoint") or (str(requests[0].get("url", "")) if requests else "/v1/chat/completions")
    if requests is not None:
        file_id = _inline_file(tenant, requests, actor, now, idempotency_key)
    order = BatchOrder(input_file_id=file_id, endpoint=endpoint, metadata=metadata)
    try:
        return submit_batch(tenant=tenant, key=key, order=order, actor=actor, now=now, idempotency_key=idempotency_key)
    except ValidationError as error:
        fields = error.message_dict if hasattr(error, "error_dict") else {"batch": error.messages}
        renamed = {"input_file_id": "input_file"}
        raise ValidationError(
            {renamed.get(name, name.removeprefix("metadata.")): texts for name, texts in fields.items()}
        ) from None


def _inline_file(tenant: Tenant, requests: list[dict[str, Any]], actor: Actor, now: datetime, key: str | None) -> str:
    content = b"".join(json.dumps(row).encode() + b"\n" for row in requests)
    name = uuid.uuid5(_INLINE, f"{tenant.pk} {key} {hashlib.sha256(content).hexdigest()}") if key else uuid.uuid4()
    file_id = f"file-{name.hex}"
    found = _file_of(tenant, file_id)
    if found is None or found.expires_at <= now:
        store(tenant=tenant, filename="requests.jsonl", pieces=[content], actor=actor, now=now, name=name)
    return file_id


_INLINE = uuid.UUID("6f1f4f3e-0d0b-4b7e-9a55-7d6ad41d7c11")


def _known(tenant: Tenant, order: BatchOrder, key: str | None) -> Batch | None:
    if key is None:
        return None
    batch = Batch.objects.filter(tenant=tenant, idempotency_key=key).first()
    if batch is not None and batch.body_digest != order.digest():
        raise KeyReused("This idempotency key was used for another batch. Use a new key for a new batch.")
    return batch


def _checked(tenant: Tenant, key: ApiKey | None, order: BatchOrder, now: datetime) -> dict[str, Any]:
    """The columns that an order gives. Raises ValidationError by field."""
    if tenant.state != Tenant.State.ACTIVE:
        raise ValidationError({"tenant": f"The tenant {tenant.slug} is {tenant.state}: it can send no batches."})
    if order.endpoint not in CONTENT:
        raise ValidationError({"endpoint": f"Batches are for {', '.join(sorted(CONTENT))}."})
    if order.completion_window != WINDOW:
        raise ValidationError(
            {"completion_window": f"Write {WINDOW}; an earlier or later end goes in metadata as deadline."}
        )
    metadata = _metadata(order.metadata)
    row = batch_class(tenant, key, metadata.get("class", ""))
    deadline = _deadline(metadata, now)
    return {
        "input_file": _input_file(tenant, order.input_file_id, now),
        "class_slug": row.slug,
        "pool_slug": metadata.get("pool", ""),
        "deadline": deadline,
        "if_late": _if_late(metadata),
        "expires_at": _expires(deadline, now),
    }


def _if_late(metadata: dict[str, str]) -> str:
    """Best effort where nothing is said: whoever knows only OpenAI's form expects what was done by its end."""
    chosen = metadata.get("if_late", IfLate.BEST_EFFORT.value)
    if chosen not in tuple(IfLate):
        raise ValidationError({"metadata.if_late": IF_LATE_HOW})
    return chosen


def _expires(deadline: datetime | None, now: datetime) -> datetime:
    return now + BEST_EFFORT_ENDS if deadline is None else max(deadline, now + timedelta(hours=24))


def _metadata(given: dict[str, str] | None) -> dict[str, str]:
    found = given or {}
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in found.items()):
        raise ValidationError({"metadata": "Metadata is an object of texts."})
    if len(found) > METADATA_PAIRS_MOST:
        raise ValidationError({"metadata": f"Metadata has at most {METADATA_PAIRS_MOST} pairs."})
    if any(len(k) > METADATA_KEY_MOST or len(v) > METADATA_VALUE_MOST for k, v in found.items()):
        raise ValidationError(
            {"metadata": f"Keys have at most {METADATA_KEY_MOST} characters, values {METADATA_VALUE_MOST}."}
        )
    if any("\x00" in text for pair in found.items() for text in pair):
        raise ValidationError({"metadata": "A zero character cannot be kept: leave it out."})
    if len(found.get("name", "")) > NAME_MOST:
        raise ValidationError({"metadata.name": f"Use at most {NAME_MOST} characters."})
    return found


def _deadline(metadata: dict[str, str], now: datetime) -> datetime | None:
    best_effort, text = metadata.get("best_effort", "false"), metadata.get("deadline", "")
    if best_effort not in ("true", "false"):
        raise ValidationError({"metadata.best_effort": "Write true or false."})
    if best_effort == "true":
        if text:
            raise ValidationError({"metadata.deadline": "A best-effort batch has no deadline: leave one of them out."})
        return None
    if not text:
        return now + timedelta(hours=24)
    return check_deadline(text, now, field="metadata.deadline")


def check_deadline(text: str, now: datetime, *, field: str) -> datetime:
    """The deadline that a text means. Raises ValidationError for `field`."""
    try:
        at = read_deadline(text, now)
    except ValueError as error:
        raise ValidationError({field: str(error)}) from None
    if at <= now:
        raise ValidationError({field: "The deadline has passed. Choose an instant in the future."})
    if at - now > DEADLINE_MOST:
        raise ValidationError({field: "Choose a deadline within a year."})
    return at


def batch_class(tenant: Tenant, key: ApiKey | None, asked: str) -> WorkloadClass:
    """The batch class asked for, or the key's first. Raises ValidationError when there is none to use."""
    allowed = [slug for slug in (key.classes if key else tenant.classes) if slug in tenant.classes]
    rows = {
        row.slug: row
        for row in WorkloadClass.objects.filter(slug__in=allowed, kind=WorkloadClass.Kind.BATCH).exclude(
            state=WorkloadClass.State.ARCHIVED
        )
    }
    usable = [slug for slug in allowed if slug in rows]
    if key is not None and key.default_class in rows:
        usable.insert(0, key.default_class)
    if not usable:
        raise ValidationError({"metadata.class": "You may use no class of kind batch. Ask for one in your key's list."})
    if asked and asked not in rows:
        names = ", ".join(sorted(set(usable)))
        raise ValidationError({"metadata.class": f"The class {asked!r} is not a batch class of yours. Use {names}."})
    row = rows[asked or usable[0]]
    if row.state == WorkloadClass.State.SUSPENDED:
        raise ValidationError({"metadata.class": f"The class {row.slug} is suspended. Try again when it is resumed."})
    return row


def _input_file(tenant: Tenant, file_id: str, now: datetime) -> StoredFile:
    found = _file_of(tenant, file_id)
    if found is None or found.purpose != StoredFile.Purpose.BATCH or found.expires_at <= now:
        raise ValidationError({"input_file_id": f"You have no batch file {file_id!r}. Upload it with purpose batch."})
    if not found.lines:
        raise ValidationError({"input_file_id": "The file holds no request. Write one JSON object a line."})
    if found.lines > ITEMS_MOST:
        raise ValidationError({"input_file_id": f"The file has {found.lines:,} lines; at most {ITEMS_MOST:,} fit."})
    return found


def _file_of(tenant: Tenant, file_id: str) -> StoredFile | None:
    found = uuid_of(file_id, "file-")
    rows = StoredFile.objects.filter(tenant=tenant, ready_at__isnull=False, deleted_at__isnull=True)
    return None if found is None else rows.filter(uuid=found).first()


def uuid_of(text: str, prefix: str) -> uuid.UUID | None:
    """The UUID in an id such as `file-<32 hex digits>`, or None."""
    try:
        return uuid.UUID(text.removeprefix(prefix)) if text.startswith(prefix) else None
    except ValueError:
        return None


def cancel_batch(*, batch_id: int, actor: Actor, now: datetime, reason: str = "") -> Batch:
    """Ends a batch: nothing more is leased, agents drop what they hold with their next report. Ended ones stay."""
    with transaction.atomic():
        batch = Batch.objects.select_for_update(of=("self",)).select_related("tenant").get(pk=batch_id)
        if batch.state not in (Batch.State.VALIDATING, Batch.State.IN_PROGRESS):
            return batch
        before = batch.state
        batch.state, batch.cancelling_at = Batch.State.CANCELLING, now
        batch.save(update_fields=["state", "cancelling_at"])
        if batch.job_id is not None:
            Job.objects.filter(pk=batch.job_id, state__in=(Job.State.RUNNING, Job.State.IMPORTING)).update(
                state=Job.State.CANCELLED, finished_at=now, version=F("version") + 1
            )
        record(
            actor=actor, action="batch.cancel", noun="batch", object_id=batch.uuid, now=now,
            tenant_slug=batch.tenant.slug, before={"state": before}, after={"state": batch.state}, reason=reason,
        )  # fmt: skip
        ring("jobs.sweep")
    return batch


def delete_file(*, tenant: Tenant, file_id: str, actor: Actor, now: datetime) -> StoredFile | None:
    """Takes a file from its owner's sight at once; its bytes are erased by a worker. None: there is no such file.

    Raises ValidationError while a batch still reads it.
    """
    with transaction.atomic():
        found = _file_of(tenant, file_id)
        if found is None:
            return None
        if Batch.objects.filter(input_file=found, state=Batch.State.VALIDATING).exists():
            raise ValidationError({"file_id": "A batch is reading this file. Cancel the batch, or wait until it runs."})
        StoredFile.objects.filter(pk=found.pk).update(deleted_at=now)
        record(
            actor=actor, action="file.delete", noun="file", object_id=found.uuid, now=now, tenant_slug=tenant.slug,
            before={"filename": found.filename, "size_bytes": found.size_bytes},
        )  # fmt: skip
        ring("jobs.retention")
    return found


_RETRY_SQL = """
WITH picked AS (
    SELECT line FROM jobs_item WHERE day = %(day)s AND job_id = %(job)s AND state = %(parked)s
    ORDER BY line LIMIT %(limit)s FOR UPDATE
), dropped AS (
    DELETE FROM jobs_itemresult r USING picked
    WHERE r.day = %(day)s AND r.job_id = %(job)s AND r.line = picked.line
)
UPDATE jobs_item i SET state = 0, attempt = attempt + 1, failures = 0, reason = ''
FROM picked WHERE i.day = %(day)s AND i.job_id = %(job)s AND i.line = picked.line
"""


def retry_parked(
    *, job_uuid: uuid.UUID, actor: Actor, now: datetime, reason: str = "", noted: dict[str, Any] | None = None
) -> int:
    """Makes the parked items of a job leasable again, as often as a new item may fail; returns how many.

    A job that was completed runs again, and its files are assembled anew when it ends. `noted` goes into the audit log
    beside what changed. Raises ValidationError for a job whose parked items are no more.
    """
    with transaction.atomic():
        batch = lock_batch_of(job_uuid)
        job = Job.objects.get(uuid=job_uuid)
        _check_retry(job, batch)
        with connection.cursor() as cursor:
            cursor.execute(
                _RETRY_SQL,
                {"day": job.day, "job": job.pk, "parked": int(ItemState.PARKED), "limit": RETRIES_MOST},
            )
            retried = cursor.rowcount
        if not retried:
            return 0
        job = Job.objects.select_for_update(of=("self",)).select_related("tenant").get(uuid=job_uuid)
        _check_retry(job, batch)
        reserve_again(job, retried, now)
        Job.objects.filter(pk=job.pk).update(
            items_parked=job.items_parked - retried, state=Job.State.RUNNING, finished_at=None, version=job.version + 1
        )
        if batch is not None:
            # one whose time is over has a day more: else the next sweep would end what was just begun
            Batch.objects.filter(pk=batch.pk).update(
                state=Batch.State.IN_PROGRESS, finalizing_at=None, completed_at=None,
                expires_at=max(batch.expires_at, now + RETRY_FOR),
            )  # fmt: skip
        record(
            actor=actor, action="job.retry_parked", noun="job", object_id=job.uuid, now=now,
            tenant_slug=job.tenant.slug, before={"parked": job.items_parked, "state": job.state},
            after={"parked": job.items_parked - retried, "state": "running", **(noted or {})}, reason=reason,
        )  # fmt: skip
    return retried


def _check_retry(job: Job, batch: Batch | None) -> None:
    if not job.has_items or job.state not in (Job.State.RUNNING, Job.State.COMPLETED):
        raise ValidationError({"job": f"The job is {job.state}: it has no items to try again."})
    if job.rows_purged_at is not None:
        raise ValidationError({"job": "The items of this job are no longer kept. Submit the lines that failed."})
    if batch is not None and batch.state == Batch.State.FINALIZING:
        raise ValidationError({"job": "Its files are being assembled. Try again in a minute."})


def extend_deadline(
    *,
    job_uuid: uuid.UUID,
    deadline: datetime,
    actor: Actor,
    now: datetime,
    reason: str = "",
    noted: dict[str, Any] | None = None,
) -> Job:
    """Moves the deadline of a running job to a later instant; `noted` goes into the audit log beside what changed.

    Raises ValidationError by field.
    """
    with transaction.atomic():
        lock_batch_of(job_uuid)
        job = Job.objects.select_for_update(of=("self",)).select_related("tenant").get(uuid=job_uuid)
        before = job.deadline
        if job.state != Job.State.RUNNING:
            raise ValidationError({"job": f"The job is {job.state}: its deadline no longer counts."})
        if before is None:
            raise ValidationError({"deadline": "The job is best effort: it has no deadline to extend."})
        if deadline <= max(before, now):
            raise ValidationError({"deadline": "Choose an instant after the present deadline and after now."})
        if deadline - now > DEADLINE_MOST:
            raise ValidationError({"deadline": "Choose a deadline within a year."})
        Job.objects.filter(pk=job.pk).update(deadline=deadline, version=job.version + 1)
        Batch.objects.filter(job=job).update(deadline=deadline, expires_at=_expires(deadline, now))
        record(
            actor=actor, action="job.extend_deadline", noun="job", object_id=job.uuid, now=now,
            tenant_slug=job.tenant.slug, before={"deadline": before}, after={"deadline": deadline, **(noted or {})},
            reason=reason,
        )  # fmt: skip
    job.refresh_from_db()
    return job
