"""Saved mappings: how a provider's own CSV is read, by columns that a person chose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from django.core.exceptions import ValidationError
from django.core.validators import validate_slug
from django.db import transaction

from controlplane.audit.actions import changes, record
from controlplane.audit.actors import Actor
from controlplane.core.reconcile import InvoiceCategory
from controlplane.ledger.invoice_cells import DayOrder, DecimalMark
from controlplane.ledger.invoice_columns import CATEGORIES, COLUMN_FIELDS, NEEDED, ColumnMap, comparable
from controlplane.ledger.models import InvoiceMapping

NAME_MOST = 63
HEADER_MOST = 300
WORDS_MOST = 200
TITLES: Mapping[str, str] = {
    "billed": "Billed amount", "effective": "Effective amount", "currency": "Currency", "category": "Category",
    "provider": "Provider", "account": "Account", "sku": "SKU", "region": "Region", "service": "Service",
    "description": "Description", "starts": "Day or start", "ends": "End", "quantity": "Quantity", "unit": "Unit",
    "line_id": "Line id",
}  # fmt: skip
assert tuple(TITLES) == COLUMN_FIELDS


@dataclass(frozen=True, slots=True)
class Columns:
    """A mapping before it is saved: `columns` names the headers of each fact, the first found counts."""

    columns: Mapping[str, Sequence[str]]
    categories: Mapping[str, str] = field(default_factory=dict)
    provider_name: str = ""
    fixed_currency: str = ""
    decimal_mark: str = ""
    day_order: str = ""

    def as_map(self) -> ColumnMap:
        """For the reader. Raises ValidationError by field."""
        self.check()
        return ColumnMap(
            **{fact: tuple(self.columns.get(fact, ())) for fact in COLUMN_FIELDS},
            provider_name=self.provider_name,
            fixed_currency=self.fixed_currency,
            mark=DecimalMark(self.decimal_mark) if self.decimal_mark else None,
            order=DayOrder(self.day_order) if self.day_order else None,
            categories={**CATEGORIES, **{word: InvoiceCategory(value) for word, value in self.words().items()}},
        )

    def words(self) -> dict[str, str]:
        """The categories by their words as the reader compares them."""
        return {comparable(word): value for word, value in self.categories.items()}

    def check(self) -> None:
        """Raises ValidationError by field; all that is wrong at once."""
        wrong: dict[str, str] = {}
        for fact in NEEDED:
            if not self.columns.get(fact):
                wrong[fact] = f"Choose the column of the {TITLES[fact].lower()}."
        for fact, names in self.columns.items():
            if fact not in TITLES:
                wrong[fact] = f"There is no such fact. Known are {', '.join(TITLES)}."
            elif any(not name or len(name) > HEADER_MOST for name in names):
                wrong[fact] = f"A column's name has 1 to {HEADER_MOST} characters."
        known = {str(category) for category in InvoiceCategory}
        unknown = sorted(set(self.categories.values()) - known)
        if unknown or len(self.categories) > WORDS_MOST:
            wrong["categories"] = f"At most {WORDS_MOST} words, each one of {', '.join(sorted(known))}."
        if self.fixed_currency and not (len(self.fixed_currency) == 3 and self.fixed_currency.isascii()):
            wrong["fixed_currency"] = "Enter a currency of three letters, such as EUR."
        if self.decimal_mark not in ("", *DecimalMark):
            wrong["decimal_mark"] = "Choose point or comma, or leave it to the file."
        if self.day_order not in ("", *DayOrder):
            wrong["day_order"] = "Choose month_first or day_first, or leave it to the file."
        if len(self.provider_name) > NAME_MOST:
            wrong["provider_name"] = f"Use at most {NAME_MOST} characters."
        if wrong:
            raise ValidationError(wrong)


def columns_of(row: InvoiceMapping) -> Columns:
    """A saved mapping as it may be changed."""
    return Columns(row.columns, row.categories, row.provider_name, row.fixed_currency, row.decimal_mark, row.day_order)


def save_mapping(name: str, given: Columns, *, actor: Actor, now: datetime) -> InvoiceMapping:
    """Saves a mapping under its name, over the one before. Invoices that were taken keep the lines they have.

    Raises ValidationError by field, `save_as` for the name.
    """
    name = name.strip().lower()
    try:
        validate_slug(name)
    except ValidationError:
        raise ValidationError({"save_as": "Name the mapping with letters, digits and hyphens."}) from None
    if len(name) > NAME_MOST:
        raise ValidationError({"save_as": f"Use at most {NAME_MOST} characters."})
    given.check()
    after = {
        "columns": {fact: list(names) for fact, names in given.columns.items() if names}, "categories": given.words(),
        "provider_name": given.provider_name, "fixed_currency": given.fixed_currency.upper(),
        "decimal_mark": given.decimal_mark, "day_order": given.day_order,
    }  # fmt: skip
    with transaction.atomic():
        known = InvoiceMapping.objects.select_for_update().filter(name=name).first()
        if known is None:
            row = InvoiceMapping.objects.create(name=name, created_at=now, created_by=actor.name, **after)
            record(
                actor=actor, action="invoice_mapping.create", noun="invoice_mapping", object_id=name, now=now,
                after=after,
            )  # fmt: skip
            return row
        was, became = changes({field: getattr(known, field) for field in after}, after)
        if became:
            for field_name, value in after.items():
                setattr(known, field_name, value)
            known.version += 1
            known.save(update_fields=[*after, "version"])
            record(
                actor=actor, action="invoice_mapping.change", noun="invoice_mapping", object_id=name, now=now,
                before=was, after=became,
            )  # fmt: skip
        return known
