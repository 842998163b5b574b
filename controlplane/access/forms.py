"""Forms of access: parsing and wording; the rules are the actions'."""

from typing import Any

from django import forms

from controlplane.access import invitation_actions
from controlplane.access.token_actions import DAYS_MAX, allowed_to
from controlplane.tenants.forms import TenantOfRole
from controlplane.tenants.roles import Role

READS = "reads"
WRITES = "writes"
CHOSEN = "chosen"


class TokenForm(forms.Form):
    """A token of one's own; `permissions` are those of the role."""

    name = forms.CharField(label="Name", max_length=120, help_text="What will use it, such as a nightly export.")
    reach = forms.ChoiceField(
        label="It may",
        choices=[(READS, "Read what I may read"), (WRITES, "Do all that I may do"), (CHOSEN, "Only what I tick below")],
        initial=READS,
    )
    chosen = forms.MultipleChoiceField(
        label="Permissions",
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="For the last choice only.",
    )
    days = forms.IntegerField(
        label="Days until it ends", min_value=1, max_value=DAYS_MAX, initial=90, help_text=f"1 to {DAYS_MAX}."
    )

    def __init__(self, *args: Any, role: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = allowed_to(role)
        self.fields["chosen"].choices = [(name, name) for name in self.held]  # type: ignore[attr-defined]

    def permissions(self) -> list[str]:
        """The names that the form stands for."""
        reach = self.cleaned_data["reach"]
        if reach == CHOSEN:
            return self.cleaned_data["chosen"]
        return [name for name in self.held if reach == WRITES or name.endswith(".read")]


class InvitationForm(forms.Form):
    """Whom to invite, as what."""

    email = forms.EmailField(label="Email", help_text="Who signs in with a provider is known by it.")
    full_name = forms.CharField(label="Full name", max_length=150, required=False)
    role = forms.ChoiceField(label="Role", choices=[(role.value, role.value) for role in Role], initial="viewer")
    tenant = TenantOfRole()
    days = forms.IntegerField(
        label="Days that the link works", min_value=1, max_value=invitation_actions.DAYS_MAX, initial=7
    )


class AcceptForm(forms.Form):
    """How the person who was invited will sign in."""

    username = forms.CharField(
        label="Sign-in name", max_length=150, widget=forms.TextInput(attrs={"autocomplete": "username"})
    )
    password = forms.CharField(
        label="Password",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="At least 12 characters, not a common one and not like your name.",
    )
    again = forms.CharField(
        label="Password once more", widget=forms.PasswordInput(attrs={"autocomplete": "new-password"})
    )

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if data.get("password") and data.get("again") and data["password"] != data["again"]:
            self.add_error("again", "The two passwords differ.")
        return data
