"""Policy pages: where it stands, review before a push, a rollout agent by agent, rollback."""

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.audit.queries import WAITING_MAX, changes_waiting
from controlplane.policy.actions import push, rollback, send_next_wave
from controlplane.policy.configuration import Configuration
from controlplane.policy.diff import Change, diff, groups, place, tally
from controlplane.policy.forms import PushForm, ReasonForm
from controlplane.policy.models import Revision, Rollout
from controlplane.policy.pages import reach, review, revision_rows, rollout_page
from controlplane.policy.queries import AgentDrift, configuration_of, drift, latest_revision, revision_before
from controlplane.policy.triton_files import triton_file, triton_links
from controlplane.tenants.access import may, requires
from controlplane.web.pagination import BadCursor, keyset_page, sorted_page
from controlplane.web.views import bad_request

DRIFT_ROWS_ON_OVERVIEW = 20
REVISIONS_PER_PAGE = 20
UNDO_SHOWN = 50


@requires("policy.read")
def overview(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    try:
        page = keyset_page(
            Revision.objects.defer("configuration"),
            ("-number",),
            cursor=request.GET.get("cursor"),
            limit=REVISIONS_PER_PAGE,
        )
    except BadCursor:
        return redirect("policy")
    agents = drift(now)
    attention = [row for row in agents if row.needs_attention]
    context = {
        "now": now,
        "page": page,
        "rows": revision_rows(list(page.rows)),
        "latest": latest_revision(),
        "waiting": changes_waiting(),
        "waiting_most": WAITING_MAX,
        "agents": agents,
        "attention": attention,
        "shown": attention[:DRIFT_ROWS_ON_OVERVIEW],
        "in_force": len(agents) - len(attention),
        "page_state": _state_of(agents),
    }
    return render(request, "policy/overview.html", context)


@requires("policy.read")
def unpushed(request: HttpRequest) -> HttpResponse:
    """The panel of what is saved and in no revision, compiled and checked: of many tenants that takes seconds."""
    return render(request, "policy/unpushed.html", {"review": review(timezone.now())})


@requires("policy.read")
def drift_page(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    agents = drift(now)
    attention = sum(row.needs_attention for row in agents)
    context = {"now": now, "agents": agents, "attention": attention, "page_state": _state_of(agents)}
    template = "policy/drift_panel.html" if request.headers.get("HX-Request") else "policy/drift.html"
    return render(request, template, context)


@requires("policy.read", write="policy.push")
def review_page(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    found = review(now)
    try:
        page = sorted_page(found.groups, place, cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    initial = {"reviewed_digest": found.digest}
    form = PushForm(request.POST or None, warnings=len(found.warnings), initial={"waves": "100", **initial})
    if request.method == "POST" and form.is_valid():
        try:
            revision = push(
                actor=actor_of(request),
                reason=form.cleaned_data["reason"],
                waves=form.cleaned_data["waves"],
                gates=form.gates(),
                reviewed_digest=form.cleaned_data["reviewed_digest"],
                now=now,
            )
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, f"Accepted as revision {revision.number}.")
            return redirect("rollout", number=revision.number)
    if form.is_bound and "reviewed_digest" not in form.errors:
        # What is shown now is what a second try pushes.
        form.data = {**request.POST.dict(), "reviewed_digest": found.digest}
    context = {"now": now, "review": found, "page": page, "form": form, "may_push": may(request.user, "policy.push")}
    return render(request, "policy/review.html", context, status=422 if form.is_bound else 200)


@requires("policy.read")
def revision_page(request: HttpRequest, number: int) -> HttpResponse:
    try:
        return _revision(request, _revision_or_404(number), ReasonForm())
    except BadCursor as error:
        return bad_request(request, error)


@requires("policy.read")
def triton_config(request: HttpRequest, number: int, pool: str) -> HttpResponse:
    """A pool's blocks of config.pbtxt as a file."""
    return triton_file(_revision_or_404(number), pool, agent=request.GET.get("agent", ""))


@requires("policy.read", write="policy.rollback")
def rollback_page(request: HttpRequest, number: int) -> HttpResponse:
    target = _revision_or_404(number)
    if request.method != "POST":
        return redirect("policy-revision", number=number)
    form = ReasonForm(request.POST)
    if form.is_valid():
        try:
            made = rollback(
                to_number=number, actor=actor_of(request), reason=form.cleaned_data["reason"], now=timezone.now()
            )
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, f"Accepted as revision {made.number}, with the content of {number}.")
            return redirect("rollout", number=made.number)
    return _revision(request, target, form, status=422)


@requires("policy.read", write="policy.push")
def rollout_view(request: HttpRequest, number: int) -> HttpResponse:
    """GET shows (htmx: the moving part only); POST lets the next wave go although agents are silent."""
    now = timezone.now()
    rollout = (
        Rollout.objects.select_related("revision").defer("revision__configuration").filter(revision_id=number).first()
    )
    if rollout is None:
        raise Http404("There is no such revision.")
    form = ReasonForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            send_next_wave(rollout_id=rollout.pk, actor=actor_of(request), reason=form.cleaned_data["reason"], now=now)
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, "The next wave goes out.")
            return redirect("rollout", number=number)
    page = rollout_page(rollout, now)
    context = {
        "now": now,
        "rollout": page,
        "form": form,
        "may_push": may(request.user, "policy.push"),
        "page_state": page.chip if page.chip in ("bad", "risk", "ok") else "",
    }
    template = "policy/rollout_panel.html" if request.headers.get("HX-Request") else "policy/rollout.html"
    return render(request, template, context, status=422 if form.is_bound else 200)


def _revision(request: HttpRequest, revision: Revision, form: ReasonForm, status: int = 200) -> HttpResponse:
    now = timezone.now()
    previous = revision_before(revision.number)
    latest = latest_revision()
    content = configuration_of(revision.number) or Configuration({})
    changes = diff(configuration_of(previous.number) if previous else None, content, now=now)
    undo: list[Change] = []
    if latest is not None and latest.number != revision.number:
        undo = diff(configuration_of(latest.number), content, now=now)
    undo_groups = groups(undo)
    context = {
        "now": now,
        "revision": revision,
        "previous": previous,
        "row": revision_rows([revision])[0],
        "tally": tally(changes),
        "page": sorted_page(groups(changes), place, cursor=request.GET.get("cursor")),
        "latest": latest,
        "is_latest": latest is not None and latest.number == revision.number,
        "triton": triton_links(content),
        "undo_groups": undo_groups[:UNDO_SHOWN],
        "undo_more": len(undo_groups[UNDO_SHOWN:]),
        "undo_tally": tally(undo),
        "form": form,
        "may_roll_back": may(request.user, "policy.rollback"),
        "reach": reach(drift(now)),
    }
    return render(request, "policy/revision.html", context, status=status)


def _revision_or_404(number: int) -> Revision:
    revision = Revision.objects.defer("configuration").filter(number=number).first()
    if revision is None:
        raise Http404("There is no such revision.")
    return revision


def _state_of(agents: list[AgentDrift]) -> str:
    states = {row.state for row in agents}
    if states & {"refused", "must_upgrade"}:
        return "bad"
    if states & {"silent", "never"}:
        return "unknown"
    return "risk" if "behind" in states else "ok"
