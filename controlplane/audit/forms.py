"""What forms of every noun ask for: why."""

from django import forms

from controlplane.audit.reasons import REASON_CHARS_MAX


class ReasonForm(forms.Form):
    """The reason of a change, kept in the audit log."""

    reason = forms.CharField(
        label="Reason",
        help_text="Kept in the audit log with your name",
        max_length=REASON_CHARS_MAX,
        widget=forms.Textarea(attrs={"rows": 3}),
        error_messages={"required": "Enter a reason."},
    )
