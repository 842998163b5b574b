"""Pages of classes and contracts."""

from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.contracts import actions, queries
from controlplane.contracts.compliance import record_of
from controlplane.contracts.forms import (
    CONTRACT_LABELS,
    ClassForm,
    ContractForm,
    class_initial,
    class_labels,
    class_shown,
    contract_initial,
    contract_shown,
)
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.contracts.nights import last_night, nights_of
from controlplane.contracts.wording import AlertLine, alert_lines, phrases, sentence
from controlplane.fleet.edit_flow import Edit, run
from controlplane.fleet.percent import percent_of_ppm
from controlplane.tenants.access import may, member_of, requires
from controlplane.tenants.actions import Stale
from controlplane.tenants.queries import visible_tenants
from controlplane.tenants.review import reason_of
from controlplane.tenants.roles import Role
from controlplane.web.exports import CsvResponse, in_batches
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request

TAKES_PUSH = "Takes effect when you push."
AT_ONCE = "Takes effect within 2 s."
CONTRACT_SORTS = (("name", "By name"), ("class", "By class"), ("newest", "Newest first"))
CONTRACT_ORDERS = {
    "name": ("slug", "id"),
    "class": ("workload_class__slug", "slug", "id"),
    "newest": ("-created_at", "-id"),
}
CLASS_SORTS = (("attention", "Suspended first"), ("name", "By name"), ("newest", "Newest first"))


# ---- classes ----


@requires("class.read")
def classes(request: HttpRequest) -> HttpResponseBase:
    """All classes on one page: they are kinds of work, a few dozen at most."""
    text, state = request.GET.get("q", "").strip()[:120], request.GET.get("state", "")
    sort = request.GET.get("sort", "attention")
    rows = WorkloadClass.objects.select_related("downgrade_to").order_by("-id" if sort == "newest" else "slug")
    rows = rows.filter(state="archived") if state == "archived" else rows.exclude(state="archived")
    if text:
        rows = rows.filter(Q(slug__icontains=text) | Q(name__icontains=text))
    found = list(rows)
    if sort == "attention":
        found.sort(key=lambda row: (row.state != "suspended", row.kind != "interactive"))
    uses = queries.class_uses(found)
    if request.GET.get("format") == "csv":
        return _classes_csv([(row, uses[row.pk]) for row in found])
    context = {
        "q": text,
        "sort": sort,
        "sorts": CLASS_SORTS,
        "rows": [(row, uses[row.pk], percent_of_ppm(row.min_share_ppm)) for row in found],
        "state": state,
        "may_write": may(request.user, "class.write"),
    }
    return render(request, "contracts/classes.html", context)


def _classes_csv(rows: Sequence[tuple[WorkloadClass, queries.ClassUse]]) -> CsvResponse:
    header = [
        "class", "name", "kind", "state", "priority", "overload", "downgrade_to", "max_queue", "max_wait_ms",
        "min_share_percent", "max_prompt_tokens", "max_output_tokens", "models", "pools", "tenants", "contracts",
    ]  # fmt: skip
    lines = (
        [
            row.slug, row.name, row.kind, row.state, row.priority, row.overload,
            row.downgrade_to.slug if row.downgrade_to else None, row.max_queue, row.max_wait_ms,
            Decimal(row.min_share_ppm).scaleb(-4), row.max_prompt_tokens, row.max_output_tokens,
            " ".join(row.model_names), " ".join(use.pools), use.tenants, use.contracts,
        ]
        for row, use in rows
    )  # fmt: skip
    return CsvResponse("classes.csv", header, lines)


@requires("class.read")
def workload_class(request: HttpRequest, slug: str) -> HttpResponse:
    row = _class_of(slug)
    context = {
        "row": row,
        "min_share": percent_of_ppm(row.min_share_ppm),
        "use": queries.class_uses([row])[row.pk],
        "standings": queries.standings(list(row.contracts.filter(archived_at=None).order_by("slug")), timezone.now()),
        "may_write": may(request.user, "class.write"),
        "may_suspend": may(request.user, "class.write" if row.state == row.State.ARCHIVED else "class.suspend"),
    }
    return render(request, "contracts/class.html", context)


