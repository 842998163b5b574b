"""What a person says about a push or a rollback. Field names are those of the actions' errors."""

from django import forms
from django.core.exceptions import ValidationError

from controlplane.policy.actions import REASON_MOST

ALL_AT_ONCE_TEXT = "100"


class WavesField(forms.CharField):
    """`10, 50, 100` -> (10, 50, 100)."""

    def to_python(self, value: str | None) -> tuple[int, ...]:  # type: ignore[override]
        parts = [part.strip().removesuffix("%").strip() for part in (value or "").split(",")]
        try:
            return tuple(int(part) for part in parts if part)
        except ValueError as error:
            raise ValidationError("Write percentages with commas between them: for example 10, 50, 100.") from error


class ReasonForm(forms.Form):
    reason = forms.CharField(
        label="Reason",
        help_text="Kept in the audit log with your name",
        max_length=REASON_MOST,
        widget=forms.Textarea(attrs={"rows": 3}),
        error_messages={"required": "Enter a reason for this change."},
    )


class PushForm(ReasonForm):
    """`reviewed_digest` is the digest of what the page showed; a push of anything else is refused."""

    field_order = ("seen", "waves", "reason", "reviewed_digest")
    seen = forms.BooleanField(label="I have read the warnings", required=False)
    waves = WavesField(
        label="Waves",
        help_text="Percent of each pool's agents; 100 is all at once. A refusal stops later waves and rolls back.",
        initial=ALL_AT_ONCE_TEXT,
        error_messages={"required": "Enter 100 for all at once."},
    )
    reviewed_digest = forms.CharField(widget=forms.HiddenInput, max_length=64)

    def __init__(self, *args: object, warnings: int, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.warnings = warnings
        if not warnings:
            del self.fields["seen"]

    def clean_seen(self) -> bool:
        if not self.cleaned_data["seen"]:
            raise ValidationError("Confirm that you have read the warnings.")
        return True
