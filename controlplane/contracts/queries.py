"""Reading classes and contracts: the doors by person, the version in force, and what the fleet asks about them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.contrib.auth.models import AnonymousUser, User
from django.db import connection
from django.db.models import Q, QuerySet
from django.http import Http404

from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.contracts.wording import METRIC_NAMES
from controlplane.core.flex_policy import leaves_contract_no_room
from controlplane.fleet.models import Pool
from controlplane.fleet.served_classes import ServedClass
from controlplane.tenants.access import member_of
from controlplane.tenants.queries import visible_tenants
from controlplane.tenants.roles import Role

METRICS_WITH_QUEUE = frozenset({"queue_wait", "ttft", "e2e"})

# What remains of the time to first token without the queue, as streamed requests of the last hour had it.
_REST_OF_TTFT = """
SELECT pool.slug, percentile_cont(0.5) WITHIN GROUP (ORDER BY sample.rest_us) / 1000.0
  FROM fleet_pool AS pool
 CROSS JOIN LATERAL (
       SELECT ttft_us - queue_us AS rest_us
         FROM usage_record
        WHERE received_at >= %(since)s AND pool_id = pool.id AND ttft_us >= 0 AND queue_us >= 0
        LIMIT 2000) AS sample
 WHERE %(pool)s::integer IS NULL OR pool.id = %(pool)s
 GROUP BY pool.slug
"""


# ---- classes ----


def served_classes() -> list[ServedClass]:
    """Every class that is not archived, as the fleet knows it."""
    rows = WorkloadClass.objects.exclude(state=WorkloadClass.State.ARCHIVED).order_by("slug")
    return [ServedClass(row.slug, row.name, row.kind, row.min_share_ppm, tuple(row.model_names)) for row in rows]


@dataclass(frozen=True, slots=True)
class ClassUse:
    """Where a class is in use: pools that have it as a home class, contracts on it, tenants that may send it."""

    pools: tuple[str, ...]
    contracts: int
    tenants: int


def class_uses(rows: Iterable[WorkloadClass]) -> dict[int, ClassUse]:
    """Use of each class by its id, in three statements whatever the number of classes."""
    rows = list(rows)
    pools = list(Pool.objects.filter(archived_at=None).values_list("slug", "interactive_class", "batch_class"))
    contracts: dict[int, int] = {}
    for class_id in Contract.objects.filter(archived_at=None).values_list("workload_class_id", flat=True):
        contracts[class_id] = contracts.get(class_id, 0) + 1
    tenants: dict[str, int] = {}
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT used.slug, count(*) FROM tenants_tenant, unnest(classes) AS used (slug)"
            " WHERE state <> 'archived' GROUP BY used.slug"
        )
        tenants.update(cursor.fetchall())
    return {
        row.pk: ClassUse(
            pools=tuple(sorted(slug for slug, *homes in pools if row.slug in homes)),
            contracts=contracts.get(row.pk, 0),
            tenants=tenants.get(row.slug, 0),
        )
        for row in rows
    }


# ---- contracts ----


def visible_contracts(user: User | AnonymousUser) -> QuerySet[Contract]:
    """All contracts for staff; for a tenant's member those of the own tenant and those for everyone in its classes."""
    rows = Contract.objects.select_related("workload_class", "tenant")
    member = member_of(user)
    if member is None:
        return rows.none()
    if member.role != Role.TENANT:
        return rows
    own = visible_tenants(user).first()
    if own is None:
        return rows.none()
    return rows.filter(Q(tenant=own) | Q(tenant=None, workload_class__slug__in=own.classes))


def contract_holds(text: str) -> Q:
    """Contracts whose name, class or tenant holds the text."""
    return (
        Q(slug__icontains=text)
        | Q(name__icontains=text)
        | Q(workload_class__slug__icontains=text)
        | Q(tenant__slug__icontains=text)
    )


def contract_for(user: User | AnonymousUser, slug: str) -> Contract:
    """The only door to a contract. Not allowed and not existing look the same: Http404."""
    row = visible_contracts(user).filter(slug=slug).first()
    if row is None:
        raise Http404("There is no such contract.")
    return row


@dataclass(frozen=True, slots=True)
class Standing:
    """A contract with its version in force (None before the first begins) and the next one to come."""

    contract: Contract
    in_force: ContractVersion | None
    next: ContractVersion | None


def standings(contracts: Sequence[Contract] | QuerySet[Contract], now: datetime) -> list[Standing]:
    """The contracts in their order, with versions read in one statement: those in force and those to come.

    Of a query the versions are asked for by that query, for thousands named one by one are most of a statement.
    """
    by_contract: dict[int, list[ContractVersion]] = {}
    named = contracts.order_by() if isinstance(contracts, QuerySet) else [row.pk for row in contracts]
    contracts = list(contracts)
    versions = ContractVersion.objects.filter(contract__in=named)
    begun = versions.filter(effective_from__lte=now).order_by("contract_id", "-effective_from").distinct("contract_id")
    present = versions.filter(Q(pk__in=begun.values("pk")) | Q(effective_from__gt=now))
    for version in present.order_by("effective_from"):
        by_contract.setdefault(version.contract_id, []).append(version)
    return [_standing(row, by_contract.get(row.pk, []), now) for row in contracts]


def _standing(contract: Contract, versions: list[ContractVersion], now: datetime) -> Standing:
    begun = [row for row in versions if row.effective_from <= now]
    coming = [row for row in versions if row.effective_from > now]
    return Standing(contract, begun[-1] if begun else None, coming[0] if coming else None)


def version_at(contract: Contract, at: datetime) -> ContractVersion | None:
    """The version that judges requests arriving at an instant."""
    rows = ContractVersion.objects.filter(contract=contract, effective_from__lte=at)
    return rows.order_by("-effective_from").first()


# ---- what the fleet asks ----


def rest_of_ttft_ms(now: datetime, pool_id: int | None = None) -> dict[str, float]:
    """Pool slug -> median milliseconds of the time to first token after the queue, last hour; no traffic, no entry."""
    with connection.cursor() as cursor:
        cursor.execute(_REST_OF_TTFT, {"since": now - timedelta(hours=1), "pool": pool_id})
        return {slug: float(rest) for slug, rest in cursor.fetchall() if rest is not None}


def room_warnings(pool: Pool, now: datetime) -> list[str]:
    """Contracts that can be missed while lending stays lawful: lend_p95 and the usual rest reach the threshold."""
    classes = [slug for slug in (pool.interactive_class,) if slug]
    contracts = list(Contract.objects.filter(archived_at=None, workload_class__slug__in=classes).order_by("slug"))
    rest = rest_of_ttft_ms(now, pool.pk).get(pool.slug) if pool.pk and contracts else None
    found = []
    for standing in standings(contracts, now):
        version = standing.in_force
        if version is None or version.objective != "latency" or version.metric not in METRICS_WITH_QUEUE:
            continue
        after = 0.0 if version.metric == "queue_wait" else (rest or 0.0)
        if leaves_contract_no_room(
            lend_p95_us=pool.lend_p95_ms * 1_000,
            rest_of_ttft_us=round(after * 1_000),
            threshold_us=version.threshold_ms * 1_000,
        ):
            usual = f" and the usual {after:.0f} ms after the queue" if after else ""
            found.append(
                f"Contract {standing.contract.slug} promises {METRIC_NAMES[version.metric]} within"
                f" {version.threshold_ms:,} ms, but lending goes on up to a queue of {pool.lend_p95_ms:,} ms{usual}:"
                " it can be missed while lending stays lawful. Lower the lending limit or raise the threshold."
            )
    return found
