"""Pages of the lab: experiments, a new one, its progress and answer, two side by side, and what a draft would do."""

from __future__ import annotations

import re
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.experiments import actions, draft_effects, inputs, queries
from controlplane.experiments.answers import compared
from controlplane.experiments.forms import FORMS, GROUPS, ExperimentForm, SafeRateForm, initial_of
from controlplane.experiments.models import Experiment
from controlplane.experiments.running import code_version
from controlplane.experiments.shown import shown
from controlplane.fleet.models import Pool
from controlplane.tenants.access import may, requires
from controlplane.wakeups.bells import ring
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request

DIGEST = re.compile("[0-9a-f]{64}")
CHIPS = {
    "waiting": ("neutral", "Waiting"), "running": ("neutral", "Running"), "done": ("ok", "Done"),
    "failed": ("bad", "Failed"), "cancelled": ("plain", "Cancelled"),
}  # fmt: skip
HINTS = {
    "interference": "Interactive alone, batch alone, both; the rates that are safe, and whether to buy.",
    "replay": "Traffic through one policy, or two side by side.",
    "overload": "Part of the fleet gone, sizes doubled, a giant tenant, clients that try again.",
    "designs": "The three isolation designs and strict priority on one load.",
    "capacity": "The fewest slots that keep it, and what breaks first with one less.",
    "batching": "How large batches should grow and how long they may wait.",
    "effect": "What is saved now against what is in force, on what a pool served.",
    "offers": "Machines for hire that meet what was measured, the cheapest first.",
}


def _chip(row: Experiment) -> tuple[str, str]:
    return CHIPS[row.state]


@requires("lab.read")
def experiments(request: HttpRequest) -> HttpResponse:
    """All experiments, the newest first."""
    wanted = {name: request.GET.get(name, "") for name in ("kind", "state", "pool")}
    rows = queries.experiments(
        kind=wanted["kind"] if wanted["kind"] in Experiment.Kind.values else "",
        state=wanted["state"] if wanted["state"] in Experiment.State.values else "",
        pool=wanted["pool"][:63].replace("\0", ""),
    )
    try:
        page = keyset_page(rows, ("-id",), cursor=request.GET.get("cursor"), limit=25)
    except BadCursor as error:
        return bad_request(request, error)
    context = {
        "now": timezone.now(), "page": page, "rows": [(row, _chip(row)) for row in page.rows], "wanted": wanted,
        "filtered": any(wanted.values()), "kinds": Experiment.Kind.choices, "states": Experiment.State.choices,
        "pools": list(Pool.objects.order_by("slug").values_list("slug", flat=True)),
        "compare": [(row.pk, f"{row.pk}: {row.title}") for row in page.rows if row.state == Experiment.State.DONE],
        "may_run": may(request.user, "lab.run"), "nav_section": "lab",
    }  # fmt: skip
    return render(request, "experiments/experiments.html", context)


@requires("lab.read")
def choose(request: HttpRequest) -> HttpResponse:
    """Which question to ask."""
    kinds = [(value, label, HINTS[value]) for value, label in Experiment.Kind.choices]
    return render(
        request, "experiments/choose.html",
        {"kinds": kinds, "may_run": may(request.user, "lab.run"), "nav_section": "lab"},
    )  # fmt: skip


@requires("lab.read", write="lab.run")
def new(request: HttpRequest, kind: str) -> HttpResponse:
    """A question of one kind; `?pool=` begins with that pool's fleet and usage, `?of=` with what a test measured."""
    if kind not in FORMS:
        raise Http404("There is no such kind of experiment.")
    now = timezone.now()
    posted = request.method == "POST"
    form = FORMS[kind](
        request.POST if posted else None, request.FILES if posted else None,
        initial=initial_of(kind, request.GET.get("pool", "")[:63], request.GET.get("of", "")[:18]),
    )  # fmt: skip
    if posted and form.is_valid():
        upload = request.FILES.get("file")
        try:
            row = actions.ask(
                kind=kind, title=form.cleaned_data["title"], values=form.values(now), actor=actor_of(request), now=now,
                upload=None if upload is None else upload.read(),
            )  # fmt: skip
        except ValidationError as error:
            take_errors(form, error)
        else:
            ring("experiments.run", experiment_id=row.pk)
            return redirect("experiment", pk=row.pk)
    context = {
        "kind": kind, "label": Experiment.Kind(kind).label, "hint": HINTS[kind], "form": form, "groups": _groups(form),
        "may_run": may(request.user, "lab.run"), "nav_section": "lab",
    }  # fmt: skip
    return render(request, "experiments/new.html", context, status=422 if posted else 200)


