"""A month's cost in the columns of FOCUS 1.3: every mandatory one, and the conditional ones that have something to say.

The organisation that runs the fleet is its own provider; `BillingAccountId` is the tenant. ProviderName and
PublisherName are deprecated in 1.3 in favour of ServiceProviderName and HostProviderName and kept beside them, so that
readers of 1.0 to 1.2 find what they need.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from controlplane.core.period import Window, day_window, load_zone
from controlplane.ledger.export_rows import ExportRow

COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency",
    "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency",
    "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "HostProviderName", "InvoiceId", "InvoiceIssuerName", "ListCost",
    "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName",
    "RegionId", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory", "ServiceName",
    "ServiceProviderName", "ServiceSubcategory", "SkuId", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags",
    "x_CostLine", "x_CostCentre", "x_CorrectsPeriod",
)  # fmt: skip
UNIT = "Hours"
COST_KINDS = ("attribution", "variance", "adjustment")


@dataclass(frozen=True, slots=True)
class FocusFacts:
    """What is the same on every row: who provides, and the month."""

    organisation: str
    window: Window
    zone: str
    version: int


def focus_rows(rows: Iterable[ExportRow], facts: FocusFacts) -> Iterator[tuple[Any, ...]]:
    """One row per row of cost, in the order of COLUMNS; charges are not cost and left out."""
    for row in rows:
        if row.kind in COST_KINDS and row.cost is not None:
            values = _values(row, row.cost, facts)
            yield tuple(values.get(name) for name in COLUMNS)


def _values(row: ExportRow, cost: Decimal, facts: FocusFacts) -> dict[str, Any]:
    start, end = _span(row.day, facts)
    usage = row.kind == "attribution"
    quantity = row.slot_hours if usage else None
    price = (cost / quantity).quantize(Decimal("0.000000001")) if quantity else None
    return {
        "BilledCost": cost, "EffectiveCost": cost, "ListCost": cost, "ContractedCost": cost,
        "ListUnitPrice": price, "ContractedUnitPrice": price,
        "BillingAccountId": row.tenant or "platform", "BillingAccountName": row.tenant_name or row.tenant or "platform",
        "BillingAccountType": "Tenant" if row.tenant_name else "Platform", "BillingCurrency": row.currency,
        "BillingPeriodStart": facts.window.start, "BillingPeriodEnd": facts.window.end,
        "ChargePeriodStart": start, "ChargePeriodEnd": end,
        "ChargeCategory": "Usage" if usage else "Adjustment",
        "ChargeClass": "Correction" if row.corrects else None,
        "ChargeDescription": " ".join(filter(None, (row.kind, row.line, row.pool, row.class_))),
        "ChargeFrequency": "Usage-Based" if usage else "One-Time",
        "ConsumedQuantity": quantity, "ConsumedUnit": UNIT if quantity is not None else None,
        "PricingQuantity": quantity, "PricingUnit": UNIT if quantity is not None else None,
        "PricingCategory": "Standard" if usage else None,
        "HostProviderName": facts.organisation, "ServiceProviderName": facts.organisation,
        "ProviderName": facts.organisation, "PublisherName": facts.organisation,
        "InvoiceIssuerName": facts.organisation,
        "InvoiceId": f"{row.period}-v{facts.version}" if facts.version else None,
        "ResourceId": row.pool or None, "ResourceName": row.pool or None, "ResourceType": "Pool" if row.pool else None,
        "ServiceCategory": "AI and Machine Learning", "ServiceName": "Inference",
        "ServiceSubcategory": "Generative AI", "SkuId": row.line or None, "SkuPriceId": None,
        "SubAccountId": row.class_ or None, "SubAccountName": row.class_ or None,
        "x_CostLine": row.line or None, "x_CostCentre": row.cost_centre or None,
        "x_CorrectsPeriod": row.corrects or None,
    }  # fmt: skip


def _span(day: date | None, facts: FocusFacts) -> tuple[datetime, datetime]:
    if day is None:
        return facts.window.start, facts.window.end
    window = day_window(load_zone(facts.zone), day)
    return window.start, window.end
