"""What a person says to act on a job or to hand one over. Field names are those of the actions' errors."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from controlplane.audit.forms import ReasonForm
from controlplane.contracts.models import WorkloadClass
from controlplane.jobs.actions import NAME_MOST
from controlplane.jobs.batch_lines import CONTENT
from controlplane.tenants.models import Tenant

DEADLINE_HELP = (
    "A time and its zone (06:00 Europe/Berlin: the next one) or an instant with its offset (2026-12-01T06:00:00+01:00)"
)


class ExtendForm(ReasonForm):
    """`seen` is the instant whose effect was shown; another one is shown first."""

    field_order = ("deadline", "reason")
    deadline = forms.CharField(
        label="New deadline",
        help_text=DEADLINE_HELP,
        max_length=80,
        error_messages={"required": "Enter the new deadline."},
    )
    seen = forms.CharField(required=False, widget=forms.HiddenInput, max_length=80)


class SubmitForm(forms.Form):
    """A file of requests as a job. `tenant` is asked of those who may choose one."""

    tenant = forms.ModelChoiceField(
        label="Tenant",
        queryset=Tenant.objects.none(),
        to_field_name="slug",
        error_messages={"required": "Choose whose job it is.", "invalid_choice": "There is no such tenant."},
    )
    file = forms.FileField(
        label="File of requests",
        help_text="JSON Lines in UTF-8: one request a line, each with custom_id, method, url and body",
        error_messages={
            "required": "Choose a file.",
            "empty": "The file holds no request. Write one JSON object a line.",
            "missing": "Choose a file.",
        },
        widget=forms.ClearableFileInput(attrs={"accept": ".jsonl,.ndjson,application/x-ndjson,text/plain"}),
    )
    name = forms.CharField(
        label="Name", required=False, max_length=NAME_MOST, help_text="What lists call it; else the file's name"
    )
    endpoint = forms.ChoiceField(label="Requests are for", choices=[(path, path) for path in CONTENT])
    batch_class = forms.ChoiceField(label="Class", required=False, choices=[])
    pool = forms.SlugField(
        label="Pool", required=False, max_length=63, help_text="Only where several serve the model of the requests"
    )
    deadline = forms.CharField(
        label="Deadline", required=False, max_length=80, help_text=f"{DEADLINE_HELP}; without one 24 h from now"
    )
    if_late = forms.ChoiceField(
        label="If the deadline cannot be met",
        required=False,
        choices=[("refuse", "Refuse the job, and say why"), ("best_effort", "Take it as best effort")],
    )
    best_effort = forms.BooleanField(label="Best effort: no deadline, served last, borrows nothing", required=False)

    def __init__(self, *args: Any, tenants: list[Tenant], choose: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._only = None if choose else tenants[0]
        if choose:
            self.fields["tenant"].queryset = Tenant.objects.filter(  # type: ignore[attr-defined]
                pk__in=[tenant.pk for tenant in tenants]
            ).order_by("slug")
        else:
            del self.fields["tenant"]
        slugs = {slug for tenant in tenants for slug in tenant.classes}
        classes = WorkloadClass.objects.filter(slug__in=slugs, kind=WorkloadClass.Kind.BATCH).exclude(state="archived")
        names = list(classes.order_by("slug").values_list("slug", flat=True))
        self.fields["batch_class"].choices = [("", "The first batch class"), *((n, n) for n in names)]  # type: ignore[attr-defined]
        if not choose and len(names) == 1:
            del self.fields["batch_class"]

    @property
    def owner(self) -> Tenant:
        """Whose job it is, of a valid form."""
        return self._only or self.cleaned_data["tenant"]

    def metadata(self) -> dict[str, str]:
        """What was said, as the metadata of a batch."""
        found = {"class": "batch_class", "pool": "pool", "name": "name", "deadline": "deadline"}
        said = {name: self.cleaned_data.get(field, "").strip() for name, field in found.items()}
        told = {name: text for name, text in said.items() if text}
        if self.cleaned_data["best_effort"]:
            return told | {"best_effort": "true"}
        return told | {"if_late": self.cleaned_data["if_late"] or "refuse"}


FIELD_OF = {"input_file_id": "file", "metadata.class": "batch_class"}
"""Name of an action's error -> field of the form, where it is not the last part of the name."""


def take_errors(form: forms.Form, error: ValidationError) -> None:
    """Puts an action's errors onto the fields of the same name, what has no field on top."""
    messages = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
    for name, texts in messages.items():
        field = FIELD_OF.get(name, name.rpartition(".")[2])
        for text in texts:
            form.add_error(field if field in form.fields else None, text)