def _groups(form: ExperimentForm) -> list[tuple[str, list[Any]]]:
    groups = ((form.first_group, GROUPS[0][1]), *GROUPS[1:])
    found = [(title, [form[name] for name in names if name in form.fields]) for title, names in groups]
    return [(title, fields) for title, fields in found if fields]


@requires("lab.read")
def experiment(request: HttpRequest, pk: int) -> HttpResponse:
    """Progress while it runs, then the answer; `?json=1` is the answer as it is stored."""
    row = queries.experiment_or_404(pk)
    if request.headers.get("HX-Request"):
        if row.at_work:
            return render(request, "experiments/progress.html", _context(row))
        # It has ended meanwhile: the whole page is another one now.
        return HttpResponse(headers={"HX-Refresh": "true"})
    result = getattr(row, "result", None)
    if "json" in request.GET and result is not None:
        response = HttpResponse(bytes(result.content), content_type="application/json")
        response["Content-Disposition"] = f'attachment; filename="experiment-{row.pk}.json"'
        return response
    may_run, may_use = may(request.user, "lab.run"), may(request.user, "pool.write")
    context = {**_context(row), "may_run": may_run, "may_use": may_use}
    if result is not None:
        other = queries.experiments(kind=row.kind, state=Experiment.State.DONE).exclude(pk=row.pk).order_by("-id")
        context["others"] = [(one.pk, f"{one.pk}: {one.title}") for one in other[:20]]
    return render(request, "experiments/experiment.html", context)


def _context(row: Experiment) -> dict[str, Any]:
    result = getattr(row, "result", None)
    chip, word = _chip(row)
    context: dict[str, Any] = {
        "now": timezone.now(), "row": row, "chip_state": chip, "word": word, "result": result,
        "command": " ".join(["manage.py lab", row.kind, *row.arguments]), "nav_section": "lab",
        "inputs_gone": not row.at_work and inputs.gone(row),
        "other_code": result is not None and result.code_version != code_version(),
    }  # fmt: skip
    if result is not None:
        context["shown"] = shown(row.kind, queries.answer_of(row))
        before = getattr(row.rerun_of, "result", None) if row.rerun_of_id else None
        context["same_bytes"] = None if before is None else before.sha256 == result.sha256
    return context


@requires("lab.read")
def verdict(request: HttpRequest, pk: int) -> HttpResponse:
    """The verdict with its evidence, to be printed with a purchase request."""
    row = queries.experiment_or_404(pk)
    if row.kind != Experiment.Kind.INTERFERENCE or getattr(row, "result", None) is None:
        raise Http404("Only an interference test that is done has a verdict.")
    return render(request, "experiments/verdict.html", _context(row))


@requires("lab.read")
def shared(request: HttpRequest, token: str) -> HttpResponse:
    """What a link shows: the answer, and nothing to press."""
    return render(request, "experiments/experiment.html", {**_context(queries.shared_or_404(token)), "shared": True})


@requires("lab.read")
def compare(request: HttpRequest) -> HttpResponse:
    """Two answers of one kind, `?a=` and `?b=`."""
    wanted = [request.GET.get(name, "") for name in ("a", "b")]
    rows = [queries.experiment_or_404(int(text)) for text in wanted if text.isdecimal() and len(text) < 19]
    problem, table = "", None
    if len(rows) < 2:
        problem = "Choose two experiments that are done."
    elif rows[0].kind != rows[1].kind:
        problem = "They are of two kinds, which have no figures in common. Choose two of one kind."
    elif any(getattr(row, "result", None) is None for row in rows):
        problem = "One of them has no answer yet."
    else:
        table = compared(rows[0].kind, *(queries.answer_of(row) for row in rows))
    done = queries.experiments(state=Experiment.State.DONE).order_by("-id")[:50]
    context = {
        "rows": rows, "problem": problem, "table": table, "wanted": wanted,
        "choices": [(str(row.pk), f"{row.pk}: {row.title} ({row.get_kind_display()})") for row in done],
        "nav_section": "lab",
    }  # fmt: skip
    return render(request, "experiments/compare.html", context)


