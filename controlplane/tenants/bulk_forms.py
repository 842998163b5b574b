"""The values that an action on many rows asks for, one small form each."""

from typing import Any

from django import forms

from controlplane.tenants.forms import LARGE
from controlplane.tenants.queries import class_slugs
from controlplane.tenants.roles import Role


class WeightForm(forms.Form):
    weight = forms.IntegerField(
        label="Weight", min_value=1, max_value=10_000, help_text="Share of a class beside the other tenants."
    )


class ConcurrencyForm(forms.Form):
    max_concurrency = forms.IntegerField(
        label="Concurrent requests", min_value=1, max_value=LARGE, help_text="Running and queued, all agents."
    )


class CostCentreForm(forms.Form):
    cost_centre = forms.CharField(label="Cost centre", max_length=60, required=False, help_text="Empty: none.")


class ClassForm(forms.Form):
    workload_class = forms.ChoiceField(label="Class")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["workload_class"].choices = class_slugs()  # type: ignore[attr-defined]


class ExpiryForm(forms.Form):
    expires_at = forms.DateTimeField(
        label="Expires (UTC)",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
        help_text="Empty: never.",
    )


class RoleForm(forms.Form):
    role = forms.ChoiceField(
        label="Role",
        choices=[(role.value, role.value) for role in Role if role != Role.TENANT],
        help_text="Roles for the whole installation; a tenant's member is made one by one.",
    )
