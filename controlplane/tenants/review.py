"""The steps around a form that changes money, keys or policy: before and after with a reason, and what to do when
somebody else was faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from controlplane.audit.models import AuditEntry
from controlplane.audit.reasons import REASON_CHARS_MAX


@dataclass(frozen=True, slots=True)
class Line:
    """One field that changes, as people read it."""

    label: str
    before: str
    after: str


def words(value: Any) -> str:
    """A value as it stands in a review; empty for none, which the page shows as a dash."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value)
    return str(value)


def lines(labels: Mapping[str, str], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Line]:
    """The fields of `labels` whose values differ, in the order of `labels`."""
    return [
        Line(label, words(before.get(name)), words(after.get(name)))
        for name, label in labels.items()
        if name in after and words(before.get(name)) != words(after.get(name))
    ]


def confirmed(request: HttpRequest) -> bool:
    return "confirm" in request.POST


def review_page(
    request: HttpRequest,
    *,
    form: forms.Form,
    title: str,
    verb: str,
    changes: list[Line],
    notes: list[str] | None = None,
    back: str,
    back_label: str,
    error: str = "",
) -> HttpResponse:
    """Shows what will change and asks for the reason; the form's values travel in hidden fields."""
    values = [
        (name, value)
        for name, group in request.POST.lists()
        if name not in ("csrfmiddlewaretoken", "reason", "confirm", "edit")
        for value in group
    ]
    context = {
        "form": form,
        "review_title": title,
        "verb": verb,
        "changes": changes,
        "notes": notes or [],
        "values": values,
        "reason": request.POST.get("reason", ""),
        "back": back,
        "back_label": back_label,
        "error": error,
    }
    return render(request, "tenants/review.html", context, status=400 if error else 200)


def reason_of(request: HttpRequest) -> str:
    return request.POST.get("reason", "").strip()[:REASON_CHARS_MAX]


@dataclass(frozen=True, slots=True)
class Overtaken:
    """What somebody else did since the form was opened: who, when, and where their value differs from yours."""

    by: str
    at: Any
    differences: list[Line]


def overtaken(noun: str, object_id: Any, differences: list[Line]) -> Overtaken:
    entry = AuditEntry.objects.filter(noun=noun, object_id=str(object_id)).order_by("-id").first()
    return Overtaken(entry.actor_name if entry else "somebody", entry.at if entry else None, differences)


def renewed(form_class: type[forms.Form], request: HttpRequest, version: int, **options: Any) -> Any:
    """The form as it was sent, with the row's present version: sending it again is a decision made knowingly."""
    data = request.POST.copy()
    data["version"] = str(version)
    return form_class(data, **options)
