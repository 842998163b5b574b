"""What may be done to jobs: declare one, cancel one."""

import hashlib
import json
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.contracts.models import WorkloadClass
from controlplane.core.job_admission import IfLate
from controlplane.fleet.models import Pool
from controlplane.jobs.admitting import admit, declared_bounds
from controlplane.jobs.item_partitions import day_of
from controlplane.jobs.models import Batch, Job
from controlplane.tenants.models import Tenant
from controlplane.wakeups.bells import ring

ITEMS_MOST = 10_000_000
TOKENS_MOST = 2_000_000_000
DEADLINE_MOST = timedelta(days=366)
NAME_MOST = 120
IF_LATE_HOW = "Write refuse, or best_effort to have it run behind everything else when its deadline cannot be met."
KEY_MOST = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """A job as its owner declares it. `prompt_tokens` and `expected_output_tokens` are those of one item.

    `deadline` None takes the class's default; `best_effort` has no deadline at all. `if_late` says what becomes of it
    when its deadline cannot be met (`core.job_admission.IfLate`). `pool` empty is chosen: the one pool that serves the
    class (and `model`, where given). `clock` is the deadline as it was written where that is a time and a zone.
    """

    class_slug: str
    items: int
    prompt_tokens: int
    expected_output_tokens: int
    name: str = ""
    pool: str = ""
    model: str = ""
    deadline: datetime | None = None
    best_effort: bool = False
    if_late: str = IfLate.REFUSE.value
    clock: str = ""

    def digest(self) -> str:
        """The same for the same order: an idempotency key may not be used for another one."""
        plain = {**asdict(self), "deadline": self.deadline.isoformat() if self.deadline else None}
        # a time and a zone are the same order tomorrow
        plain["deadline"] = plain.pop("clock") or plain["deadline"]
        if self.if_late == IfLate.REFUSE:
            # as orders were told apart before there was a choice
            del plain["if_late"]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class KeyReused(Exception):
    """The idempotency key was used before, for another order."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """`repeated`: the same key with the same order was taken before; `job` is that one."""

    job: Job
    repeated: bool


def submit_job(
    *,
    tenant: Tenant,
    order: JobOrder,
    actor: Actor,
    now: datetime,
    idempotency_key: str | None = None,
    allowed_classes: list[str] | None = None,
) -> Submitted:
    """Takes a job of a tenant. `allowed_classes` limits the classes further (an API key's list).

    Raises ValidationError by field, KeyReused when the key belongs to another order, NotAdmitted when its deadline or
    its money is not there.
    """
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= KEY_MOST:
        raise ValidationError({"idempotency_key": f"Use 1 to {KEY_MOST} characters."})
    if found := _known(tenant, idempotency_key, order):
        return found
    try:
        with transaction.atomic():
            job = _create(tenant, order, actor, now, idempotency_key, allowed_classes)
    except IntegrityError:
        # another request with the same key was faster; its job is the answer
        if found := _known(tenant, idempotency_key, order):
            return found
        raise
    return Submitted(job, repeated=False)


def cancel_job(
    *, job_uuid: uuid.UUID, actor: Actor, now: datetime, reason: str = "", noted: dict[str, Any] | None = None
) -> Job:
    """Ends a job: its items count as backlog no longer. Cancelling a job that ended changes nothing.

    `noted` goes into the audit log beside what changed: the effect that was shown to who did it.
    """
    with transaction.atomic():
        lock_batch_of(job_uuid)
        job = Job.objects.select_for_update(of=("self",)).select_related("tenant").get(uuid=job_uuid)
        if job.state not in (Job.State.RUNNING, Job.State.IMPORTING):
            return job
        before = job.state
        job.state, job.finished_at, job.version = Job.State.CANCELLED, now, job.version + 1
        job.save(update_fields=["state", "finished_at", "version"])
        if job.has_items:
            open_states = (Batch.State.VALIDATING, Batch.State.IN_PROGRESS)
            Batch.objects.filter(job=job, state__in=open_states).update(state=Batch.State.CANCELLING, cancelling_at=now)
            ring("jobs.sweep")
        record(
            actor=actor, action="job.cancel", noun="job", object_id=job.uuid, now=now, tenant_slug=job.tenant.slug,
            before={"state": before},
            after={"state": "cancelled", "items_completed": job.items_completed, "items": job.items, **(noted or {})},
            reason=reason,
        )  # fmt: skip
    return job


def lock_batch_of(job_uuid: uuid.UUID) -> Batch | None:
    """The batch of a job, locked. Everybody locks a batch, then items, then the job: two who did it the other way round
    would wait for each other.
    """
    return Batch.objects.select_for_update(of=("self",)).filter(job__uuid=job_uuid).first()


def _known(tenant: Tenant, key: str | None, order: JobOrder) -> Submitted | None:
    if key is None:
        return None
    job = Job.objects.filter(tenant=tenant, idempotency_key=key).first()
    if job is None:
        return None
    if job.body_digest != order.digest():
        raise KeyReused("This idempotency key was used for another job. Use a new key for a new job.")
    return Submitted(job, repeated=True)


def create_job(*, tenant: Tenant, order: JobOrder, actor: Actor, now: datetime, batch: Batch) -> Job:
    """The job of a batch whose import begins; its items follow. Raises ValidationError by field."""
    return _create(tenant, order, actor, now, None, None, batch)


def _create(
    tenant: Tenant,
    order: JobOrder,
    actor: Actor,
    now: datetime,
    key: str | None,
    allowed_classes: list[str] | None,
    batch: Batch | None = None,
) -> Job:
    _check_numbers(order)
    if tenant.state != Tenant.State.ACTIVE:
        raise ValidationError({"tenant": f"The tenant {tenant.slug} is {tenant.state}: it can send no jobs."})
    row = _class_of(tenant, order, allowed_classes)
    job = Job.objects.create(
        tenant=tenant,
        workload_class=row,
        pool=_pool_of(tenant, row, order),
        name=order.name,
        idempotency_key=key,
        body_digest=order.digest(),
        items=order.items,
        prompt_tokens=order.prompt_tokens,
        expected_output_tokens=order.expected_output_tokens,
        deadline=_deadline(row, order, now) if batch is None else order.deadline,
        created_by=actor.name if batch is None else batch.created_by,
        created_at=now if batch is None else batch.created_at,
        **({} if batch is None else _of_batch(batch, now)),
    )
    decided = None
    if batch is None:
        decided = admit(job, if_late=IfLate(order.if_late), bounds=declared_bounds(job), now=now)
    record(
        actor=actor, action="job.submit", noun="job", object_id=job.uuid, now=now, tenant_slug=tenant.slug,
        after={
            "class": row.slug, "pool": job.pool.slug, "items": job.items, "prompt_tokens": job.prompt_tokens,
            "expected_output_tokens": job.expected_output_tokens, "deadline": job.deadline,
            "admitted": None if decided is None else decided.verdict.value, "reserved_nanos": job.reserved_nanos,
        },
    )  # fmt: skip
    return job


def _of_batch(batch: Batch, now: datetime) -> dict[str, Any]:
    return {
        "has_items": True,
        "day": day_of(now),
        "key": batch.key,
        "endpoint": batch.endpoint,
        "state": Job.State.IMPORTING,
    }


def _check_numbers(order: JobOrder) -> None:
    errors: dict[str, str] = {}
    if not 1 <= order.items <= ITEMS_MOST:
        errors["items"] = f"Enter a number of requests from 1 to {ITEMS_MOST:,}."
    for field in ("prompt_tokens", "expected_output_tokens"):
        if not 0 <= getattr(order, field) <= TOKENS_MOST:
            errors[field] = f"Enter the tokens of one request, from 0 to {TOKENS_MOST:,}."
    if not errors and not order.prompt_tokens + order.expected_output_tokens:
        errors["prompt_tokens"] = "A request has at least one token: enter prompt tokens or expected output tokens."
    if len(order.name) > NAME_MOST:
        errors["name"] = f"Use at most {NAME_MOST} characters."
    if order.if_late not in tuple(IfLate):
        errors["if_late"] = IF_LATE_HOW
    if order.deadline is not None and order.best_effort:
        errors["deadline"] = "A best-effort job has no deadline: leave one of the two out."
    if errors:
        raise ValidationError(errors)


def _class_of(tenant: Tenant, order: JobOrder, allowed: list[str] | None) -> WorkloadClass:
    row = WorkloadClass.objects.filter(slug=order.class_slug).exclude(state="archived").first()
    usable = order.class_slug in tenant.classes and (allowed is None or order.class_slug in allowed)
    if row is None or not usable:
        names = sorted(set(tenant.classes) & set(allowed if allowed is not None else tenant.classes))
        raise ValidationError(
            {"class": f"The class {order.class_slug!r} is not yours to use. You may use: {', '.join(names) or 'none'}."}
        )
    if row.kind != WorkloadClass.Kind.BATCH:
        raise ValidationError({"class": f"{row.slug} is an interactive class. Jobs need a class of kind batch."})
    if row.state == WorkloadClass.State.SUSPENDED:
        raise ValidationError({"class": f"The class {row.slug} is suspended. Try again when it is resumed."})
    if order.prompt_tokens > row.max_prompt_tokens:
        raise ValidationError(
            {"prompt_tokens": f"Class {row.slug} takes at most {row.max_prompt_tokens:,} prompt tokens."}
        )
    if order.expected_output_tokens > row.max_output_tokens:
        raise ValidationError(
            {"expected_output_tokens": f"Class {row.slug} allows at most {row.max_output_tokens:,} output tokens."}
        )
    return row


def _pool_of(tenant: Tenant, row: WorkloadClass, order: JobOrder) -> Pool:
    pools = [
        pool
        for pool in Pool.objects.filter(archived_at=None).select_related("model").order_by("slug")
        if row.slug == pool.batch_class and (not tenant.model_names or pool.model.name in tenant.model_names)
    ]
    if order.model:
        pools = [pool for pool in pools if pool.model.name == order.model]
        if not pools:
            raise ValidationError({"model": f"No pool serves the model {order.model!r} for class {row.slug}."})
    if order.pool:
        pools = [pool for pool in pools if pool.slug == order.pool]
    if not pools:
        raise ValidationError({"pool": f"No such pool serves class {row.slug} for you. Leave it out or name another."})
    if len(pools) > 1:
        names = ", ".join(pool.slug for pool in pools)
        raise ValidationError({"pool": f"Several pools serve class {row.slug}. Name one of them: {names}."})
    return pools[0]


def _deadline(row: WorkloadClass, order: JobOrder, now: datetime) -> datetime | None:
    if order.best_effort:
        return None
    if order.deadline is None:
        return now + timedelta(seconds=row.default_deadline_s)
    if order.deadline.tzinfo is None:
        raise ValidationError({"deadline": "Give the deadline with its offset, such as 2026-12-01T06:00:00+01:00."})
    if order.deadline <= now:
        raise ValidationError({"deadline": "The deadline has passed. Choose an instant in the future."})
    if order.deadline - now > DEADLINE_MOST:
        raise ValidationError({"deadline": "Choose a deadline within a year."})
    return order.deadline
