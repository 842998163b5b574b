"""What forms of every noun ask for: why."""

from collections.abc import Mapping

from django import forms
from django.core.exceptions import ValidationError

from controlplane.audit.reasons import REASON_CHARS_MAX


def reason_field(
    label: str = "Reason",
    help_text: str = "Kept in the audit log with your name",
    missing: str = "Enter a reason.",
) -> forms.CharField:
    """What is said of a change, as long as the audit log takes it; `missing` is what an empty one is told."""
    return forms.CharField(
        label=label,
        help_text=help_text,
        max_length=REASON_CHARS_MAX,
        widget=forms.Textarea(attrs={"rows": 3}),
        error_messages={"required": missing},
    )


class ReasonForm(forms.Form):
    """The reason of a change, kept in the audit log."""

    reason = reason_field()


def take_errors(form: forms.Form, error: ValidationError, field_of: Mapping[str, str] | None = None) -> None:
    """Puts an action's errors onto the fields of the same name, or those of `field_of`; what has no field on top."""
    messages = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
    for name, texts in messages.items():
        place = (field_of or {}).get(name, name)
        for text in texts:
            form.add_error(place if place in form.fields else None, text)
