"""What a pool served in a window, as a load for the lab: its requests, its jobs' items, and how long its slots took.

Refused requests are counted and not recorded, so they cannot be replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
import numpy as np
from django.db.models import QuerySet

from controlplane.core.period import to_us
from controlplane.core.reasons import OUTCOME_CODES, Outcome
from controlplane.fleet.models import Pool
from controlplane.jobs.models import Job
from controlplane.lab.fit import least_squares
from controlplane.lab.items import JobSpec
from controlplane.lab.scenario import Load
from controlplane.lab.service import Constants, ServiceModel
from controlplane.lab.workload import Workload
from controlplane.policy.models import PolicyBundle
from controlplane.policy.queries import desired
from controlplane.usage.models import UsageRecord
from controlplane.wire.policy import PolicyDocument

REQUESTS_MAX = 500_000
FEW = 50
"""With fewer completed requests a service model says nothing."""
COMPLETED = OUTCOME_CODES[Outcome.COMPLETED]
LATE = timedelta(days=1)
"""A record may be stored that long after its request arrived; older ones are not looked for."""
_COLUMNS = (
    "arrived_at", "tenant_id", "asked_class_id", "job_id", "outcome", "prompt_tokens", "output_tokens", "prefill_us",
    "decode_us", "ttft_us", "cached_tokens",
)  # fmt: skip


class NothingRecorded(ValueError):
    """The window has nothing to replay; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A load, and the service model that its own records fit."""

    load: Load
    service: ServiceModel
    unknown: int
    """Records of tenants or classes that the policy no longer has."""
    cached: list[int]
    """Cached prompt tokens, by request."""


def policy_in_force(pool: Pool) -> PolicyDocument:
    """The pool's newest signed revision of which every wave was sent. Raises NothingRecorded without one."""
    found = policies_in_force([pool.pk]).get(pool.pk)
    if found is None:
        raise NothingRecorded(f"pool {pool.slug} has no policy in force: push one first")
    return found


def policies_in_force(pool_ids: Iterable[int]) -> dict[int, PolicyDocument]:
    """The same of many pools by their id, those without one left out; two statements."""
    wanted = desired(pool_ids)
    digests = {digest for _, digest in wanted.values()}
    rows = PolicyBundle.objects.filter(pool_id__in=wanted, digest__in=digests).values_list("pool_id", "digest", "body")
    return {
        pool_id: msgspec.json.decode(bytes(body), type=PolicyDocument)
        for pool_id, digest, body in rows
        if wanted[pool_id][1] == digest
    }


def require_usage(pool: Pool, since: datetime, until: datetime) -> None:
    """Raises NothingRecorded where nothing was recorded of [since, until). Reads one row."""
    if not _records(pool, since, until).exists():
        raise _nothing(pool, since, until)


def _nothing(pool: Pool, since: datetime, until: datetime) -> NothingRecorded:
    return NothingRecorded(f"pool {pool.slug} has no usage between {since:%Y-%m-%d %H:%M} and {until:%H:%M} UTC")


def _records(pool: Pool, since: datetime, until: datetime) -> QuerySet[UsageRecord]:
    return UsageRecord.objects.filter(
        pool_id=pool.pk, received_at__gte=since, received_at__lt=until + LATE, arrived_at__gte=since,
        arrived_at__lt=until,
    )  # fmt: skip


def recorded(
    pool: Pool, document: PolicyDocument, since: datetime, until: datetime, service: ServiceModel | None = None
) -> Recorded:
    """Requests that arrived in [since, until), and the given service model or the one they fit.

    Raises NothingRecorded for too few of them, or too many.
    """
    found = _records(pool, since, until).order_by("arrived_at", "request_id")
    rows = list(found.values_list(*_COLUMNS)[: REQUESTS_MAX + 1])
    if len(rows) > REQUESTS_MAX:
        raise NothingRecorded(f"the window has more than {REQUESTS_MAX:,} requests: choose a shorter one")
    tenants = {tenant.id: number for number, tenant in enumerate(document.tenants)}
    classes = {klass.id: number for number, klass in enumerate(document.classes)}
    work = Workload(tuple(klass.slug for klass in document.classes), tuple(tenant.slug for tenant in document.tenants))
    items: dict[int, list[tuple[int, int]]] = defaultdict(list)
    since_us, unknown = to_us(since), 0
    cached: list[int] = []
    for arrived_at, tenant_id, class_id, job_id, outcome, prompt, output, *_, from_cache in rows:
        if tenant_id not in tenants or class_id not in classes:
            unknown += 1
        elif job_id:
            if outcome == COMPLETED:
                items[job_id].append((max(1, prompt), max(1, output)))
        else:
            work.at_us.append(to_us(arrived_at) - since_us)
            work.tenant_of.append(tenants[tenant_id])
            work.class_of.append(classes[class_id])
            work.prompt.append(max(1, prompt))
            work.output.append(max(1, output))
            work.asked.append(2 * max(1, output))
            work.tail_100ns.append(0)
            cached.append(from_cache)
    if not len(work) and not items:
        raise _nothing(pool, since, until)
    return Recorded(Load(work, tuple(_jobs(items, document, since_us))), service or fitted(rows), unknown, cached)


def _jobs(items: dict[int, list[tuple[int, int]]], document: PolicyDocument, since_us: int) -> list[JobSpec]:
    slugs = {tenant.id: tenant.slug for tenant in document.tenants}
    classes = {klass.id: klass.slug for klass in document.classes}
    found = []
    for job in Job.objects.filter(pk__in=items).order_by("pk"):
        if job.tenant_id not in slugs or job.workload_class_id not in classes:
            continue
        pairs = items[job.pk]
        found.append(
            JobSpec(
                job.name or str(job.uuid), slugs[job.tenant_id], classes[job.workload_class_id],
                [prompt for prompt, _ in pairs], [output for _, output in pairs],
                submitted_us=max(0, to_us(job.created_at) - since_us),
                deadline_us=None if job.deadline is None else to_us(job.deadline) - since_us,
            )
        )  # fmt: skip
    return found


def fitted(rows: list[tuple]) -> Constants:
    """base + prompt x prompt_us and output x output_us by least squares on what completed; never negative.

    Where enough were streamed their prefill tells the prompt's part, else the whole time on the slot does.
    """
    done = [row for row in rows if row[4] == COMPLETED and row[7] + row[8] > 0]
    if len(done) < FEW:
        raise NothingRecorded(f"only {len(done)} completed requests: a service model needs {FEW}, name --service")
    streamed = [row for row in done if row[9] >= 0]
    if len(streamed) >= FEW:
        prompt, output, prefill, decode = (np.asarray([row[at] for row in streamed], float) for at in (5, 6, 7, 8))
        base_us, prompt_us = least_squares(np.column_stack([np.ones_like(prompt), prompt]), prefill)
        output_us = decode.sum() / max(1.0, output.sum())
    else:
        prompt, output, prefill, decode = (np.asarray([row[at] for row in done], float) for at in (5, 6, 7, 8))
        base_us, prompt_us, output_us = least_squares(
            np.column_stack([np.ones_like(prompt), prompt, output]), prefill + decode
        )
    return Constants(max(1, round(base_us)), round(prompt_us), round(output_us))
