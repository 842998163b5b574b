"""The way of a form that changes policy or money: fill in, be checked, see before and after, give a reason, confirm.

The action is rehearsed before the review (and rolled back), so that every rule is told beside its field, not after the
person has confirmed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render

from controlplane.audit.forms import take_errors
from controlplane.tenants.actions import Stale
from controlplane.tenants.review import (
    confirmed,
    lines,
    overtaken,
    reason_of,
    review_page,
)

REHEARSAL_REASON = "rehearsal"


@dataclass(frozen=True, slots=True)
class Section:
    """A panel of a form. `rows`: each a tuple of field names that stand side by side."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    lead: str = ""


class SectionedForm(forms.Form):
    """A form whose page groups its fields in panels. `UNITS`: field name -> unit shown behind the input."""

    SECTIONS: tuple[Section, ...] = ()
    UNITS: Mapping[str, str] = {}

    def sections(self) -> list[dict[str, Any]]:
        """For templates: title, lead and rows of placed fields; fields that the form dropped are left out."""
        return [
            {
                "title": section.title,
                "lead": section.lead,
                "rows": [[self._placed(name) for name in row if name in self.fields] for row in section.rows],
            }
            for section in self.SECTIONS
        ]

    def _placed(self, name: str) -> dict[str, Any]:
        """A bound field with its unit; radios as cards of (input, title, text), cut at the colon of their label."""
        bound = self[name]
        cards = []
        if isinstance(self.fields[name].widget, forms.RadioSelect):
            for radio in bound.subwidgets:
                title, _, text = str(radio.choice_label).partition(": ")  # type: ignore[attr-defined]
                cards.append({"tag": radio.tag(), "title": title, "text": text})  # type: ignore[attr-defined]
        return {"field": bound, "unit": self.UNITS.get(name, ""), "cards": cards}


class Save(Protocol):
    def __call__(self, form: Any, *, reason: str) -> str:
        """Runs the action and answers the address to go to."""


def _no_notes(form: Any) -> Sequence[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What differs from form to form. `shown(form)` and `stored` hold the values of `labels` as people read them."""

    title: str
    verb: str
    back: str
    back_label: str
    labels: Mapping[str, str]
    make_form: Callable[[Any], Any]
    shown: Callable[[Any], Mapping[str, Any]]
    save: Save
    saved: str
    stored: Mapping[str, Any] = field(default_factory=dict)
    version: int | None = None
    noun: str = ""
    object_id: str = ""
    notes: Callable[[Any], Sequence[str]] = _no_notes
    template: str = "fleet/edit_page.html"
    context: Mapping[str, Any] = field(default_factory=dict)


def run(request: HttpRequest, edit: Edit) -> HttpResponseBase:
    """Answers one request of the form's way; 400 for values that cannot be used, 409 when somebody was faster."""
    if request.method != "POST":
        return _page(request, edit, edit.make_form(None))
    form = edit.make_form(request.POST)
    if not form.is_valid() or "edit" in request.POST:
        return _page(request, edit, form)
    if edit.version is not None and form.cleaned_data.get("version") != edit.version:
        return _overtaken(request, edit)
    changes = lines(edit.labels, edit.stored, edit.shown(form))
    if not changes:
        messages.info(request, "Nothing was changed.")
        return redirect(edit.back)
    reason = reason_of(request)
    try:
        if confirmed(request) and reason:
            address = edit.save(form, reason=reason)
            messages.success(request, edit.saved)
            return redirect(address)
        _rehearse(edit, form)
    except Stale:
        return _overtaken(request, edit)
    except ValidationError as error:
        take_errors(form, error)
        return _page(request, edit, form)
    return review_page(
        request,
        form=form,
        title=edit.title,
        verb=edit.verb,
        changes=changes,
        notes=list(edit.notes(form)),
        back=edit.back,
        back_label=edit.back_label,
        error="Say why: the reason is kept in the audit log." if confirmed(request) else "",
    )


def _rehearse(edit: Edit, form: Any) -> None:
    with transaction.atomic():
        edit.save(form, reason=REHEARSAL_REASON)
        transaction.set_rollback(True)


def _page(request: HttpRequest, edit: Edit, form: Any, **context: Any) -> HttpResponse:
    status = context.pop("status", 400 if form.is_bound and form.errors else 200)
    page = {"form": form, "edit": edit, **edit.context, **context}
    return render(request, edit.template, page, status=status)


def _overtaken(request: HttpRequest, edit: Edit) -> HttpResponse:
    """The form as it was sent with the row's present version: sending it again is a decision made knowingly."""
    data = request.POST.copy()
    data["version"] = str(edit.version)
    form = edit.make_form(data)
    form.is_valid()
    found = overtaken(edit.noun, edit.object_id, lines(edit.labels, edit.stored, edit.shown(form)))
    return _page(request, edit, form, overtaken=found, status=409)
