"""Pages that carry contracts out as OpenSLO and in again."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.audit.reasons import REASON_CHARS_MAX
from controlplane.contracts import openslo, openslo_import, queries
from controlplane.contracts.models import ContractVersion
from controlplane.contracts.wording import sentence
from controlplane.tenants.access import requires

WORDS = {
    "create": ("ok", "New contract"),
    "version": ("ok", "New version"),
    "same": ("neutral", "Unchanged"),
    "refused": ("bad", "Refused"),
}


class ImportForm(forms.Form):
    """The documents as text or file, and why."""

    file = forms.FileField(label="File", help_text="YAML with one or more SLO documents", required=False)
    text = forms.CharField(
        label="Or text", required=False, widget=forms.Textarea(attrs={"rows": 14, "spellcheck": "false"})
    )
    reason = forms.CharField(
        label="Reason", help_text="Kept in the audit log; needed to import", max_length=REASON_CHARS_MAX, required=False
    )

    def clean(self) -> dict[str, object]:
        data = super().clean() or {}
        upload = data.get("file")
        if upload is not None:
            if upload.size > openslo.TEXT_BYTES_MAX:
                raise forms.ValidationError(f"The file has more than {openslo.TEXT_BYTES_MAX // 1024} KiB.")
            try:
                data["text"] = upload.read().decode("utf-8-sig")
            except UnicodeDecodeError:
                raise forms.ValidationError("The file is no UTF-8 text.") from None
        if not str(data.get("text") or "").strip():
            raise forms.ValidationError("Choose a file or paste the documents.")
        return data


@requires("contract.read")
def export(request: HttpRequest) -> HttpResponse:
    """Every contract in use that the person may see, as one YAML file."""
    rows = queries.visible_contracts(request.user).filter(archived_at=None).order_by("slug")
    standings = queries.standings(list(rows), timezone.now())
    documents = [openslo.document(row.contract, row.in_force) for row in standings if row.in_force is not None]
    response = HttpResponse(openslo.text_of(documents), content_type="application/yaml; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="contracts.openslo.yaml"'
    return response


@requires("contract.write")
def take(request: HttpRequest) -> HttpResponse:
    """Shows what an import would do, then does it: all documents or none."""
    form = ImportForm(request.POST, request.FILES) if request.method == "POST" else ImportForm()
    outcomes: list[openslo_import.Outcome] = []
    if form.is_bound and form.is_valid():
        actor, now = actor_of(request), timezone.now()
        try:
            found = openslo.read(str(form.cleaned_data["text"]))
            if "confirm" not in request.POST:
                outcomes = openslo_import.rehearse(found, actor=actor, now=now)
            elif not form.cleaned_data["reason"].strip():
                outcomes = openslo_import.rehearse(found, actor=actor, now=now)
                form.add_error("reason", "Say why: the reason is kept in the audit log.")
            else:
                done = openslo_import.take(found, actor=actor, now=now, reason=form.cleaned_data["reason"])
                written = sum(one.does in ("create", "version") for one in done)
                messages.success(
                    request, f"Imported: {written} of {len(done)} changed something. Takes effect when you push."
                )
                return redirect("contracts")
        except openslo.Unreadable as error:
            form.add_error(None, str(error))
        except openslo_import.Refused as refused:
            outcomes = refused.outcomes
            form.add_error(None, "Nothing was imported: mend the refused documents, or take them out.")
    context = {
        "form": form,
        "text": form.cleaned_data.get("text", "") if form.is_bound and hasattr(form, "cleaned_data") else "",
        "outcomes": [(one, *WORDS[one.does], _reads(one)) for one in outcomes],
        "importable": bool(outcomes) and all(one.does != "refused" for one in outcomes),
    }
    return render(request, "contracts/openslo.html", context, status=422 if form.errors else 200)


def _reads(one: openslo_import.Outcome) -> str:
    """The promise as a sentence; empty for what cannot be taken."""
    if one.does == "refused":
        return ""
    return sentence(ContractVersion(**one.read.values))
