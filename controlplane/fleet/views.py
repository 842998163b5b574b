"""Pages of pools, slots and agents. A pool's live page is in `live`."""

from collections.abc import Callable, Sequence
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.fleet import actions, keys, queries
from controlplane.fleet.edit_flow import Edit, run
from controlplane.fleet.forms import (
    SLOT_LABELS,
    EnrolForm,
    PoolForm,
    SlotsForm,
    pool_initial,
    pool_labels,
    pool_shown,
    slot_initial,
    slot_shown,
)
from controlplane.fleet.models import Agent, Pool, Slot
from controlplane.fleet.served_classes import room_warnings
from controlplane.tenants.access import may, requires
from controlplane.tenants.actions import Stale
from controlplane.tenants.review import reason_of
from controlplane.web.exports import CsvResponse

TAKES_PUSH = "Takes effect when you push."
SORTS = (("attention", "Attention first"), ("name", "By name"), ("newest", "Newest first"))


def _list_template(request: HttpRequest, name: str) -> str:
    """The page, or the rows alone for the page that renews them every few seconds."""
    return f"fleet/{name}_rows.html" if request.headers.get("HX-Request") else f"fleet/{name}.html"


# ---- pools ----


@requires("pool.read")
def pools(request: HttpRequest) -> HttpResponseBase:
    """All pools on one page: they are kinds of GPU and model, a few dozen at most."""
    now = timezone.now()
    text, state = request.GET.get("q", "").strip()[:120], request.GET.get("state", "")
    sort = request.GET.get("sort", "")
    sort = sort if sort in queries.POOL_SORTS else "attention"
    rows = queries.pool_rows(now, text=text, archived=state == "archived", sort=sort)
    if request.GET.get("format") == "csv":
        return _pools_csv(rows)
    context = {
        "rows": rows, "q": text, "state": state, "sort": sort, "sorts": SORTS, "now": now,
        "may_write": may(request.user, "pool.write"),
    }  # fmt: skip
    return render(request, _list_template(request, "pools"), context)


def _pools_csv(rows: Sequence[queries.PoolRow]) -> CsvResponse:
    header = [
        "pool", "name", "status", "model", "gpu", "isolation", "interactive_class", "batch_class",
        "interactive_slots", "batch_slots", "flex_slots", "agents", "silent_agents", "archived_at",
    ]  # fmt: skip
    lines = (
        [
            row.pool.slug, row.pool.name, row.word, row.pool.model.name, row.pool.gpu_type, row.pool.isolation,
            row.pool.interactive_class, row.pool.batch_class, row.interactive, row.batch, row.flex, row.agents,
            row.silent, row.pool.archived_at,
        ]
        for row in rows
    )  # fmt: skip
    return CsvResponse("pools.csv", header, lines)


@requires("pool.write")
def pool_new(request: HttpRequest) -> HttpResponseBase:
    def save(form: PoolForm, *, reason: str) -> str:
        pool = actions.create_pool(
            slug=form.cleaned_data["slug"],
            model=form.cleaned_data["model"],
            values=form.values(),
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
        )
        return reverse("slot-new", args=[pool.slug])

    def shown(form: PoolForm) -> dict[str, Any]:
        return pool_shown({**form.values(), "slug": form.cleaned_data["slug"], "model": form.cleaned_data["model"]})

    return run(
        request,
        Edit(
            title="New pool",
            verb="Create pool",
            back=reverse("pools"),
            back_label="Pools",
            labels=pool_labels(),
            make_form=lambda data: PoolForm(data),
            shown=shown,
            save=save,
            saved="Created the pool. Add its slots next.",
            notes=lambda form: [TAKES_PUSH],
        ),
    )


@requires("pool.read", write="pool.write")
def pool_edit(request: HttpRequest, slug: str) -> HttpResponseBase:
    pool = queries.pool_for(slug)
    now = timezone.now()

    def save(form: PoolForm, *, reason: str) -> str:
        actions.edit_pool(
            slug=slug,
            values=form.values(),
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
            version=form.cleaned_data["version"],
        )
        return reverse("pool-edit", args=[slug])

    def notes(form: PoolForm) -> Sequence[str]:
        planned = Pool(pk=pool.pk, slug=slug, model=pool.model, **form.values())
        return [TAKES_PUSH, *room_warnings(planned, now)]

    stored = pool_shown({name: getattr(pool, name) for name in actions.POOL_FIELDS} | {"model": pool.model.name})
    may_write = may(request.user, "pool.write")

    def make_form(data: Any) -> PoolForm:
        form = PoolForm(data, pool=pool, initial=pool_initial(pool))
        if not may_write:
            for field in form.fields.values():
                field.disabled = True
        return form

    context = {
        "pool": pool,
        "slots": queries.slot_rows(pool=pool),
        "warnings": room_warnings(pool, now),
        "may_write": may_write,
        "read_only": not may_write,
        "meta": [f"{pool.model.name} on {pool.gpu_type}", pool.get_isolation_display(), f"version {pool.version}"],
        "now": now,
    }
    return run(
        request,
        Edit(
            title=f"Edit {slug}" if may_write else f"Settings of {slug}",
            verb="Save changes",
            back=reverse("pools"),
            back_label="Pools",
            labels=pool_labels(),
            make_form=make_form,
            stored=stored,
            shown=lambda form: pool_shown({**form.values(), "model": pool.model.name}),
            save=save,
            saved=f"Saved {slug}. {TAKES_PUSH}",
            version=pool.version,
            noun="pool",
            object_id=slug,
            notes=notes,
            template="fleet/pool_edit.html",
            context=context,
        ),
    )


