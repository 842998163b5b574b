"""Why a request was refused whose explanation was not kept: what was counted in the minute that its id names.

Refusals are counted exactly by minute of arrival, tenant, class and reason; the explanation is kept for the first
hundred of a kind in a minute at each agent. An id without an explanation belongs to a kind with more refusals than
explanations: those kinds are told, each with explained refusals of the same minute.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from controlplane.contracts.models import WorkloadClass
from controlplane.core.reasons import BY_CODE, answer_for
from controlplane.fleet.models import Pool
from controlplane.tenants.models import Tenant
from controlplane.usage.models import DecisionSample, RefusalMinute
from controlplane.usage.queries import arrival_of

EXAMPLES = 5
# A decision is made within the quarter of a second that a request may wait for a lease.
_DECIDED_WITHIN = timedelta(seconds=2)
_AHEAD = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Kind:
    """Refusals of one minute, tenant, class and reason; `unexplained` of them are only counted."""

    tenant: str
    klass: str
    pool: str
    reason: str
    status: int
    count: int
    unexplained: int
    examples: tuple[uuid.UUID, ...]


@dataclass(frozen=True, slots=True)
class RefusedMinute:
    """The minute of a request's arrival, with the kinds that it can belong to if it was refused."""

    request_id: uuid.UUID
    minute: datetime
    kinds: tuple[Kind, ...]

    @property
    def sentence(self) -> str:
        """What can be said of the request itself."""
        count = sum(kind.unexplained for kind in self.kinds)
        return (
            f"If it was refused, it was counted and its explanation was not kept: it is one of {count:,} such refusals "
            f"of {self.minute:%H:%M} UTC. The code in its answer says which; explained ones of the same minute, tenant,"
            " class and reason stand beside it. A request that is still running has no record yet."
        )

    def as_json(self) -> dict[str, Any]:
        """For REST."""
        return {
            "request_id": str(self.request_id),
            "state": "counted",
            "sentence": self.sentence,
            "minute": self.minute.isoformat(),
            "refusals": [
                {
                    "tenant": kind.tenant,
                    "class": kind.klass,
                    "pool": kind.pool,
                    "reason": kind.reason,
                    "status": kind.status,
                    "count": kind.count,
                    "unexplained": kind.unexplained,
                    "explained_examples": [str(example) for example in kind.examples],
                }
                for kind in self.kinds
            ],
        }


_Key = tuple[int, int, int, int]
"""Pool, tenant, class, reason."""


def refused_minute(request_id: uuid.UUID, tenants: QuerySet[Tenant], now: datetime) -> RefusedMinute | None:
    """What was only counted in the minute of an id, of these tenants; None where that is nothing.

    The answer depends on the minute and the tenants alone, never on whether somebody else's request has the id.
    """
    arrived = arrival_of(request_id)
    if arrived is None or arrived > now + _AHEAD:
        return None
    minute = arrived.replace(second=0, microsecond=0)
    names = dict(tenants.values_list("pk", "slug"))
    counts: dict[_Key, int] = {
        key: count
        for *key_, count in RefusalMinute.objects.filter(minute=minute, tenant_id__in=names).values_list(
            "pool_id", "tenant_id", "class_id", "reason", "count"
        )
        for key in (_key(key_),)
    }
    if not counts:
        return None
    explained = _explained(minute, names)
    classes = dict(WorkloadClass.objects.values_list("pk", "slug"))
    pools = dict(Pool.objects.values_list("pk", "slug"))
    kinds = tuple(
        _kind(key, count, explained[key], names[key[1]], classes.get(key[2], ""), pools.get(key[0], ""))
        for key, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        if count > len(explained[key])
    )
    return RefusedMinute(request_id, minute, kinds) if kinds else None


def _key(columns: list[int]) -> _Key:
    pool_id, tenant_id, class_id, reason = columns
    return pool_id, tenant_id, class_id, reason


def _explained(minute: datetime, names: dict[int, str]) -> dict[_Key, list[uuid.UUID]]:
    """Kind -> ids of its explained refusals, by the minute that their own ids name."""
    found: dict[_Key, list[uuid.UUID]] = defaultdict(list)
    rows = DecisionSample.objects.filter(
        tenant_id__in=names,
        decision="reject",
        at__gte=minute,
        at__lt=minute + timedelta(minutes=1) + _DECIDED_WITHIN,
    )
    for row in rows.order_by("at").values_list("request_id", "pool_id", "tenant_id", "class_id", "reason", "at"):
        request_id, *columns, at = row
        if (arrival_of(request_id) or at).replace(second=0, microsecond=0) == minute:
            found[_key(columns)].append(request_id)
    return found


def _kind(key: _Key, count: int, explained: list[uuid.UUID], tenant: str, klass: str, pool: str) -> Kind:
    why = BY_CODE.get(key[3])
    return Kind(
        tenant=tenant,
        klass=klass,
        pool=pool,
        reason=f"reason {key[3]}" if why is None else str(why),
        status=0 if why is None else answer_for(why).status,
        count=count,
        unexplained=count - len(explained),
        examples=tuple(explained[:EXAMPLES]),
    )
