"""What a person says about a push or a rollback. Field names are those of the actions' errors."""

from django import forms
from django.core.exceptions import ValidationError

from controlplane.policy.actions import REASON_MOST
from controlplane.policy.wave_plan import Gates, WavePlan, read_waves

USUAL = Gates()

ALL_AT_ONCE_TEXT = "100"


class WavesField(forms.CharField):
    """`agent:gpu-01, 25, 100` -> plans of waves."""

    def to_python(self, value: str | None) -> tuple[WavePlan, ...]:  # type: ignore[override]
        return read_waves(value or "")


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

    field_order = (
        "seen",
        "waves",
        "hold_s",
        "refusals_most",
        "refusals_most_percent",
        "silent_most",
        "burn_most",
        "gate_timeout_s",
        "reason",
        "reviewed_digest",
    )
    seen = forms.BooleanField(label="I have read the warnings", required=False)
    waves = WavesField(
        label="Waves",
        help_text="Percent of each pool's agents, and pool:NAME or agent:NAME: agent:gpu-01, 25, 100. "
        "100 alone is all at once, without gates.",
        initial=ALL_AT_ONCE_TEXT,
        error_messages={"required": "Enter 100 for all at once."},
    )
    hold_s = forms.IntegerField(
        label="Hold each wave", help_text="Seconds after its last answer", initial=USUAL.hold_s, required=False
    )
    refusals_most = forms.IntegerField(
        label="Refusals allowed", help_text="Agents of a wave", initial=USUAL.refusals_most, required=False
    )
    refusals_most_percent = forms.IntegerField(
        label="Refusals allowed, as a share",
        help_text="Percent of a wave; the larger of both counts",
        initial=USUAL.refusals_most_percent,
        required=False,
    )
    silent_most = forms.IntegerField(
        label="Agents that may fall silent", help_text="Agents of a wave", initial=USUAL.silent_most, required=False
    )
    burn_most = forms.FloatField(
        label="Burn rate that stops",
        help_text="Of any contract among the wave's agents; empty: not asked",
        initial=USUAL.burn_most,
        required=False,
    )
    gate_timeout_s = forms.IntegerField(
        label="Ask a person after",
        help_text="Seconds in which something stays unknown",
        initial=USUAL.gate_timeout_s,
        required=False,
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

    def gates(self) -> Gates | None:
        """Gates as the form has them; all at once has none. Call it on a form that is valid."""
        given = self.cleaned_data
        if len(given["waves"]) < 2:
            return None
        numbers = {
            name: getattr(USUAL, name) if given[name] is None else given[name]
            for name in ("hold_s", "refusals_most", "refusals_most_percent", "silent_most", "gate_timeout_s")
        }
        return Gates(**numbers, burn_most=given["burn_most"])