@requires("class.write")
def class_new(request: HttpRequest) -> HttpResponseBase:
    def save(form: ClassForm, *, reason: str) -> str:
        row = actions.create_class(
            slug=form.cleaned_data["slug"],
            kind=form.cleaned_data["kind"],
            values=form.values(),
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
        )
        return reverse("class", args=[row.slug])

    def shown(form: ClassForm) -> dict[str, Any]:
        return class_shown({**form.values(), "slug": form.cleaned_data["slug"], "kind": form.cleaned_data["kind"]})

    return run(
        request,
        Edit(
            title="New class",
            verb="Create class",
            back=reverse("classes"),
            back_label="Classes",
            labels=class_labels(),
            make_form=lambda data: ClassForm(data),
            shown=shown,
            save=save,
            saved="Created the class. Give it a contract and a rate card, and tenants that may use it.",
            notes=lambda form: [TAKES_PUSH],
        ),
    )


@requires("class.write")
def class_edit(request: HttpRequest, slug: str) -> HttpResponseBase:
    row = _class_of(slug)
    back = reverse("class", args=[slug])

    def save(form: ClassForm, *, reason: str) -> str:
        actions.edit_class(
            slug=slug,
            values=form.values(),
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
            version=form.cleaned_data["version"],
        )
        return back

    return run(
        request,
        Edit(
            title=f"Edit class {slug}",
            verb="Save changes",
            back=back,
            back_label=slug,
            labels=class_labels(),
            make_form=lambda data: ClassForm(data, row=row, initial=class_initial(row)),
            stored=class_shown({name: getattr(row, name) for name in actions.CLASS_FIELDS}),
            shown=lambda form: class_shown(form.values()),
            save=save,
            saved=f"Saved {slug}. {TAKES_PUSH}",
            version=row.version,
            noun="class",
            object_id=slug,
            notes=lambda form: [TAKES_PUSH],
        ),
    )


@require_POST
@requires("class.suspend")
def class_suspend(request: HttpRequest, slug: str) -> HttpResponse:
    return _move(request, slug, actions.suspend_class, f"Suspended {slug}: agents refuse its new requests. {AT_ONCE}")


@require_POST
@requires("class.suspend")
def class_resume(request: HttpRequest, slug: str) -> HttpResponse:
    """Brings a suspended class back; an archived one too, which needs the role that edits classes."""
    if _class_of(slug).state == WorkloadClass.State.ARCHIVED and not may(request.user, "class.write"):
        raise PermissionDenied("Your role does not include class.write.")
    return _move(request, slug, actions.resume_class, f"Resumed {slug}. {AT_ONCE}")


@require_POST
@requires("class.write")
def class_archive(request: HttpRequest, slug: str) -> HttpResponse:
    return _move(request, slug, actions.archive_class, f"Archived {slug}. {TAKES_PUSH}")


def _move(request: HttpRequest, slug: str, action: Callable[..., Any], said: str) -> HttpResponse:
    _class_of(slug)
    _say(
        request,
        lambda: action(slug=slug, actor=actor_of(request), now=timezone.now(), reason=reason_of(request)),
        said,
    )
    return redirect("class", slug=slug)


def _class_of(slug: str) -> WorkloadClass:
    row = WorkloadClass.objects.select_related("downgrade_to").filter(slug=slug).first()
    if row is None:
        raise Http404("There is no such class.")
    return row


# ---- contracts ----


