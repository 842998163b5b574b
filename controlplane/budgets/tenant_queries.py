"""Reading tenants together with their money: one row per tenant in a fixed number of queries."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import (
    Case,
    Count,
    IntegerField,
    Max,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
    When,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce

from controlplane.budgets import spend_states
from controlplane.budgets.models import Budget
from controlplane.budgets.queries import Standing, standings
from controlplane.budgets.spend_states import tenants_in_state
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.core.reasons import REASON_CODES
from controlplane.tenants.models import ApiKey, Member, Tenant
from controlplane.tenants.queries import slug_or_name_holds
from controlplane.usage.models import DecisionSample, RefusalMinute
from controlplane.usage.queries import Scope, totals

EXPIRES_SOON = timedelta(days=14)
SORTS = {
    "attention": ("attention", "slug", "id"),
    "name": ("slug", "id"),
    "newest": ("-created_at", "-id"),
}
REASON_WORDS = {code: reason.value for reason, code in REASON_CODES.items()}
STOPPED, NEAR, FORECAST, EXPIRING, FINE, SUSPENDED, ARCHIVED = range(7)
WORST = ("stopped", "over", "near", "forecast", "ok")


@dataclass(frozen=True, slots=True)
class TenantRow:
    """A tenant as the list shows it. `standing` is its month's budget, or the first; None: no budget of its own."""

    tenant: Tenant
    parent_slug: str
    classes: list[tuple[str, str]]
    standing: Standing | None
    worst: str
    keys: int
    expiring_keys: int
    last_used_at: datetime | None

    @property
    def grade(self) -> str:
        if self.tenant.state != Tenant.State.ACTIVE:
            return "neutral"
        if self.worst in ("stopped", "over"):
            return "bad"
        return "risk" if self.worst in ("near", "forecast") or self.expiring_keys else "ok"

    @property
    def word(self) -> str:
        if self.tenant.state != Tenant.State.ACTIVE:
            return str(self.tenant.state).capitalize()
        words = {"stopped": "Stopped", "over": "Over limit", "near": "Near limit", "forecast": "Over forecast"}
        return words.get(self.worst) or ("Key expires" if self.expiring_keys else "OK")

    @property
    def note(self) -> str:
        """The second line: what is behind the chip, else the name."""
        if self.tenant.state == Tenant.State.SUSPENDED and self.tenant.suspend_reason:
            return self.tenant.suspend_reason
        if self.worst == "stopped":
            return "A hard budget is used up"
        if self.worst == "over":
            return "A soft budget is passed"
        if self.worst == "near":
            return "A budget is over 80 % settled and leased"
        if self.worst == "forecast":
            return "A budget will not last, by the days before"
        if self.expiring_keys:
            plural = "key expires" if self.expiring_keys == 1 else "keys expire"
            return f"{self.expiring_keys} {plural} within {EXPIRES_SOON.days} days"
        return self.tenant.name


@dataclass(frozen=True, slots=True)
class Refusals:
    """How often a tenant was refused since an instant, by reason, and the latest decisions kept in full."""

    by_reason: list[tuple[str, int]]
    total: int
    latest: list[tuple[DecisionSample, str]]


@dataclass(frozen=True, slots=True)
class ContractLine:
    """A contract that judges the tenant's requests: its own, or its class's for everybody."""

    contract: Contract
    version: ContractVersion | None
    own: bool


def searched(tenants: QuerySet[Tenant], *, text: str, state: str, workload_class: str) -> QuerySet[Tenant]:
    """The tenants that match; a text is looked for at once, by a statement of its own."""
    rows = tenants.filter(pk__in=_listed(_holding(text))) if text else tenants
    if state in Tenant.State.values:
        rows = rows.filter(state=state)
    elif state != "all":
        rows = rows.exclude(state=Tenant.State.ARCHIVED)
    if workload_class:
        rows = rows.filter(classes__contains=[workload_class])
    return rows


def _holding(text: str) -> list[int]:
    """Ids of the tenants that hold a text: in the short name or name, a key's, or that of somebody who acts for it.

    Each is looked for where an index has it: in one condition the database would walk all tenants and keys.
    """
    own = Tenant.objects.filter(slug_or_name_holds(text)).values_list("pk")
    keys = ApiKey.objects.filter(Q(name__icontains=text) | Q(prefix__istartswith=text)).values_list("tenant_id")
    people = Member.objects.filter(user__username__icontains=text, tenant__isnull=False).values_list("tenant_id")
    return [pk for (pk,) in own.union(keys, people)]


def _listed(ids: Sequence[int]) -> RawSQL:
    """Ids as one array: thousands of parameters take longer to read than to find."""
    return RawSQL("SELECT unnest(%s::int[])", [list(ids)])


def by_attention(tenants: QuerySet[Tenant], now: datetime) -> QuerySet[Tenant]:
    """With the annotation `attention` that sorts what needs it first."""
    return tenants.annotate(attention=_attention(now))


