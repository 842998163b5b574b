"""From rows to one policy document per pool. The same rows give the same bytes, whatever their order was.

Keys, suspensions and freezes are not in it: they act at once and travel in the live list.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models import Exists, OuterRef, Q, QuerySet

from controlplane.budgets.models import Budget
from controlplane.contracts.models import ContractVersion, WorkloadClass
from controlplane.fleet.models import Pool, Slot, SlotTenure
from controlplane.ledger.rate_queries import live_cards
from controlplane.policy.configuration import Configuration, instant
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import installation
from controlplane.wire.policy import (
    SCHEMA,
    Batching,
    ClassPolicy,
    ContractPolicy,
    FlexPolicy,
    PolicyDocument,
    PoolPolicy,
    RatePolicy,
    SafeRate,
    SizeBounds,
    SlotPolicy,
    TenantPolicy,
)

if TYPE_CHECKING:
    from controlplane.ledger.models import RateCard


class PolicyTenant(NamedTuple):
    """The columns of a tenant that documents and rules read: models of ten thousand rows take most of a compilation."""

    id: int
    slug: str
    weight: int
    max_concurrency: int
    classes: list[str]
    model_names: list[str]
    outage_posture: str
    parent_id: int | None


@dataclass(frozen=True)
class Source:
    """The rows that policy is made of, read once; lists are in a fixed order."""

    installation: str
    pools: tuple[Pool, ...]
    slots: tuple[Slot, ...]
    classes: tuple[WorkloadClass, ...]
    tenants: tuple[PolicyTenant, ...]
    versions: tuple[ContractVersion, ...]
    cards: tuple[RateCard, ...]
    hard_budget_tenants: frozenset[int]

    def slots_of(self, pool: Pool) -> list[Slot]:
        return self._slots.get(pool.id, [])

    def class_by_slug(self, slug: str) -> WorkloadClass | None:
        return self._class_of_slug.get(slug)

    def classes_of(self, pool: Pool) -> list[WorkloadClass]:
        """The classes that the pool serves: its own, those that name its model, and where these downgrade to."""
        return self._served[pool.id]

    def _classes_of(self, pool: Pool) -> list[WorkloadClass]:
        wanted = [row for row in self.classes if _serves(row, pool)]
        reached = {row.id for row in wanted}
        while wanted:
            target = wanted.pop().downgrade_to_id
            if target is not None and target not in reached:
                row = next((row for row in self.classes if row.id == target and allows_model(row, pool)), None)
                if row is not None:
                    reached.add(row.id)
                    wanted.append(row)
        return [row for row in self.classes if row.id in reached]

    def tenants_of(self, pool: Pool) -> list[TenantPolicy]:
        """The tenants that may send something to the pool.

        Lists are exact: only what this pool serves and the tenant may use, so an empty list never means "all". They
        are shared and never changed: asked by kind of tenant, of which ten thousand tenants have few.
        """
        served = {row.slug for row in self.classes_of(pool)}
        model = pool.model.name
        found: list[tuple[int, list[str]]] = []
        for (classes, models), places in self._kinds_of_tenants.items():
            may_use = sorted(served.intersection(classes))
            if may_use and (not models or model in models):
                found += [(place, may_use) for place in places]
        found.sort(key=itemgetter(0))
        only, parts = [model], self._parts_of_tenants
        return [TenantPolicy(*parts[place][0], may_use, only, *parts[place][1]) for place, may_use in found]

    @cached_property
    def _parts_of_tenants(self) -> list[tuple[tuple[int, str, int, int], tuple[str, bool, list[int]]]]:
        """Of each tenant what stands before its classes and models in a document, and what stands after them."""
        found = []
        for row in self.tenants:
            above = self.ancestors_of(row)
            hard = not self.hard_budget_tenants.isdisjoint((row.id, *above))
            head = (row.id, row.slug, row.weight, row.max_concurrency)
            found.append((head, (row.outage_posture, hard, above)))
        return found

    @cached_property
    def _kinds_of_tenants(self) -> dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]]:
        """Places in `tenants` by classes and models."""
        kinds: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
        for place, row in enumerate(self.tenants):
            kinds.setdefault((tuple(row.classes), tuple(row.model_names)), []).append(place)
        return kinds

    def ancestors_of(self, tenant: PolicyTenant) -> list[int]:
        """Ids from the parent up; a cycle in the rows ends the walk."""
        found: list[int] = []
        at = tenant.parent_id
        while at is not None and at not in found and at != tenant.id:
            found.append(at)
            at = self._parents.get(at)
        return found

    def versions_of(self, class_ids: set[int]) -> list[ContractVersion]:
        """The versions of contracts in these classes, in their order."""
        places = sorted(place for class_id in class_ids for place in self._versions.get(class_id, ()))
        return [self.versions[place] for place in places]

    @cached_property
    def _versions(self) -> dict[int, list[int]]:
        """Places in `versions` by class."""
        found: dict[int, list[int]] = {}
        for place, row in enumerate(self.versions):
            found.setdefault(row.contract.workload_class_id, []).append(place)
        return found

    @cached_property
    def _slots(self) -> dict[int, list[Slot]]:
        by_pool: dict[int, list[Slot]] = {}
        for slot in self.slots:
            by_pool.setdefault(slot.pool_id, []).append(slot)
        return by_pool

    @cached_property
    def _class_of_slug(self) -> dict[str, WorkloadClass]:
        return {row.slug: row for row in reversed(self.classes)}

    @cached_property
    def _served(self) -> dict[int, list[WorkloadClass]]:
        return {pool.id: self._classes_of(pool) for pool in self.pools}

    @cached_property
    def _parents(self) -> dict[int, int | None]:
        return {row.id: row.parent_id for row in self.tenants}


def load_source(now: datetime) -> Source:
    """Reads all rows in one go; call it inside a transaction when a push has to match what was reviewed."""
    return Source(
        installation=str(installation().uuid),
        pools=tuple(Pool.objects.filter(archived_at__isnull=True).select_related("model").order_by("slug")),
        slots=tuple(_slots_in_the_fleet()),
        classes=tuple(WorkloadClass.objects.exclude(state=WorkloadClass.State.ARCHIVED).order_by("slug")),
        tenants=tuple(map(PolicyTenant._make, _tenants())),
        versions=tuple(_live_versions(now)),
        cards=tuple(live_cards(now)),
        hard_budget_tenants=frozenset(
            Budget.objects.filter(hard=True, archived_at__isnull=True).values_list("tenant_id", flat=True)
        ),
    )


def _tenants() -> QuerySet[Tenant, tuple[Any, ...]]:
    rows = Tenant.objects.exclude(state=Tenant.State.ARCHIVED).order_by("slug")
    return rows.values_list(*PolicyTenant._fields)


def compile_configuration(now: datetime) -> Configuration:
    """What a push at `now` would send, by pool slug."""
    return compile_source(load_source(now))


def compile_source(source: Source) -> Configuration:
    return Configuration({pool.slug: _document(pool, source) for pool in source.pools})


def allows_model(row: WorkloadClass, pool: Pool) -> bool:
    """A class without a list of models allows every model."""
    return not row.model_names or pool.model.name in row.model_names


def _serves(row: WorkloadClass, pool: Pool) -> bool:
    home = row.slug in (pool.interactive_class, pool.batch_class)
    return home or pool.model.name in row.model_names


def _slots_in_the_fleet() -> list[Slot]:
    """Slots whose tenure has not ended; one that never began (a slot just made) counts."""
    tenures = SlotTenure.objects.filter(slot=OuterRef("pk"))
    there = Exists(tenures.filter(ended_at__isnull=True)) | ~Exists(tenures)
    return list(Slot.objects.filter(there, removed_at__isnull=True).order_by("pool_id", "name"))


def _live_versions(now: datetime) -> list[ContractVersion]:
    """Of every contract the version in force and those to come."""
    live = ContractVersion.objects.filter(contract__archived_at__isnull=True)
    begun = live.filter(effective_from__lte=now).order_by("contract_id", "-effective_from", "-number")
    present = live.filter(
        Q(pk__in=begun.distinct("contract_id").values("pk")) | Q(effective_from__gt=now)
    ).select_related("contract")
    return sorted(present.only(*_VERSION_COLUMNS), key=lambda row: (row.contract.slug, row.number))


# What documents and rules read of a version: of a thousand the rest is most of reading them.
_VERSION_COLUMNS = (
    "contract_id", "number", "effective_from", "objective", "metric", "threshold_ms", "contract__slug",
    "contract__workload_class_id", "contract__tenant_id",
)  # fmt: skip


def _document(pool: Pool, source: Source) -> PolicyDocument:
    """The document without its stamp: a push adds revision and instants."""
    classes = source.classes_of(pool)
    tenants = source.tenants_of(pool)
    return PolicyDocument(
        schema=SCHEMA,
        installation=source.installation,
        pool=_pool(pool, source.slots_of(pool)),
        classes=[_class(row, classes, pool.model.name) for row in classes],
        tenants=tenants,
        contracts=_contracts(source, {row.id for row in classes}, {row.id for row in tenants}),
        rates=[_rate(row) for row in source.cards if _rate_applies(row, classes, pool)],
        revision=0,
        not_before="",
        accept_until="",
    )


def _pool(pool: Pool, slots: list[Slot]) -> PoolPolicy:
    return PoolPolicy(
        id=pool.id,
        slug=pool.slug,
        model=pool.model.name,
        model_id=pool.model_id,
        isolation=pool.isolation,
        interactive_class=pool.interactive_class,
        batch_class=pool.batch_class,
        fairness_unit=pool.fairness_unit,
        prompt_weight=pool.prompt_weight,
        output_weight=pool.output_weight,
        sizes=SizeBounds(
            gpu_ms=sorted(pool.size_bounds_gpu_ms), aging_s=pool.aging_s, reserve_after_ms=pool.reserve_after_ms
        ),
        prefill_us_per_token=pool.prefill_us_per_token,
        decode_us_per_token=pool.decode_us_per_token,
        flex=_flex(pool),
        safe_rate=_safe_rate(pool),
        batching=Batching(max_batch_size=pool.max_batch_size, max_wait_ms=pool.max_batch_wait_ms),
        slots=[
            SlotPolicy(
                id=slot.id,
                name=slot.name,
                band=slot.band,
                places=slot.places,
                kv_tokens=slot.kv_tokens,
                agent_id=slot.agent_id,
            )
            for slot in sorted(slots, key=lambda slot: slot.name)
        ],
    )


def _flex(pool: Pool) -> FlexPolicy:
    return FlexPolicy(
        lend_p95_ms=pool.lend_p95_ms,
        lend_hold_s=pool.lend_hold_s,
        load_limit=pool.load_limit,
        lend_slack=pool.lend_slack,
        return_slack=pool.return_slack,
        return_hold_s=pool.return_hold_s,
        min_hold_s=pool.min_hold_s,
        drain_bound_s=pool.drain_bound_s,
        grant_ttl_s=pool.grant_ttl_s,
        cooldown_s=pool.cooldown_s,
        decision_interval_s=pool.decision_interval_s,
        max_lent=pool.max_lent,
        spillover_per_week=pool.spillover_per_week,
        spillover_action=pool.spillover_action,
    )


def _safe_rate(pool: Pool) -> SafeRate:
    raw = pool.safe_rate or {}
    entries = {str(slots): float(rate) for slots, rate in (raw.get("entries") or {}).items()}
    return SafeRate(
        entries=entries,
        measured_at=str(raw.get("measured_at") or ""),
        trace=str(raw.get("trace") or ""),
        valid_until=str(raw.get("valid_until") or ""),
    )


def _class(row: WorkloadClass, served: list[WorkloadClass], model: str) -> ClassPolicy:
    target = next((other.slug for other in served if other.id == row.downgrade_to_id), None)
    return ClassPolicy(
        id=row.id,
        slug=row.slug,
        kind=row.kind,
        priority=row.priority,
        min_share_ppm=row.min_share_ppm,
        max_prompt_tokens=row.max_prompt_tokens,
        max_output_tokens=row.max_output_tokens,
        default_output_tokens=row.default_output_tokens,
        template_allowance_tokens=row.template_allowance_tokens,
        max_queue=row.max_queue,
        max_wait_ms=row.max_wait_ms,
        stage_timeout_s=row.stage_timeout_s,
        overload=row.overload,
        downgrade_to=target,
        retry_safe=row.retry_safe,
        cancellable=row.cancellable,
        default_deadline_s=row.default_deadline_s,
        models=[model],
    )


def _contracts(source: Source, class_ids: set[int], tenant_ids: set[int]) -> list[ContractPolicy]:
    return [
        ContractPolicy(
            version_id=row.id,
            slug=row.contract.slug,
            class_id=row.contract.workload_class_id,
            tenant_id=row.contract.tenant_id,
            effective_from=instant(row.effective_from),
            objective=row.objective,
            metric=row.metric,
            threshold_ms=row.threshold_ms,
        )
        for row in source.versions_of(class_ids)
        if (row.contract.tenant_id is None or row.contract.tenant_id in tenant_ids)
    ]


def _rate_applies(row: RateCard, classes: list[WorkloadClass], pool: Pool) -> bool:
    return row.model_id == pool.model_id and any(row.class_slug == served.slug for served in classes)


def _rate(row: RateCard) -> RatePolicy:
    return RatePolicy(
        rate_version=row.id,
        class_slug=row.class_slug,
        model_id=row.model_id,
        effective_from=instant(row.effective_from),
        prompt_nanos_per_mtok=row.prompt_nanos_per_mtok,
        cached_nanos_per_mtok=row.cached_nanos_per_mtok,
        output_nanos_per_mtok=row.output_nanos_per_mtok,
        gpu_nanos_per_slot_hour=row.gpu_nanos_per_slot_hour,
        discount_ppm=row.discount_ppm,
    )
