"""What a person says when a slot is asked back or a band is frozen. Field names are those of the actions' errors."""

from datetime import timedelta

from django import forms

from controlplane.audit.forms import ReasonForm
from controlplane.flex.actions import FREEZE_DEFAULT, FREEZE_MOST


class FreezeForm(ReasonForm):
    """`recall` is the other button: freeze and ask every lent slot back."""

    field_order = ("minutes", "recall", "reason")
    minutes = forms.IntegerField(
        label="Minutes",
        help_text="The freeze ends by itself; freeze again to renew it",
        min_value=1,
        max_value=FREEZE_MOST // timedelta(minutes=1),
        required=False,
        initial=FREEZE_DEFAULT // timedelta(minutes=1),
    )
    recall = forms.BooleanField(label="Recall every lent slot too", required=False)

    def length(self) -> timedelta:
        """How long the freeze lasts; one hour when nothing was said."""
        minutes = self.cleaned_data["minutes"]
        return FREEZE_DEFAULT if minutes is None else timedelta(minutes=minutes)
