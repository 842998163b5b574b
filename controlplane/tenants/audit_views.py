"""Pages of the audit log. They stand here because the log itself lies below the table of roles."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render

from controlplane.audit.models import AuditEntry
from controlplane.audit.queries import AuditFilter, entries, vocabulary, waits_for_push, with_revision
from controlplane.core.money import format_nanos
from controlplane.tenants.access import requires
from controlplane.tenants.review import words
from controlplane.web.exports import CsvResponse, in_batches
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request

TEXT_MAX = 120
NARROWING = ("noun", "action", "actor", "tenant", "since", "until", "revision", "request")


@requires("audit.read")
def audit(request: HttpRequest) -> HttpResponseBase:
    """Who changed what, newest first."""
    wanted, problems = filter_of(request)
    rows = with_revision(entries(wanted))
    if request.GET.get("format") == "csv" and not problems:
        return _csv(entry for batch in in_batches(rows, ("id",)) for entry in batch)
    try:
        page = keyset_page(rows, ("-id",), cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    context = {
        "page": page,
        "lines": [(entry, changes_of(entry), waits_for_push(entry)) for entry in page.rows],
        "revision": "" if wanted.revision is None else wanted.revision,
        "wanted": wanted,
        "problems": problems,
        "since": request.GET.get("since", ""),
        "until": request.GET.get("until", ""),
        "narrowed": any(request.GET.get(name) for name in NARROWING),
        **vocabulary(),
    }
    return render(request, "audit/audit.html", context, status=400 if problems else 200)


@requires("audit.read")
def audit_entry(request: HttpRequest, entry_id: int) -> HttpResponse:
    entry = with_revision(AuditEntry.objects.filter(pk=entry_id)).first()
    if entry is None:
        raise Http404("There is no such entry.")
    around = AuditEntry.objects.filter(noun=entry.noun, object_id=entry.object_id)
    context = {
        "entry": entry,
        "changes": changes_of(entry),
        "waits": waits_for_push(entry),
        "earlier": around.filter(pk__lt=entry.pk).order_by("-id").first(),
        "later": around.filter(pk__gt=entry.pk).order_by("id").first(),
        "hash": bytes(entry.hash).hex(),
        "previous_hash": bytes(entry.previous_hash).hex(),
    }
    return render(request, "audit/entry.html", context)


def filter_of(request: HttpRequest) -> tuple[AuditFilter, list[str]]:
    """The filter in the address, and what of it could not be read. Dates are days in UTC, both included."""
    problems: list[str] = []

    def text(name: str) -> str:
        return request.GET.get(name, "").strip()[:TEXT_MAX]

    def day(name: str, label: str) -> date | None:
        given = text(name)
        try:
            return date.fromisoformat(given) if given else None
        except ValueError:
            problems.append(f"{label} is not a date: write it like 2026-11-29.")
            return None

    def number(name: str, label: str) -> int | None:
        given = text(name)
        if given and not (given.isdecimal() and len(given) <= 9):
            problems.append(f"{label} is not the number of a revision.")
            return None
        return int(given) if given else None

    since, until = day("since", "From"), day("until", "To")
    return (
        AuditFilter(
            noun=text("noun"),
            action=text("action"),
            actor=text("actor"),
            tenant=text("tenant"),
            object_id=text("object"),
            request_id=text("request"),
            since=_midnight(since),
            until=_midnight(until, days=1),
            revision=number("revision", "Revision"),
        ),
        problems,
    )


def changes_of(entry: AuditEntry) -> list[tuple[str, str, str]]:
    """(field, before, after) of an entry, money as money."""
    before, after = entry.before or {}, entry.after or {}
    names = list(dict.fromkeys([*before, *after]))
    shown = [name for name in names if not (name.endswith("_nanos") and name.removesuffix("_nanos") in names)]
    return [(name.removesuffix("_nanos"), _shown(name, before), _shown(name, after)) for name in shown]


def _shown(name: str, values: dict[str, Any]) -> str:
    value = values.get(name)
    if name.endswith("_nanos") and isinstance(value, int) and not isinstance(value, bool):
        return format_nanos(value)
    return words(value)


def _midnight(day: date | None, *, days: int = 0) -> datetime | None:
    if day is None:
        return None
    try:
        return datetime.combine(day + timedelta(days=days), time(0), tzinfo=UTC)
    except OverflowError:
        return None


def _csv(rows: Iterable[AuditEntry]) -> CsvResponse:
    header = [
        "id", "at", "actor", "role", "action", "noun", "object", "tenant", "field", "before", "after", "reason",
        "request_id", "revision",
    ]  # fmt: skip

    def lines() -> Iterable[list[Any]]:
        for entry in rows:
            for field, before, after in changes_of(entry) or [("", "", "")]:
                yield [
                    entry.pk, entry.at, entry.actor_name, entry.actor_role, entry.action, entry.noun, entry.object_id,
                    entry.tenant_slug, field, before, after, entry.reason, entry.request_id,
                    getattr(entry, "went_out", None) or "",
                ]  # fmt: skip

    return CsvResponse("audit.csv", header, lines())
