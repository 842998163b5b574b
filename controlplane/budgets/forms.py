"""The form of a budget: money as people write it, in nanos as the actions take it."""

from datetime import datetime
from typing import Any
from zoneinfo import available_timezones

from django import forms

from controlplane.budgets.models import Budget
from controlplane.core.money import format_nanos, parse_nanos
from controlplane.core.period import load_zone, wall_clock_instant
from controlplane.tenants.tenant_field import TenantField


class BudgetForm(forms.Form):
    """`tenant` only for a new one; period, first day and zone only while nothing was spent."""

    tenant = TenantField(help_text="Its short name. Its children spend from the budget too.")
    name = forms.CharField(label="Name", max_length=120)
    limit = forms.CharField(
        label="Limit", max_length=40, help_text="With a dot and without separators, such as 22000.00."
    )
    hard = forms.ChoiceField(
        label="When it is used up",
        choices=[("hard", "Stop: requests are refused"), ("soft", "Go on: only notify")],
        initial="hard",
    )
    period = forms.ChoiceField(
        label="Period",
        choices=[("day", "Day"), ("week", "Week, from Monday"), ("month", "Month")],
        initial="month",
    )
    anchor_day = forms.IntegerField(
        label="First day of the month",
        min_value=1,
        max_value=31,
        initial=1,
        help_text="In shorter months the last day. For day and week leave it at 1.",
    )
    zone = forms.ChoiceField(label="Time zone", help_text="Its midnight begins a period.")
    thresholds = forms.CharField(
        label="Notify at", max_length=60, required=False, initial="50, 80, 100", help_text="Percentages, rising."
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    def __init__(self, *args: Any, budget: Budget | None = None, zone: str = "UTC", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        zones = sorted(available_timezones() | {zone, "UTC"})
        self.fields["zone"].choices = [(name, name) for name in zones]  # type: ignore[attr-defined]
        self.fields["zone"].initial = zone
        if budget is not None:
            del self.fields["tenant"]

    def clean_limit(self) -> int:
        """Nanos."""
        try:
            nanos = parse_nanos(self.cleaned_data["limit"])
        except ValueError as error:
            raise forms.ValidationError(f"{str(error)[0].upper()}{str(error)[1:]}.") from None
        if not 0 <= nanos < 2**63:
            raise forms.ValidationError("The limit is 0 or more and below 9.2 billion.")
        return nanos

    def clean_hard(self) -> bool:
        return self.cleaned_data["hard"] == "hard"

    def clean_thresholds(self) -> list[int]:
        parts = [part.strip().removesuffix("%").strip() for part in self.cleaned_data["thresholds"].split(",")]
        try:
            return [int(part) for part in parts if part]
        except ValueError:
            raise forms.ValidationError("Write whole percentages with commas between, such as 50, 80, 100.") from None

    def values(self) -> dict[str, Any]:
        """What the actions take."""
        data = dict(self.cleaned_data)
        data.pop("version", None)
        data.pop("tenant", None)
        limit_nanos, marks = data.pop("limit"), data.pop("thresholds")
        return {**data, "limit_nanos": limit_nanos, "thresholds_percent": marks}


class IncreaseForm(forms.Form):
    """More than the limit until an instant; instants are read by the clocks of the budget's zone."""

    amount = forms.CharField(
        label="Increase by", max_length=40, help_text="With a dot and without separators, such as 500.00."
    )
    starts_at = forms.DateTimeField(
        label="From",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}),
        help_text="Empty: from now on.",
    )
    ends_at = forms.DateTimeField(
        label="Until",
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}),
        help_text="It ends by itself, and leases that it allowed with it.",
    )
    reason = forms.CharField(label="Reason", max_length=400, help_text="Kept in the audit log with your name.")

    def __init__(self, *args: Any, zone: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._zone = load_zone(zone)

    def clean_amount(self) -> int:
        """Nanos."""
        try:
            return parse_nanos(self.cleaned_data["amount"])
        except ValueError as error:
            raise forms.ValidationError(f"{str(error)[0].upper()}{str(error)[1:]}.") from None

    def clean_starts_at(self) -> datetime | None:
        return self._instant("starts_at")

    def clean_ends_at(self) -> datetime | None:
        return self._instant("ends_at")

    def _instant(self, name: str) -> datetime | None:
        given: datetime | None = self.cleaned_data[name]
        return None if given is None else wall_clock_instant(self._zone, given.date(), given.time())

    def values(self) -> dict[str, Any]:
        """What the action takes."""
        data = dict(self.cleaned_data)
        return {"amount_nanos": data.pop("amount"), **data}


def budget_initial(budget: Budget) -> dict[str, Any]:
    names = ("name", "period", "anchor_day", "zone", "version")
    return {name: getattr(budget, name) for name in names} | {
        "limit": format_nanos(budget.limit_nanos),
        "hard": "hard" if budget.hard else "soft",
        "thresholds": ", ".join(str(mark) for mark in budget.thresholds_percent),
    }
