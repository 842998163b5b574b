"""The page that asks whether a request with a key would be admitted. It is asked by GET: nothing is written."""

from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone

from controlplane.live import key_check
from controlplane.tenants.access import requires
from controlplane.tenants.models import ApiKey
from controlplane.tenants.queries import key_for, model_names

TOKENS_MAX = 10_000_000


class RequestForm(forms.Form):
    """A request that is not sent."""

    workload_class = forms.ChoiceField(label="Class")
    model = forms.ChoiceField(label="Model")
    prompt_tokens = forms.IntegerField(label="Prompt, tokens", min_value=1, max_value=TOKENS_MAX, initial=500)
    output_tokens = forms.IntegerField(
        label="Output at most, tokens", min_value=1, max_value=TOKENS_MAX, required=False,
        help_text="Empty: what the class takes when a request says nothing.",
    )  # fmt: skip

    def __init__(self, *args: Any, key: ApiKey, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        slugs = list(dict.fromkeys((key.default_class, *key.classes, *key.tenant.classes)))
        self.fields["workload_class"].choices = [(slug, slug) for slug in slugs]  # type: ignore[attr-defined]
        self.fields["model"].choices = [(name, name) for name in model_names()]  # type: ignore[attr-defined]

    def asked(self) -> key_check.Asked:
        data = self.cleaned_data
        return key_check.Asked(
            data["workload_class"], data["model"], data["prompt_tokens"], data["output_tokens"]
        )  # fmt: skip


@requires("key.read")
def check(request: HttpRequest, public_id: str) -> HttpResponse:
    """Every check of admission, pool by pool."""
    key, now = key_for(request.user, public_id), timezone.now()
    form = RequestForm(request.GET if "model" in request.GET else None, key=key)
    valid = form.is_valid()
    context = {
        "key": key, "form": form, "asked": valid, "answers": key_check.answers(key, form.asked(), now) if valid else [],
        "now": now, "back": reverse("tenant", args=[key.tenant.slug]) + "?tab=keys", "back_label": key.tenant.slug,
        "title": f"Would a request with {key.name} be admitted?",
    }  # fmt: skip
    return render(request, "live/key_check.html", context, status=400 if form.errors else 200)
