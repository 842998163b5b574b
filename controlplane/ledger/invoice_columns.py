"""Which column of a provider's file means what: FOCUS, the usual exports of providers, saved mappings.

Headers are compared without case, spaces and separators; a localised header that carries the original name in
brackets, `Ressourcengruppe (ResourceGroup)`, is known by either.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from controlplane.core.reconcile import InvoiceCategory
from controlplane.ledger.invoice_cells import DayOrder, DecimalMark

_BRACKETED = re.compile(r"(.*?)\s*\(([^()]+)\)\s*")
_NOT_NAME = re.compile(r"[^0-9a-zA-Z\u00c0-\uffff]+")

# What a value of a category column means; lower case, without separators. Anything else lands under `other`.
CATEGORIES: Mapping[str, InvoiceCategory] = MappingProxyType(
    {
        "": InvoiceCategory.USAGE,
        "usage": InvoiceCategory.USAGE,
        "discountedusage": InvoiceCategory.USAGE,
        "savingsplancoveredusage": InvoiceCategory.USAGE,
        "tax": InvoiceCategory.TAX,
        "vat": InvoiceCategory.TAX,
        "credit": InvoiceCategory.CREDIT,
        "promotion": InvoiceCategory.CREDIT,
        "refund": InvoiceCategory.REFUND,
        "support": InvoiceCategory.SUPPORT,
        "supportfee": InvoiceCategory.SUPPORT,
        "purchase": InvoiceCategory.COMMITMENT,
        "unusedreservation": InvoiceCategory.COMMITMENT,
        "unusedsavingsplan": InvoiceCategory.COMMITMENT,
        "fee": InvoiceCategory.COMMITMENT,
        "rifee": InvoiceCategory.COMMITMENT,
        "savingsplanrecurringfee": InvoiceCategory.COMMITMENT,
        "savingsplanupfrontfee": InvoiceCategory.COMMITMENT,
        "savingsplannegation": InvoiceCategory.COMMITMENT,
        "commitment": InvoiceCategory.COMMITMENT,
    }
)
AMOUNTS = ("billed", "effective", "quantity")
DAYS = ("starts", "ends")


class UnknownColumns(ValueError):
    """The file has no column for something that every line needs; says for what, and what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMap:
    """Names of the columns that a file has for each fact, the first found counts; `provider_name` where none says.

    `mark` and `order` settle numbers and dates that the file itself leaves open.
    """

    billed: Sequence[str]
    effective: Sequence[str] = ()
    currency: Sequence[str] = ()
    category: Sequence[str] = ()
    provider: Sequence[str] = ()
    account: Sequence[str] = ()
    sku: Sequence[str] = ()
    region: Sequence[str] = ()
    service: Sequence[str] = ()
    description: Sequence[str] = ()
    starts: Sequence[str] = ()
    ends: Sequence[str] = ()
    quantity: Sequence[str] = ()
    unit: Sequence[str] = ()
    line_id: Sequence[str] = ()
    provider_name: str = ""
    fixed_currency: str = ""
    mark: DecimalMark | None = None
    order: DayOrder | None = None
    categories: Mapping[str, InvoiceCategory] = field(default_factory=lambda: CATEGORIES)


COLUMN_FIELDS = tuple(
    part.name
    for part in fields(ColumnMap)
    if part.name not in {"provider_name", "fixed_currency", "mark", "order", "categories"}
)
NEEDED = ("billed", "starts")

