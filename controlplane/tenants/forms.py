"""Forms of tenants, keys and people: parsing and wording; the rules are the actions'."""

from datetime import datetime, timedelta
from typing import Any

from django import forms

from controlplane.audit.reasons import REASON_CHARS_MAX
from controlplane.tenants.models import ApiKey, Member, Tenant
from controlplane.tenants.queries import class_slugs, model_names
from controlplane.tenants.roles import Role
from controlplane.tenants.tenant_field import TenantField

LARGE = 2**31 - 1
NOTHING_YET = {
    "classes": "There is no class yet: create classes under Policy, then choose them here.",
    "model_names": "No pool serves a model yet: until then every model is allowed.",
}


class TenantForm(forms.Form):
    """Everything about a tenant but its state; `slug` only for a new one."""

    slug = forms.SlugField(
        label="Short name",
        max_length=63,
        help_text="1 to 63 lower-case letters, digits and hyphens. It stands in addresses and never changes.",
    )
    name = forms.CharField(label="Name", max_length=120)
    parent = TenantField(
        label="Parent",
        required=False,
        help_text="The short name of a tenant; its budgets count the charges too. Empty: none.",
    )
    weight = forms.IntegerField(
        label="Weight", min_value=1, max_value=10_000, initial=1, help_text="Share of a class beside the other tenants."
    )
    max_concurrency = forms.IntegerField(
        label="Concurrent requests",
        min_value=1,
        max_value=LARGE,
        initial=32,
        help_text="Running and queued, all agents.",
    )
    classes = forms.MultipleChoiceField(
        label="Classes",
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="None chosen: it can send nothing.",
    )
    model_names = forms.MultipleChoiceField(
        label="Models", required=False, widget=forms.CheckboxSelectMultiple, help_text="None chosen: every model."
    )
    outage_posture = forms.ChoiceField(
        label="Without control plane and lease",
        choices=[
            ("closed", "Closed: requests under a hard budget are refused"),
            ("open", "Open: to a slice that agents hold beforehand"),
        ],
        initial="closed",
    )
    cost_centre = forms.CharField(label="Cost centre", max_length=60, required=False)
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    def __init__(self, *args: Any, tenant: Tenant | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if tenant is not None:
            del self.fields["slug"]
            self.fields["parent"].beside = tenant.pk  # type: ignore[attr-defined]
        held = tenant.classes if tenant else []
        self.fields["classes"].choices = _with(class_slugs(), held)  # type: ignore[attr-defined]
        self.fields["model_names"].choices = _with(  # type: ignore[attr-defined]
            [(name, name) for name in model_names()], tenant.model_names if tenant else []
        )
        for name in ("classes", "model_names"):
            if not self.fields[name].choices:  # type: ignore[attr-defined]
                self.fields[name].help_text = NOTHING_YET[name]

    def values(self) -> dict[str, Any]:
        """What the actions take."""
        data = dict(self.cleaned_data)
        data.pop("version", None)
        parent = data.pop("parent")
        return {**data, "parent_id": parent.pk if parent else None}


class KeyForm(forms.Form):
    """A key of one tenant."""

    name = forms.CharField(label="Name", max_length=120, help_text="The service that uses it, for instance.")
    classes = forms.MultipleChoiceField(label="Classes", widget=forms.CheckboxSelectMultiple)
    default_class = forms.ChoiceField(label="Default class", help_text="Taken when a request names none.")
    expires_at = forms.DateTimeField(
        label="Expires (UTC)",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
        help_text="Empty: never.",
    )
    max_concurrency = forms.IntegerField(
        label="Concurrent requests",
        required=False,
        min_value=1,
        max_value=LARGE,
        help_text="Empty: the tenant's limit.",
    )
    requests_per_s = forms.FloatField(label="Requests per second", required=False, min_value=0.001, max_value=1e6)
    tokens_per_minute = forms.IntegerField(label="Tokens per minute", required=False, min_value=1, max_value=LARGE)
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    def __init__(self, *args: Any, tenant: Tenant, key: ApiKey | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        held = key.classes if key else []
        known = dict(class_slugs())
        choices = _with([(slug, known.get(slug, slug)) for slug in tenant.classes], held)
        self.fields["classes"].choices = choices  # type: ignore[attr-defined]
        self.fields["default_class"].choices = choices  # type: ignore[attr-defined]

    def values(self) -> dict[str, Any]:
        data = dict(self.cleaned_data)
        data.pop("version", None)
        return data


class RotateForm(forms.Form):
    """Rotation under a name of its own, so that sending it twice rotates once."""

    overlap_hours = forms.IntegerField(
        label="The present secret works for another",
        min_value=0,
        max_value=720,
        initial=48,
        help_text="0 to 720 hours; 0 ends it at once.",
    )
    end_overlap = forms.BooleanField(label="The secret before it may stop now", required=False)
    reason = forms.CharField(
        label="Reason", max_length=REASON_CHARS_MAX, help_text="Kept in the audit log with your name."
    )
    rotation_id = forms.CharField(widget=forms.HiddenInput, min_length=8, max_length=64)

    def __init__(self, *args: Any, key: ApiKey, now: datetime, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if key.previous_valid_until is None or key.previous_valid_until <= now:
            del self.fields["end_overlap"]

    def overlap(self) -> timedelta:
        return timedelta(hours=self.cleaned_data["overlap_hours"])


class TenantOfRole(TenantField):
    """The tenant of a person with the role tenant."""

    def __init__(self) -> None:
        super().__init__(required=False, help_text="Its short name, only for the role tenant.")


class MemberForm(forms.Form):
    """A new person."""

    username = forms.CharField(label="Sign-in name", max_length=150)
    full_name = forms.CharField(label="Full name", max_length=150, required=False)
    email = forms.EmailField(label="Email", required=False)
    role = forms.ChoiceField(label="Role", choices=[(role.value, role.value) for role in Role], initial="viewer")
    tenant = TenantOfRole()
    password = forms.CharField(
        label="First password",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="At least 12 characters. Hand it over in person and have it changed.",
    )


class MemberEditForm(forms.Form):
    """Role and tenant of a person."""

    role = forms.ChoiceField(label="Role", choices=[(role.value, role.value) for role in Role])
    tenant = TenantOfRole()
    version = forms.IntegerField(widget=forms.HiddenInput)


class PasswordForm(forms.Form):
    """A password that an administrator sets for somebody."""

    password = forms.CharField(
        label="New password",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="At least 12 characters. The person's other sessions end.",
    )


def tenant_initial(tenant: Tenant) -> dict[str, Any]:
    """The form's values of a row."""
    names = ("name", "weight", "max_concurrency", "classes", "model_names", "outage_posture", "cost_centre", "version")
    return {name: getattr(tenant, name) for name in names} | {"parent": tenant.parent}


def copied_initial(tenant: Tenant) -> dict[str, Any]:
    """What a new tenant takes from another one: everything but its names."""
    return {name: value for name, value in tenant_initial(tenant).items() if name not in ("name", "version")}


def key_initial(key: ApiKey) -> dict[str, Any]:
    names = (
        "name",
        "classes",
        "default_class",
        "expires_at",
        "max_concurrency",
        "requests_per_s",
        "tokens_per_minute",
        "version",
    )
    return {name: getattr(key, name) for name in names}


def member_initial(member: Member) -> dict[str, Any]:
    return {"role": member.role, "tenant": member.tenant, "version": member.version}


def _with(choices: list[tuple[str, str]], held: list[str]) -> list[tuple[str, str]]:
    """The choices, and what the row has although it is no longer offered: saving must not take it away silently."""
    known = {value for value, _ in choices}
    return [*choices, *((value, f"{value} (no longer offered)") for value in held if value not in known)]