# ---- what is done to one ----


@requires("lab.run")
@require_POST
def rerun(request: HttpRequest, pk: int) -> HttpResponse:
    queries.experiment_or_404(pk)
    try:
        row = actions.rerun(experiment_id=pk, actor=actor_of(request), now=timezone.now())
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
        return redirect("experiment", pk=pk)
    ring("experiments.run", experiment_id=row.pk)
    return redirect("experiment", pk=row.pk)


@requires("lab.run")
@require_POST
def cancel(request: HttpRequest, pk: int) -> HttpResponse:
    queries.experiment_or_404(pk)
    try:
        actions.cancel(experiment_id=pk, actor=actor_of(request), now=timezone.now())
        messages.success(request, "Cancelled.")
    except actions.Over as error:
        messages.error(request, str(error))
    return redirect("experiment", pk=pk)


@requires("lab.run")
@require_POST
def share(request: HttpRequest, pk: int) -> HttpResponse:
    queries.experiment_or_404(pk)
    actions.share(
        experiment_id=pk, shared=request.POST.get("shared") == "1", actor=actor_of(request), now=timezone.now()
    )
    return redirect("experiment", pk=pk)


@requires("lab.read", write="pool.write")
def safe_rate(request: HttpRequest, pk: int) -> HttpResponse:
    """Makes the rates that were found the safe rate of a pool."""
    row = queries.experiment_or_404(pk)
    if row.kind != Experiment.Kind.INTERFERENCE or getattr(row, "result", None) is None:
        raise Http404("Only an interference test that is done found rates.")
    form = SafeRateForm(request.POST or None, initial={"pool": row.pool})
    if request.method == "POST" and form.is_valid():
        try:
            pool = actions.use_safe_rate(
                experiment_id=pk, pool_slug=form.cleaned_data["pool"], days=form.cleaned_data["days"],
                reason=form.cleaned_data["reason"], actor=actor_of(request), now=timezone.now(),
            )  # fmt: skip
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, f"Saved for {pool.slug}. The next push brings it to the flex guard.")
            return redirect("policy-review")
    context = {
        "row": row, "form": form, "rates": queries.safe_rates_of(queries.answer_of(row)),
        "may_use": may(request.user, "pool.write"), "nav_section": "lab",
        "pools": {pool.slug: pool.safe_rate for pool in Pool.objects.filter(archived_at__isnull=True)},
    }  # fmt: skip
    return render(request, "experiments/safe_rate.html", context, status=422 if request.method == "POST" else 200)


# ---- on the review of a policy ----


@requires("lab.read", write="lab.run")
def draft_effect(request: HttpRequest) -> HttpResponse:
    """The part of the policy review that tells what the draft would have done; POST asks for it.

    `?digest=` is the draft that is simulated.
    """
    now, problem = timezone.now(), ""
    digest = request.GET.get("digest", "")
    if not DIGEST.fullmatch(digest):
        digest = ""
    if request.method == "POST":
        try:
            asked = draft_effects.ask(request.POST.get("minutes", "60"), actor=actor_of(request), now=now)
        except ValidationError as error:
            problem = " ".join(error.messages)
        else:
            digest = asked[0].draft_digest
            for row in asked:
                ring("experiments.run", experiment_id=row.pk)
        if not request.headers.get("HX-Request"):
            if problem:
                messages.error(request, problem)
            return redirect(reverse("policy-review") + "#effect")
    context = {
        "effect": draft_effects.effect_of_draft(now, digest), "problem": problem,
        "may_run": may(request.user, "lab.run"), "minutes": request.POST.get("minutes", "60"),
    }  # fmt: skip
    return render(request, "experiments/draft_effect.html", context)
