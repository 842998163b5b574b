"""A tenant as forms ask for it: by its short name, with suggestions. A menu of ten thousand would be a megabyte."""

from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import slug_or_name_holds

SUGGESTED_MAX = 30


def in_use(tenants: QuerySet[Tenant]) -> QuerySet[Tenant]:
    return tenants.exclude(state=Tenant.State.ARCHIVED).order_by("slug")


def suggestions(tenants: QuerySet[Tenant], text: str = "") -> SafeString:
    """Options of a datalist: the first tenants whose short name or name holds the text."""
    found = tenants.filter(slug_or_name_holds(text)) if text else tenants
    pairs = list(found.values_list("slug", "name")[:SUGGESTED_MAX])
    return format_html_join("", '<option value="{}">{}</option>', pairs)


class TenantInput(forms.TextInput):
    """A text input with a list of suggestions: the first ones from the server, then those that fit what is typed.

    `tenants` are whom the page may name, all where only staff sees it.
    """

    def __init__(self, attrs: dict[str, Any] | None = None, tenants: QuerySet[Tenant] | None = None) -> None:
        self._tenants = tenants
        super().__init__({"autocomplete": "off", "spellcheck": "false", "autocapitalize": "off", **(attrs or {})})

    def render(self, name: str, value: Any, attrs: dict[str, Any] | None = None, renderer: Any = None) -> SafeString:
        listed = f"{(attrs or {}).get('id', name)}-tenants"
        more = {
            "list": listed, "hx-get": reverse("tenant-names"), "hx-trigger": "input changed delay:150ms",
            "hx-target": f"#{listed}",
        }  # fmt: skip
        box = super().render(name, value, {**(attrs or {}), **more}, renderer)
        tenants = in_use(Tenant.objects.all() if self._tenants is None else self._tenants)
        return format_html('{}<datalist id="{}">{}</datalist>', box, listed, suggestions(tenants))


def tenant_input(name: str, value: str, tenants: QuerySet[Tenant], **attrs: Any) -> SafeString:
    """The input for a page whose form is plain HTML, with the tenants that the person may see; `id` is `id_NAME`."""
    return TenantInput(tenants=tenants).render(name, value, {"id": f"id_{name}", "maxlength": 63, **attrs})


class TenantField(forms.CharField):
    """Cleans to a tenant that is not archived, or None where it may be empty. `beside`: one that cannot be chosen."""

    widget = TenantInput
    beside: int | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"label": "Tenant", "max_length": 63, **options})

    def prepare_value(self, value: Any) -> Any:
        return value.slug if isinstance(value, Tenant) else value

    def clean(self, value: Any) -> Any:
        slug = super().clean(self.prepare_value(value))
        if not slug:
            return None
        found = in_use(Tenant.objects.all()).filter(slug=slug).first()
        if found is None or found.pk == self.beside:
            raise ValidationError(f"{slug} is no tenant to choose: write the short name of one that is in use.")
        return found
