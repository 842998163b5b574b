"""Price and quantity variance of a case in JSON form."""

from typing import Any

from controlplane.core.case_input import Case, exact, required
from controlplane.core.money import NANOS_PER_UNIT, format_nanos, round_half_even
from controlplane.core.reconcile import variance


def explain(case: Case) -> dict[str, Any]:
    """Answer of one case: `book` and `invoice`, each with `quantity` and `unit_price` as decimals.

    Raises ValueError for unusable input.
    """
    book, invoice = required(case, "book"), required(case, "invoice")
    book_quantity, book_price = _decimal(book, "quantity"), _decimal(book, "unit_price")
    invoice_quantity, invoice_price = _decimal(invoice, "quantity"), _decimal(invoice, "unit_price")
    result = variance(book_quantity, book_price, invoice_quantity, invoice_price)
    return {
        "book_nanos": round_half_even(book_quantity * book_price * NANOS_PER_UNIT),
        "invoice_nanos": round_half_even(invoice_quantity * invoice_price * NANOS_PER_UNIT),
        "price_variance_nanos": result.price_nanos,
        "quantity_variance_nanos": result.quantity_nanos,
        "total_variance_nanos": result.total_nanos,
        "price_variance": format_nanos(result.price_nanos),
        "quantity_variance": format_nanos(result.quantity_nanos),
        "total_variance": format_nanos(result.total_nanos),
    }


def _decimal(case: Case, key: str) -> Any:
    return exact(required(case, key), key)
