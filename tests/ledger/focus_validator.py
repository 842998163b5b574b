"""What FOCUS asks of a file of cost and usage: columns there, nulls where allowed, UTC instants, plain numbers, enums.

Written from the specification's rules for the columns that this project writes; independent of the code that writes.
"""

import csv
import io
import re
from datetime import datetime
from decimal import Decimal

# mandatory in 1.3, with whether a null is allowed
MANDATORY = {
    "BilledCost": False, "BillingAccountId": False, "BillingAccountName": True, "BillingCurrency": False,
    "BillingPeriodEnd": False, "BillingPeriodStart": False, "ChargeCategory": False, "ChargeClass": True,
    "ChargeDescription": True, "ChargePeriodEnd": False, "ChargePeriodStart": False, "ContractedCost": False,
    "EffectiveCost": False, "HostProviderName": True, "InvoiceIssuerName": False, "ListCost": False,
    "PricingQuantity": True, "PricingUnit": True, "ProviderName": False, "PublisherName": False,
    "ServiceCategory": False, "ServiceName": False, "ServiceProviderName": False,
}  # fmt: skip
NUMERIC = {
    "BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "ListUnitPrice", "ContractedUnitPrice",
    "PricingQuantity", "ConsumedQuantity",
}  # fmt: skip
ENUMS = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {"Correction", ""},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {"Standard", "Dynamic", "Committed", "Other", ""},
    "ServiceCategory": {"AI and Machine Learning", "Compute", "Other"},
}
INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE]-?\d+)?")


def problems(content: bytes) -> list[str]:
    """Everything wrong with a file, each with its line; empty for a valid one."""
    reader = csv.DictReader(io.StringIO(content.decode("utf-8"), newline=""))
    header = reader.fieldnames or []
    found = [f"column {name} is missing" for name in MANDATORY if name not in header]
    found += [f"column {name} stands twice" for name in {n for n in header if header.count(n) > 1}]
    found += [
        f"column {name} is neither PascalCase nor an x_ column" for name in header
        if not re.fullmatch(r"(x_)?[A-Z][A-Za-z]+", name)
    ]  # fmt: skip
    for line, row in enumerate(reader, start=2):
        found += [f"line {line}: {text}" for text in _row_problems(row)]
    return found


def _row_problems(row: dict[str, str]) -> list[str]:
    found = [f"{name} is null" for name, may in MANDATORY.items() if not may and not row.get(name)]
    found += [f"{n} {row[n]!r} is not a number" for n in NUMERIC if row.get(n) and not NUMBER.fullmatch(row[n])]
    found += [f"{n} {row[n]!r} is not an allowed value" for n, ok in ENUMS.items() if row.get(n, "") not in ok]
    instants = [name for name in row if name.endswith(("PeriodStart", "PeriodEnd"))]
    found += [f"{name} {row[name]!r} is no instant in UTC" for name in instants if not INSTANT.fullmatch(row[name])]
    if found:
        return found
    if not re.fullmatch(r"[A-Z]{3}", row["BillingCurrency"]):
        found.append(f"currency {row['BillingCurrency']!r}")
    for before, after in (("BillingPeriodStart", "BillingPeriodEnd"), ("ChargePeriodStart", "ChargePeriodEnd")):
        if datetime.fromisoformat(row[before]) >= datetime.fromisoformat(row[after]):
            found.append(f"{before} is not before {after}")
    for quantity, unit in (("PricingQuantity", "PricingUnit"), ("ConsumedQuantity", "ConsumedUnit")):
        if bool(row.get(quantity)) != bool(row.get(unit)):
            found.append(f"{quantity} and {unit} are not both there")
    if row["ChargeCategory"] == "Usage" and row["ChargeClass"] != "Correction" and not row["PricingQuantity"]:
        found.append("usage without a quantity")
    if row.get("ListUnitPrice") and row["PricingQuantity"]:
        whole = Decimal(row["ListUnitPrice"]) * Decimal(row["PricingQuantity"])
        if abs(whole - Decimal(row["ListCost"])) > Decimal("0.001") * max(abs(Decimal(row["ListCost"])), 1):
            found.append("ListUnitPrice x PricingQuantity is not ListCost")
    return found
