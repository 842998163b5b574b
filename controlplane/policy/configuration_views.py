"""The whole configuration out as YAML and in again: plan first, then applied with a reason."""

from functools import partial

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.audit.reasons import REASON_CHARS_MAX
from controlplane.policy.applying import Prepared, apply, export_pieces, prepare
from controlplane.policy.yaml_lines import BYTES_MOST, Problem, Unreadable
from controlplane.tenants.access import may, requires
from controlplane.web.exports import StreamedResponse

VERB_CHIPS = {"create": "ok", "edit": "neutral", "add": "ok", "remove": "risk", "archive": "risk"}


class ConfigurationForm(forms.Form):
    """The file or its text, why, and what the plan that was seen was made against."""

    file = forms.FileField(label="File", help_text="YAML as an export writes it", required=False)
    text = forms.CharField(
        label="Or text", required=False, strip=False, widget=forms.Textarea(attrs={"rows": 16, "spellcheck": "false"})
    )
    reason = forms.CharField(
        label="Reason", help_text="Kept in the audit log; needed to apply", max_length=REASON_CHARS_MAX, required=False
    )
    against = forms.CharField(required=False, max_length=64, widget=forms.HiddenInput)

    def clean(self) -> dict[str, object]:
        data = super().clean() or {}
        upload = data.get("file")
        if upload is not None:
            if upload.size > BYTES_MOST:
                raise ValidationError(f"The file is larger than {BYTES_MOST // 1024**2} MiB.")
            try:
                data["text"] = upload.read().decode("utf-8-sig")
            except UnicodeDecodeError:
                raise ValidationError("The file is not UTF-8 text.") from None
        if not str(data.get("text") or "").strip():
            raise ValidationError("Choose a file or paste its text.")
        return data


@requires("policy.read")
def export(request: HttpRequest) -> StreamedResponse:
    """Everything in use as one file, streamed."""
    pieces = (piece.encode() for piece in export_pieces(timezone.now()))
    return StreamedResponse("flexband.yaml", pieces, "application/yaml; charset=utf-8")


@requires("policy.read", write="policy.push")
def configuration(request: HttpRequest) -> HttpResponse:
    """Shows what a file would change, then changes it: all of it or nothing."""
    form = ConfigurationForm(request.POST, request.FILES) if request.method == "POST" else ConfigurationForm()
    found: Prepared | None = None
    problems: list[Problem] = []
    if form.is_bound and form.is_valid():
        text, now = str(form.cleaned_data["text"]), timezone.now()
        try:
            found = prepare(text, now)
            if "confirm" in request.POST:
                plan = apply(
                    text,
                    actor=actor_of(request),
                    now=now,
                    reason=form.cleaned_data["reason"],
                    against=form.cleaned_data["against"] or None,
                    may=partial(may, request.user),
                )
                messages.success(request, f"Applied: {len(plan.steps)} steps. Review and push what agents are to have.")
                return redirect("policy-review")
        except Unreadable as error:
            problems = error.problems
        except ValidationError as error:
            take_errors(form, error)
        # What is shown now is what a second click applies.
        form.data = {**request.POST.dict(), "text": text, "against": found.against if found else ""}
    failed = bool(form.errors or problems)
    context = {
        "form": form,
        "plan": found.plan if found else None,
        "steps": [(VERB_CHIPS[step.verb], step) for step in found.plan.steps] if found else [],
        "problems": problems,
        "may_apply": may(request.user, "policy.push"),
    }
    return render(request, "policy/configuration.html", context, status=422 if failed else 200)