@require_POST
@requires("pool.write")
def pool_archive(request: HttpRequest, slug: str) -> HttpResponse:
    queries.pool_for(slug)

    def archive() -> None:
        actions.archive_pool(slug=slug, actor=actor_of(request), now=timezone.now(), reason=reason_of(request))

    if _said(request, archive, f"Archived {slug}. {TAKES_PUSH}"):
        return redirect("pools")
    return redirect("pool-edit", slug=slug)


# ---- slots ----


@requires("pool.write")
def slot_new(request: HttpRequest, slug: str) -> HttpResponseBase:
    pool = queries.pool_for(slug)

    def save(form: SlotsForm, *, reason: str) -> str:
        actions.add_slots(
            pool_slug=slug,
            names=form.cleaned_data["names"],
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
            **form.values(),
        )
        return reverse("pool-edit", args=[slug])

    return run(
        request,
        Edit(
            title=f"Add slots to {slug}",
            verb="Add slots",
            back=reverse("pool-edit", args=[slug]),
            back_label=slug,
            labels=SLOT_LABELS,
            make_form=lambda data: SlotsForm(data),
            shown=lambda form: slot_shown({**form.values(), "names": form.cleaned_data["names"]}),
            save=save,
            saved=f"Added. {TAKES_PUSH}",
            notes=lambda form: ["Cost of these slots runs from now on.", TAKES_PUSH],
            context={"pool": pool, "acts": f"Their cost runs from now on. The bands change on agents: {TAKES_PUSH}"},
        ),
    )


@requires("pool.write")
def slot_edit(request: HttpRequest, slug: str, slot_id: int) -> HttpResponseBase:
    slot = _slot_of(slug, slot_id)

    def save(form: SlotsForm, *, reason: str) -> str:
        actions.edit_slot(
            slot_id=slot_id,
            values=form.values(),
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
            version=form.cleaned_data["version"],
        )
        return reverse("pool-edit", args=[slug])

    return run(
        request,
        Edit(
            title=f"Edit slot {slot.name} of {slug}",
            verb="Save slot",
            back=reverse("pool-edit", args=[slug]),
            back_label=slug,
            labels=SLOT_LABELS,
            make_form=lambda data: SlotsForm(data, slot=slot, initial=slot_initial(slot)),
            stored=slot_shown({name: getattr(slot, name) for name in actions.SLOT_FIELDS}),
            shown=lambda form: slot_shown(form.values()),
            save=save,
            saved=f"Saved slot {slot.name}. {TAKES_PUSH}",
            version=slot.version,
            noun="pool",
            object_id=slug,
            notes=lambda form: [TAKES_PUSH],
        ),
    )


@require_POST
@requires("pool.write")
def slot_remove(request: HttpRequest, slug: str, slot_id: int) -> HttpResponse:
    slot = _slot_of(slug, slot_id)

    def remove() -> None:
        actions.remove_slot(slot_id=slot.pk, actor=actor_of(request), now=timezone.now(), reason=reason_of(request))

    _said(request, remove, f"Removed slot {slot.name}: its cost ended now. {TAKES_PUSH}")
    return redirect("pool-edit", slug=slug)


def _slot_of(slug: str, slot_id: int) -> Slot:
    slot = Slot.objects.filter(pk=slot_id, pool__slug=slug, pool__archived_at=None, removed_at=None).first()
    if slot is None:
        raise Http404("There is no such slot.")
    return slot


# ---- agents ----