FOCUS = ColumnMap(
    billed=["BilledCost"], effective=["EffectiveCost"], currency=["BillingCurrency"], category=["ChargeCategory"],
    provider=["ServiceProviderName", "ProviderName", "InvoiceIssuerName"],
    account=["SubAccountId", "BillingAccountId"], sku=["SkuId", "SkuPriceId"], region=["RegionId", "RegionName"],
    service=["ServiceName", "ServiceCategory"], description=["ChargeDescription"], starts=["ChargePeriodStart"],
    ends=["ChargePeriodEnd"], quantity=["ConsumedQuantity", "PricingQuantity"], unit=["ConsumedUnit", "PricingUnit"],
    line_id=["InvoiceDetailId"],
)  # fmt: skip
AZURE = ColumnMap(
    billed=["CostInBillingCurrency", "Cost", "PreTaxCost"],
    currency=["BillingCurrency", "BillingCurrencyCode", "Currency"], category=["ChargeType"],
    account=["SubscriptionId", "SubscriptionGuid"], sku=["MeterId"],
    region=["ResourceLocation", "MeterRegion", "Location"],
    service=["MeterCategory", "ServiceFamily", "ConsumedService"],
    description=["ProductName", "Product", "MeterName"], starts=["Date", "UsageDateTime", "ServicePeriodStartDate"],
    quantity=["Quantity", "UsageQuantity"], unit=["UnitOfMeasure"], provider_name="Azure", order=DayOrder.MONTH_FIRST,
    mark=DecimalMark.POINT,
)  # fmt: skip
AWS = ColumnMap(
    billed=["lineItem/UnblendedCost", "line_item_unblended_cost"],
    effective=["lineItem/NetUnblendedCost", "line_item_net_unblended_cost"],
    currency=["lineItem/CurrencyCode", "line_item_currency_code"],
    category=["lineItem/LineItemType", "line_item_line_item_type"],
    account=["lineItem/UsageAccountId", "line_item_usage_account_id"], sku=["product/sku", "product_sku"],
    region=["product/region", "product/regionCode", "product_region_code", "product_region"],
    service=["lineItem/ProductCode", "line_item_product_code"],
    description=["lineItem/LineItemDescription", "line_item_line_item_description"],
    starts=["lineItem/UsageStartDate", "line_item_usage_start_date"],
    ends=["lineItem/UsageEndDate", "line_item_usage_end_date"],
    quantity=["lineItem/UsageAmount", "line_item_usage_amount"], unit=["pricing/unit", "pricing_unit"],
    line_id=["identity/LineItemId", "identity_line_item_id"], provider_name="AWS",
)  # fmt: skip
FORMATS: Mapping[str, ColumnMap] = MappingProxyType({"focus": FOCUS, "azure": AZURE, "aws": AWS})


def header_names(header: Sequence[str]) -> dict[str, int]:
    """Position of each column by its comparable names; the first of equal names counts."""
    names: dict[str, int] = {}
    for index, text in enumerate(header):
        match = _BRACKETED.fullmatch(text.strip())
        for name in (match[2], match[1], text) if match else (text,):
            names.setdefault(comparable(name), index)
    return names


def comparable(name: str) -> str:
    """A header or a category without case and separators."""
    return _NOT_NAME.sub("", name).lower()


def positions(columns: ColumnMap, header: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Where a file has each fact, in order of preference; facts without a column are left out.

    Raises UnknownColumns when amount or date have none.
    """
    names = header_names(header)
    found: dict[str, tuple[int, ...]] = {}
    for fact in COLUMN_FIELDS:
        wanted = [comparable(name) for name in getattr(columns, fact)]
        places = tuple(dict.fromkeys(names[name] for name in wanted if name in names))
        if places:
            found[fact] = places
    missing = [fact for fact in NEEDED if fact not in found]
    if missing:
        wanted_text = "; ".join(
            f"{fact}: one of {', '.join(getattr(columns, fact)) or 'none named'}" for fact in missing
        )
        raise UnknownColumns(f"The file has no column for {wanted_text}. Its columns are: {', '.join(header)[:600]}")
    if "currency" not in found and not columns.fixed_currency:
        found["currency"] = ()
    return found


def detect(header: Sequence[str]) -> str:
    """Name of the format that a header fits; empty when none does."""
    names = header_names(header)
    if {"billedcost", "chargeperiodstart"} <= names.keys():
        return "focus"
    for name in ("aws", "azure"):
        columns = FORMATS[name]
        if all(any(comparable(text) in names for text in getattr(columns, fact)) for fact in NEEDED):
            return name
    return ""


def guessed_columns(header: Sequence[str]) -> dict[str, str]:
    """The header of each fact that has a name which any of the formats uses, for a person to correct."""
    names = header_names(header)
    found: dict[str, str] = {}
    for fact in COLUMN_FIELDS:
        known = (comparable(name) for columns in FORMATS.values() for name in getattr(columns, fact))
        place = next((names[name] for name in known if name in names), None)
        if place is not None:
            found[fact] = header[place]
    return found
