"""Two questions about a month that touch nothing: what other prices would have charged, what moved the cost.

A what-if multiplies prices by summed quantities, which nothing else does: it differs from charges by their rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from controlplane.core.cost_drivers import Drivers, Measured, compare
from controlplane.core.period import Calendar, Window, day_windows, load_zone, window_at
from controlplane.core.pricing import RateCard, charge
from controlplane.fleet.models import ServedModel
from controlplane.ledger.attribution_input import load_names
from controlplane.ledger.queries import LENDING, CostRow, cost_rows
from controlplane.usage.queries import Scope, totals


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """A tenant's charges of one class and model, as they were and as they would have been."""

    tenant: str
    requests: int
    charged_nanos: int
    would_nanos: int

    @property
    def difference_nanos(self) -> int:
        return self.would_nanos - self.charged_nanos


def rerate(window: Window, class_slug: str, model: str, card: RateCard) -> list[WhatIfRow]:
    """Charges of a month under another card, by tenant; its discount is on every line.

    Usage that nobody paid for (failed, displaced) stays unpaid. The largest change first.
    """
    names, model_row = load_names(), ServedModel.objects.filter(name=model).first()
    if model_row is None:
        return []
    sums: dict[str, list[int]] = {}
    by = ("tenant_id", "class_id", "outcome", "rate_version")
    for row in totals(Scope(window.start, window.end, model_id=model_row.pk), by):
        if names.class_(row.key["class_id"]) != class_slug or not row.charge_nanos:
            continue
        would = charge(
            card, prompt_tokens=row.prompt_tokens, cached_tokens=row.cached_tokens, output_tokens=row.output_tokens,
            gpu_us=row.gpu_us, batch=True,
        )  # fmt: skip
        mine = sums.setdefault(names.tenant(row.key["tenant_id"]), [0, 0, 0])
        for at, amount in enumerate((row.requests, row.charge_nanos, would.total_nanos)):
            mine[at] += amount
    rows = [WhatIfRow(tenant, *amounts) for tenant, amounts in sums.items()]
    return sorted(rows, key=lambda row: (-abs(row.difference_nanos), row.tenant))


@dataclass(frozen=True, slots=True)
class DriverRow:
    """A tenant's cost of two months and what moved it."""

    tenant: str
    before_nanos: int
    after_nanos: int
    drivers: Drivers


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cost of a month and the one before. `unknown`: slot time without a rate in either is in no sum."""

    before: Window
    after: Window
    rows: tuple[DriverRow, ...]
    total: DriverRow
    unknown: bool


def compare_with_month_before(window: Window, zone_name: str) -> Comparison:
    """Drivers of the attributed cost: quantity is used slot time by class and pool, idle stands apart.

    A tenant's row is compared by its own groups, so rows add up to the total in each driver but volume and mix.
    """
    zone = load_zone(zone_name)
    earlier = window_at(zone, Calendar.MONTH, window.start - datetime.resolution)
    months = [cost_rows(day_windows(zone, month.start, month.end)) for month in (earlier, window)]
    tenants = sorted({row.tenant for month in months for row in month})
    rows = [
        _driver_row(tenant, [[row for row in month if row.tenant == tenant] for month in months]) for tenant in tenants
    ]
    unknown = any(row.nanos is None for month in months for row in month)
    ordered = sorted(rows, key=lambda row: (-abs(row.drivers.total_nanos), row.tenant))
    return Comparison(earlier, window, tuple(ordered), _driver_row("", months), unknown)


def _driver_row(tenant: str, months: list[list[CostRow]]) -> DriverRow:
    used = [_used(month) for month in months]
    idle = [sum(row.nanos or 0 for row in month if row.is_idle) for month in months]
    found = compare(used[0], used[1], idle_before=idle[0], idle_after=idle[1])
    whole = [sum(one.nanos for one in part.values()) + spare for part, spare in zip(used, idle, strict=True)]
    return DriverRow(tenant, whole[0], whole[1], found)


def _used(rows: list[CostRow]) -> Mapping[str, Measured]:
    """Use and lending by tenant, class and pool: what lending moves is price, since it has no slot time of its own."""
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row.is_idle or row.nanos is None:
            continue
        key = f"{row.tenant}/{row.class_}/{row.pool}"
        us, nanos = sums.get(key, (0, 0))
        sums[key] = (us + (0 if row.line in LENDING else row.slot_us), nanos + row.nanos)
    return {key: Measured(us, nanos) for key, (us, nanos) in sums.items()}
