"""What a person says to act on a job or to hand one over. Field names are those of the actions' errors."""

from __future__ import annotations

from typing import Any, Final

from django import forms
from django.core.exceptions import ValidationError

from controlplane.audit.forms import ReasonForm
from controlplane.contracts.models import WorkloadClass
from controlplane.jobs.actions import NAME_MOST
from controlplane.jobs.batch_lines import CONTENT
from controlplane.tenants.models import Tenant
from controlplane.tenants.tenant_field import TenantField

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
    """A file of requests as a job. `only` is whose it is, where nobody may choose; else `tenant` is asked."""

    tenant = TenantField(
        help_text="Whose job it is: its short name", error_messages={"required": "Write whose job it is."}
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

    def __init__(self, *args: Any, only: Tenant | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._only = only
        classes = WorkloadClass.objects.filter(kind=WorkloadClass.Kind.BATCH).exclude(state="archived")
        if only is not None:
            del self.fields["tenant"]
            classes = classes.filter(slug__in=only.classes)
        names = list(classes.order_by("slug").values_list("slug", flat=True))
        self.fields["batch_class"].choices = [("", "The first batch class"), *((n, n) for n in names)]  # type: ignore[attr-defined]
        if only is not None and len(names) == 1:
            del self.fields["batch_class"]

    def clean_tenant(self) -> Tenant:
        tenant: Tenant = self.cleaned_data["tenant"]
        if tenant.state != Tenant.State.ACTIVE:
            raise ValidationError(f"{tenant.slug} is suspended: nothing of it runs.")
        return tenant

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


FIELD_OF: Final = {
    "input_file_id": "file",
    "metadata.class": "batch_class",
    **{f"metadata.{name}": name for name in ("pool", "name", "deadline", "if_late", "best_effort")},
}
"""Name of an error of `batch_actions.submit_batch` -> field of SubmitForm, where it is another name."""
