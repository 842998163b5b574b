"""What a person says about alerts, silences and receivers. Field names are those of the actions' errors."""

from datetime import UTC, datetime, timedelta
from typing import Any

from django import forms

from controlplane.alerts.actions import KIND_WORDS, SILENCE_LONGEST
from controlplane.alerts.models import Alert, Receiver, Severity
from controlplane.audit.forms import ReasonForm, reason_field


class NoteForm(ReasonForm):
    """What is being done about an alert."""

    reason = reason_field(
        "Note", "What you do about it; others see it beside the alert and in the audit log", "Enter a note."
    )


class SilenceForm(ReasonForm):
    """For how long, and of what nobody is told."""

    field_order = ("kinds", "pool", "contract", "starts_at", "hours", "reason")
    kinds = forms.MultipleChoiceField(
        label="Kinds", help_text="None chosen: all kinds", choices=tuple(KIND_WORDS.items()), required=False,
        widget=forms.CheckboxSelectMultiple,
    )  # fmt: skip
    pool = forms.CharField(label="Pool", help_text="Empty: any", max_length=63, required=False)
    contract = forms.CharField(label="Contract", help_text="Empty: any", max_length=63, required=False)
    starts_at = forms.DateTimeField(
        label="Begins, UTC",
        help_text="Empty: now. Later: a maintenance window",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )
    hours = forms.FloatField(
        label="Hours", min_value=0.1, max_value=SILENCE_LONGEST / timedelta(hours=1), initial=1,
        widget=forms.NumberInput(attrs={"step": "any"}),
    )  # fmt: skip

    def clean_hours(self) -> float:
        hours = self.cleaned_data["hours"]
        if hours != hours:
            raise forms.ValidationError("Enter a number of hours.")
        return hours

    def values(self, now: datetime) -> dict[str, Any]:
        """What `create_silence` takes."""
        data = self.cleaned_data
        starts_at = (data["starts_at"] or now).astimezone(UTC)
        return {
            "kinds": data["kinds"],
            "pool": data["pool"].strip(),
            "contract": data["contract"].strip(),
            "starts_at": starts_at,
            "ends_at": max(starts_at, now) + timedelta(hours=data["hours"]),
        }


def silence_initial(alert: Alert) -> dict[str, Any]:
    """A silence that fits just what the alert is about."""
    return {"kinds": [alert.kind], "pool": alert.pool, "contract": alert.contract, "hours": 1}


class ReceiverForm(ReasonForm):
    """Who is told, and of what."""

    field_order = ("name", "kind", "target", "severity", "enabled", "reason")
    name = forms.CharField(label="Name", max_length=120)
    kind = forms.ChoiceField(label="Kind", choices=Receiver.Kind.choices)
    target = forms.CharField(
        label="Address",
        help_text="https://… of a webhook, or an e-mail address. Only admins see a webhook's path again",
        max_length=500,
    )
    severity = forms.ChoiceField(
        label="Tells",
        choices=((Severity.PAGE, "Pages only"), (Severity.TICKET, "Pages and tickets")),
    )
    enabled = forms.BooleanField(label="Enabled", required=False, initial=True)
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    def __init__(self, *args: Any, kind_fixed: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        if kind_fixed:
            self.fields["kind"].disabled = True

    def values(self) -> dict[str, Any]:
        """RECEIVER_FIELDS."""
        return {name: self.cleaned_data[name] for name in ("name", "kind", "target", "severity", "enabled")}