def _attention(now: datetime) -> Case:
    # Sets of tenants that are made once, not a question for each tenant.
    stopped = tenants_in_state(spend_states.STOPPED, spend_states.OVER, now=now)
    near = tenants_in_state(spend_states.NEAR, now=now)
    forecast = tenants_in_state(spend_states.FORECAST, now=now)
    expiring = ApiKey.objects.filter(**_expiring(now)).values("tenant_id")
    return Case(
        When(state=Tenant.State.ARCHIVED, then=Value(ARCHIVED)),
        When(state=Tenant.State.SUSPENDED, then=Value(SUSPENDED)),
        When(pk__in=stopped, then=Value(STOPPED)),
        When(pk__in=near, then=Value(NEAR)),
        When(pk__in=forecast, then=Value(FORECAST)),
        When(pk__in=expiring, then=Value(EXPIRING)),
        default=Value(FINE),
        output_field=IntegerField(),
    )


def _expiring(now: datetime) -> dict[str, object]:
    return {"state": ApiKey.State.ACTIVE, "expires_at__gt": now, "expires_at__lte": now + EXPIRES_SOON}


def rows_of(tenants: Sequence[Tenant], now: datetime) -> list[TenantRow]:
    """What the list shows of tenants, in their order: a fixed number of queries however many there are."""
    ids = [tenant.pk for tenant in tenants]
    money: dict[int, list[Standing]] = defaultdict(list)
    budgets = Budget.objects.filter(tenant__in=ids, archived_at=None).select_related("tenant").order_by("id")
    for standing in standings(budgets, now):
        money[standing.budget.tenant_id].append(standing)
    keys: dict[int, dict[str, Any]] = {
        row["tenant_id"]: dict(row)
        for row in ApiKey.objects.filter(tenant__in=ids)
        .values("tenant_id")
        .annotate(
            active=Count("id", filter=Q(state=ApiKey.State.ACTIVE)),
            expiring=Count("id", filter=Q(**_expiring(now))),
            last=Max("last_used_at"),
        )
    }
    kinds = dict(WorkloadClass.objects.values_list("slug", "kind"))
    parents = dict(
        Tenant.objects.filter(pk__in={tenant.parent_id for tenant in tenants if tenant.parent_id}).values_list(
            "pk", "slug"
        )
    )
    return [
        _row(tenant, money.get(tenant.pk, []), keys.get(tenant.pk, {}), kinds, parents.get(tenant.parent_id or 0, ""))
        for tenant in tenants
    ]


def _row(
    tenant: Tenant, money: list[Standing], keys: dict[str, Any], kinds: dict[str, str], parent_slug: str
) -> TenantRow:
    month = next((standing for standing in money if standing.budget.period == Budget.Period.MONTH), None)
    return TenantRow(
        tenant=tenant,
        parent_slug=parent_slug,
        classes=[(slug, kinds.get(slug, "")) for slug in tenant.classes],
        standing=month or (money[0] if money else None),
        worst=min((standing.state for standing in money), key=WORST.index, default="ok"),
        keys=keys.get("active") or 0,
        expiring_keys=keys.get("expiring") or 0,
        last_used_at=keys.get("last"),
    )


def refusals_of(tenant: Tenant, since: datetime) -> Refusals:
    """Counts since an instant, the most frequent reason first, and the ten latest decisions kept in full."""
    counts = Counter(
        dict(
            RefusalMinute.objects.filter(tenant_id=tenant.pk, minute__gte=since)
            .values_list("reason")
            .annotate(total=Sum("count"))
        )
    )
    samples = DecisionSample.objects.filter(tenant_id=tenant.pk, at__gte=since, reason__in=list(REASON_WORDS))
    return Refusals(
        by_reason=[(REASON_WORDS.get(code, f"code {code}"), count) for code, count in counts.most_common()],
        total=counts.total(),
        latest=[(sample, REASON_WORDS[sample.reason]) for sample in samples.order_by("-at")[:10]],
    )


def charged_this_month(tenant: Tenant, zone: str, now: datetime) -> int:
    """Nanos charged to the tenant itself since the month began in the billing zone, from the rollups."""
    month = window_at(load_zone(zone), Calendar.MONTH, now)
    return totals(Scope(since=month.start, until=now, tenant_ids=[tenant.pk]))[0].charge_nanos


def contracts_of(tenant: Tenant) -> list[ContractLine]:
    """The tenant's own contracts first, then those of its classes that hold for everybody."""
    own = Q(tenant=tenant)
    shared = Q(tenant=None, workload_class__slug__in=tenant.classes)
    latest = ContractVersion.objects.filter(contract=OuterRef("pk")).order_by("-number").values("pk")[:1]
    contracts = list(
        Contract.objects.filter(own | shared, archived_at=None)
        .select_related("workload_class")
        .annotate(version_id_latest=Subquery(latest))
        .order_by(Coalesce("tenant_id", Value(2**30)), "slug")
    )
    versions = ContractVersion.objects.in_bulk([row.version_id_latest for row in contracts if row.version_id_latest])
    return [ContractLine(row, versions.get(row.version_id_latest), row.tenant_id == tenant.pk) for row in contracts]