@requires("agent.read")
def agents(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    wanted = queries.agents(retired=request.GET.get("state") == "retired")
    if pool := request.GET.get("pool", ""):
        wanted = wanted.filter(pool__slug=pool)
    rows = queries.attention_first(queries.agent_rows(list(wanted.order_by("pool__slug", "name")[:1_000]), now))
    context = {
        "rows": rows,
        "now": now,
        "tokens": queries.open_tokens(now) if may(request.user, "agent.enrol") else [],
        "may_enrol": may(request.user, "agent.enrol"),
        "pools": Pool.objects.filter(archived_at=None).order_by("slug").values_list("slug", flat=True),
        "wanted": {"pool": pool, "state": request.GET.get("state", "")},
        "page_state": "unknown" if any(row.grade == "unknown" for row in rows) else "",
    }
    return render(request, _list_template(request, "agents"), context)


@requires("agent.read")
def agent(request: HttpRequest, agent_id: int) -> HttpResponse:
    now = timezone.now()
    row = queries.agent_for(agent_id)
    (state,) = queries.agent_rows([row], now)
    slots = queries.slot_rows(agent=row)
    context = {
        "agent": row,
        "row": state,
        "slots": slots,
        "lost": [slot.slot.name for slot in slots if slot.state == "lost"],
        "live": getattr(row, "live", None),
        "clock_is_off": queries.clock_is_off(getattr(row, "live", None)),
        "now": now,
        "may_drain": may(request.user, "agent.drain"),
        "key": keys.key_state(row),
        "may_retire": may(request.user, "agent.retire"),
        "may_see_aside": may(request.user, "quarantine.read"),
        "may_rotate_key": may(request.user, "agent.rotate_key"),
        "may_approve": may(request.user, "agent.enrol"),
        "page_state": state.grade if state.grade in ("bad", "risk", "unknown") else "",
    }
    return render(request, "fleet/agent.html", context)


@never_cache
@requires("agent.enrol")
def agent_enrol(request: HttpRequest) -> HttpResponse:
    """Makes a token and shows its secret in this one answer; the page cannot be had again."""
    form = EnrolForm(request.POST or None, initial={"pool": request.GET.get("pool")})
    if request.method == "POST" and form.is_valid():
        pool = form.cleaned_data["pool"]
        try:
            token, secret = actions.create_enrolment_token(pool=pool, actor=actor_of(request), now=timezone.now())
        except ValidationError as error:
            take_errors(form, error)
        else:
            context = {"token": token, "secret": secret, "command": enrol_command(request, pool, secret)}
            return render(request, "fleet/enrol_token.html", context)
    return render(request, "fleet/enrol.html", {"form": form}, status=400 if form.errors else 200)


def enrol_command(request: HttpRequest, pool: Pool, secret: str) -> str:
    """The command that starts an agent with this token: to be copied, its backend adapted."""
    used = set(Agent.objects.exclude(state="retired").values_list("name", flat=True))
    number = next(number for number in range(1, len(used) + 2) if f"{pool.slug}-{number}" not in used)
    name = f"{pool.slug}-{number}"
    return (
        f"python -m controlplane.agent --control-plane {request.build_absolute_uri('/').rstrip('/')}"
        f" --enrol-token {secret} --name {name} --state-dir ./agent-{name} --backend sim"
        f" --slots {max(queries.free_slots(pool), 1)} --listen 127.0.0.1:9001 --admin-listen 127.0.0.1:9101"
    )


@require_POST
@requires("agent.enrol")
def agent_approve(request: HttpRequest, agent_id: int) -> HttpResponse:
    return _agent_action(request, agent_id, "Approved {}: it is taken in with its next try.", actions.approve_agent)


@require_POST
@requires("agent.rotate_key")
def agent_rotate_key(request: HttpRequest, agent_id: int) -> HttpResponse:
    said = "Requested: {} makes a new key with its next report; the old one is refused from its first report with it."
    return _agent_action(request, agent_id, said, keys.ask_for_new_key, reason=reason_of(request))


@require_POST
@requires("agent.retire")
def agent_retire(request: HttpRequest, agent_id: int) -> HttpResponse:
    said = "Retired {}: it is refused from now on, the cost of its slots ended, and they are free for another agent."
    return _agent_action(request, agent_id, said, actions.retire_agent, reason=reason_of(request))


def _agent_action(
    request: HttpRequest, agent_id: int, said: str, action: Callable[..., Agent], **more: Any
) -> HttpResponse:
    row = queries.agent_for(agent_id)

    def act() -> None:
        action(agent_id=agent_id, actor=actor_of(request), now=timezone.now(), **more)

    _said(request, act, said.format(row.name))
    return redirect("agent", agent_id=agent_id)


def _said(request: HttpRequest, act: Callable[[], None], said: str) -> bool:
    """Runs an action of a single button and says how it went."""
    try:
        act()
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
        return False
    except Stale:
        messages.error(request, "Somebody changed this at the same moment: look at it and decide again.")
        return False
    messages.success(request, said)
    return True
