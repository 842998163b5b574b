"""Price and quantity variance of a case in JSON form."""

from typing import Any

from controlplane.core.json_reader import JsonReader
from controlplane.core.money import NANOS_PER_UNIT, format_nanos, round_half_even
from controlplane.core.reconcile import variance


def explain(case: object) -> dict[str, Any]:
    """Answer of one case: `book` and `invoice`, each with `quantity` and `unit_price` as decimals.

    Raises ValueError for unusable input.
    """
    reader = JsonReader(case, "")
    book, invoice = reader.part("book"), reader.part("invoice")
    book_quantity, book_price = book.decimal("quantity"), book.decimal("unit_price")
    invoice_quantity, invoice_price = invoice.decimal("quantity"), invoice.decimal("unit_price")
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