@requires("contract.read")
def contracts(request: HttpRequest) -> HttpResponseBase:
    now = timezone.now()
    text, ended = request.GET.get("q", "").strip()[:120], request.GET.get("state") == "ended"
    sort = request.GET.get("sort", "name")
    order = CONTRACT_ORDERS.get(sort, CONTRACT_ORDERS["name"])
    rows = queries.visible_contracts(request.user).filter(archived_at__isnull=not ended)
    if text:
        rows = rows.filter(queries.contract_holds(text))
    if request.GET.get("format") == "csv":
        return _contracts_csv(rows, order, now)
    try:
        page = keyset_page(rows, order, cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    standings = queries.standings(page.rows, now)
    nights = nights_of([row.contract for row in standings], now, tenants=_own_jobs(request), nights=3)
    context = {
        "page": page,
        "total": rows.count(),
        "q": text,
        "sort": sort,
        "sorts": CONTRACT_SORTS,
        "rows": [
            (
                row,
                sentence(row.in_force or row.next) if row.in_force or row.next else "",
                last_night(nights.get(row.contract.pk, ())),
            )
            for row in standings
        ],
        "ended": ended,
        "may_write": may(request.user, "contract.write"),
        "now": now,
    }
    return render(request, "contracts/contracts.html", context)


@requires("contract.read")
def contract(request: HttpRequest, slug: str) -> HttpResponse:
    row = queries.contract_for(request.user, slug)
    now = timezone.now()
    (standing,) = queries.standings([row], now)
    shown = standing.in_force or standing.next
    own_jobs = _own_jobs(request)
    nights = nights_of([row], now, tenants=own_jobs).get(row.pk)
    context = {
        "nights": nights,
        "night_meta": f"newest first, {shown.zone}" if shown else "",
        "missed_nights": [night for night in nights or () if night.missed],
        "own_jobs_only": own_jobs is not None,
        "contract": row,
        "standing": standing,
        "version_word": f"Version {standing.in_force.number}" if standing.in_force else "",
        "phrases": phrases(shown) if shown else [],
        "alerts": _alerts(shown) if shown else [],
        "record": record_of(standing.in_force, now) if standing.in_force else None,
        "versions": [
            (version, sentence(version)) for version in row.versions.order_by("-number")
        ],
        "may_write": may(request.user, "contract.write"),
        "now": now,
    }  # fmt: skip
    return render(request, "contracts/contract.html", context)


def _contracts_csv(rows: QuerySet[Contract], order: Sequence[str], now: datetime) -> CsvResponse:
    header = [
        "contract", "name", "class", "tenant", "version", "in_force_since", "next_version", "next_from", "promise",
        "ended_at",
    ]  # fmt: skip

    def line(row: queries.Standing) -> list[Any]:
        held, coming = row.in_force, row.next
        return [
            row.contract.slug, row.contract.name, row.contract.workload_class.slug,
            row.contract.tenant.slug if row.contract.tenant else None,
            held.number if held else None, held.effective_from if held else None,
            coming.number if coming else None, coming.effective_from if coming else None,
            sentence(held or coming) if held or coming else None, row.contract.archived_at,
        ]  # fmt: skip

    lines = (line(row) for batch in in_batches(rows, order) for row in queries.standings(batch, now))
    return CsvResponse("contracts.csv", header, lines)


def _own_jobs(request: HttpRequest) -> list[int] | None:
    """Whose jobs a person may see counted: a tenant's member those of the own tenants, None for all."""
    member = member_of(request.user)
    if member is not None and member.role != Role.TENANT:
        return None
    return list(visible_tenants(request.user).values_list("pk", flat=True))


@requires("contract.write")
def contract_new(request: HttpRequest) -> HttpResponseBase:
    def save(form: ContractForm, *, reason: str) -> str:
        data = form.cleaned_data
        row = actions.create_contract(
            slug=data["slug"],
            name=data["name"],
            class_slug=data["workload_class"].slug,
            tenant_slug=data["tenant"].slug if data["tenant"] else "",
            values=form.values(),
            effective_from=data["effective_from"],
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
        )
        return reverse("contract", args=[row.slug])

    def shown(form: ContractForm) -> dict[str, Any]:
        data = form.cleaned_data
        tenant = data["tenant"].slug if data["tenant"] else "everyone in the class"
        about = {"slug": data["slug"], "name": data["name"], "workload_class": data["workload_class"].slug}
        return {**_relevant(form.values()), **about, "tenant": tenant, "effective_from": _start(form)}

    return run(
        request,
        Edit(
            title="New contract",
            verb="Create contract",
            back=reverse("contracts"),
            back_label="Contracts",
            labels=CONTRACT_LABELS,
            make_form=lambda data: ContractForm(data, new=True),
            shown=shown,
            save=save,
            saved=f"Created the contract. {TAKES_PUSH}",
            notes=_contract_notes,
            template="contracts/contract_edit.html",
        ),
    )


@requires("contract.write")
def contract_edit(request: HttpRequest, slug: str) -> HttpResponseBase:
    """The next version of a contract; what is in force is never edited."""
    row = queries.contract_for(request.user, slug)
    newest = row.versions.order_by("-number").first()
    if newest is None or row.archived_at is not None:
        raise Http404("The contract has ended.")
    back = reverse("contract", args=[slug])
    kind = row.workload_class.kind

    def save(form: ContractForm, *, reason: str) -> str:
        actions.add_version(
            slug=slug,
            values=form.values(),
            effective_from=form.cleaned_data["effective_from"],
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
            version=form.cleaned_data["version"],
        )
        return back

    initial = {**contract_initial(newest), "version": row.version}
    about = f"Class {row.workload_class.slug}, {row.tenant.slug if row.tenant else 'all its tenants'}"
    return run(
        request,
        Edit(
            title=f"Change contract {slug}",
            verb=f"Add version {newest.number + 1}",
            back=back,
            back_label=slug,
            labels=CONTRACT_LABELS,
            make_form=lambda data: ContractForm(data, kind=kind, initial=initial),
            stored=_relevant({name: getattr(newest, name) for name in actions.VERSION_FIELDS}),
            shown=lambda form: {
                **_relevant({"objective": newest.objective, **form.values()}),
                "effective_from": _start(form),
            },
            save=save,
            saved=f"Added version {newest.number + 1} of {slug}. {TAKES_PUSH}",
            version=row.version,
            noun="contract",
            object_id=slug,
            notes=_contract_notes,
            template="contracts/contract_edit.html",
            context={
                "newest": newest,
                "phrases": phrases(newest),
                "alerts": _alerts(newest),
                "record": record_of(newest, timezone.now()),
                "meta": [about, f"Version {newest.number} begins {newest.effective_from:%-d %b %Y %H:%M} UTC"],
            },
        ),
    )


@require_POST
@requires("contract.write")
def contract_archive(request: HttpRequest, slug: str) -> HttpResponse:
    queries.contract_for(request.user, slug)
    _say(
        request,
        lambda: actions.archive_contract(
            slug=slug, actor=actor_of(request), now=timezone.now(), reason=reason_of(request)
        ),
        f"Ended {slug}: it is judged no longer. {TAKES_PUSH}",
    )
    return redirect("contract", slug=slug)


@require_POST
@requires("contract.write")
def contract_reads(request: HttpRequest) -> HttpResponse:
    """What the form says so far, read aloud, with the alerts that its target allows: for the panel beside the form."""
    row: Contract | None = Contract.objects.filter(slug=request.GET.get("contract", "")).first()
    form = ContractForm(request.POST, new=row is None, kind=row.workload_class.kind if row else "")
    form.is_valid()
    newest = row.versions.order_by("-number").first() if row else None
    base = {name: getattr(newest, name) for name in actions.VERSION_FIELDS} if newest else {}
    spoken = SimpleNamespace(**{**base, **form.values()})
    try:
        pieces: Sequence[Any] = phrases(spoken)
    except (AttributeError, TypeError, KeyError):
        pieces = []
    context = {"phrases": pieces, "alerts": _alerts(spoken) if hasattr(spoken, "objective") else []}
    return render(request, "contracts/reads.html", context)


def _relevant(values: dict[str, Any]) -> dict[str, Any]:
    """As a review shows them, without the fields of the other kind of objective."""
    latency = {"metric", "threshold_ms", "window", "load_limit_per_s", "population", "min_events"}
    deadline = {"admitted_before", "finished_by", "zone", "first_attempt_within"}
    drop = deadline if values.get("objective") == ContractVersion.Objective.LATENCY else latency
    return {name: value for name, value in contract_shown(values).items() if name not in drop}


def _alerts(promise: Any) -> list[AlertLine] | None:
    """Burn alerts of a latency promise, none yet without a target; None for jobs, which are judged night by night."""
    if promise.objective != ContractVersion.Objective.LATENCY:
        return None
    target_ppm = getattr(promise, "target_ppm", 0)
    return alert_lines(target_ppm) if 0 < target_ppm < actions.PPM else []


def _start(form: ContractForm) -> str:
    at = form.cleaned_data["effective_from"]
    return f"{at:%-d %b %Y %H:%M} UTC" if at else ""


def _contract_notes(form: ContractForm) -> list[str]:
    """The sentence, the alerts that cannot fire with their arithmetic, and when it acts."""
    values = form.values()
    objective = values.get("objective") or ("latency" if "metric" in values else "deadline")
    notes = ["Reads: " + sentence(SimpleNamespace(**{**values, "objective": objective}))]
    for line in _alerts(SimpleNamespace(objective=objective, target_ppm=values["target_ppm"])) or ():
        if not line.reachable:
            offered = f" {line.offered.capitalize()} is the fastest that can." if line.offered else ""
            notes.append(f"The {line.severity} at burn {line.factor} is dropped: {line.arithmetic}.{offered}")
    return [*notes, TAKES_PUSH]


def _say(request: HttpRequest, act: Callable[[], Any], said: str) -> None:
    try:
        act()
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    except Stale:
        messages.error(request, "Somebody changed this at the same moment: look at it and decide again.")
    else:
        messages.success(request, said)
