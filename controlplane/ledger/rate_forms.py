"""Forms of rates: money typed as exact decimals of the currency, kept as nanos."""

from collections.abc import Mapping
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from controlplane.core.money import format_nanos, parse_nanos
from controlplane.fleet.edit_flow import Section, SectionedForm
from controlplane.fleet.forms import PercentField, UtcField
from controlplane.fleet.percent import percent_of_ppm, ppm_of_percent
from controlplane.ledger.models import CostRate, RateCard


class MoneyField(forms.CharField):
    """`2.50`: nanos inside; never a float. At most nine decimals, no separators."""

    widget = forms.TextInput(attrs={"inputmode": "decimal"})

    def to_python(self, value: Any) -> int | None:  # type: ignore[override]
        text = str(value or "").strip()
        if not text:
            return None
        try:
            nanos = parse_nanos(text)
        except ValueError as error:
            raise ValidationError(f"{error}.") from None
        if nanos < 0:
            raise ValidationError("A price is 0 or more.")
        return nanos

    def validate(self, value: Any) -> None:
        if value is None and self.required:
            raise ValidationError("Enter a price; 0 is allowed.", code="required")

    def run_validators(self, value: Any) -> None:
        """The prices' limits are the action's."""


class RateForm(SectionedForm):
    effective_from = UtcField(label="Takes effect, UTC", required=False, help_text="Empty: at once.")
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    def __init__(self, *args: Any, currency: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.UNITS = {name: currency for name, field in self.fields.items() if isinstance(field, MoneyField)}


class CostRateForm(RateForm):
    nanos_per_slot_hour = MoneyField(label="Cost of a slot-hour", help_text="What one slot costs us, idle or not.")

    SECTIONS = (Section("Cost rate", (("nanos_per_slot_hour", "effective_from"),)),)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields[
            "effective_from"
        ].help_text = (
            "Empty: at once. In the past: hours of open periods are attributed again and the difference is booked."
        )


class RateCardForm(RateForm):
    prompt_nanos_per_mtok = MoneyField(label="Prompt, per million tokens")
    cached_nanos_per_mtok = MoneyField(
        label="Cached prompt, per million tokens", required=False, help_text="Empty: as the prompt."
    )
    output_nanos_per_mtok = MoneyField(label="Output, per million tokens")
    gpu_nanos_per_slot_hour = MoneyField(
        label="GPU time, per slot-hour", required=False, help_text="Empty: not charged by time."
    )
    discount = PercentField(label="Discount, %", initial=0, help_text="On every line, such as the batch discount.")

    SECTIONS = (
        Section(
            "Rate card",
            (
                ("prompt_nanos_per_mtok", "cached_nanos_per_mtok"),
                ("output_nanos_per_mtok", "gpu_nanos_per_slot_hour"),
                ("discount", "effective_from"),
            ),
        ),
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.UNITS = {**self.UNITS, "discount": "%"}

    def values(self) -> dict[str, int]:
        data = self.cleaned_data
        cached = data["cached_nanos_per_mtok"]
        return {
            "prompt_nanos_per_mtok": data["prompt_nanos_per_mtok"],
            "cached_nanos_per_mtok": data["prompt_nanos_per_mtok"] if cached is None else cached,
            "output_nanos_per_mtok": data["output_nanos_per_mtok"],
            "gpu_nanos_per_slot_hour": data["gpu_nanos_per_slot_hour"] or 0,
            "discount_ppm": ppm_of_percent(data["discount"]),
        }


PRICES = (
    "prompt_nanos_per_mtok", "cached_nanos_per_mtok", "output_nanos_per_mtok", "gpu_nanos_per_slot_hour",
)  # fmt: skip
CARD_LABELS = {
    "prompt_nanos_per_mtok": "Prompt, per million tokens",
    "cached_nanos_per_mtok": "Cached prompt, per million tokens",
    "output_nanos_per_mtok": "Output, per million tokens",
    "gpu_nanos_per_slot_hour": "GPU time, per slot-hour",
    "discount": "Discount, %",
    "effective_from": "Takes effect",
}
COST_LABELS = {"nanos_per_slot_hour": "Cost of a slot-hour", "effective_from": "Takes effect"}


def card_initial(card: RateCard | None) -> dict[str, Any]:
    """The form's values of the newest card; its id travels as the version that the person saw."""
    if card is None:
        return {"version": 0}
    prices = {name: format_nanos(getattr(card, name)) for name in PRICES}
    return {**prices, "discount": percent_of_ppm(card.discount_ppm), "version": card.pk}


def cost_initial(rate: CostRate | None) -> dict[str, Any]:
    if rate is None:
        return {"version": 0}
    return {"nanos_per_slot_hour": format_nanos(rate.nanos_per_slot_hour), "version": rate.pk}


def card_shown(values: Mapping[str, int]) -> dict[str, Any]:
    """Prices as a review shows them."""
    prices = {name: format_nanos(values[name]) for name in PRICES if name in values}
    return {**prices, "discount": percent_of_ppm(values.get("discount_ppm", 0))}
