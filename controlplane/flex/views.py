"""Pages of a flex band: its review and ledger, a decision with every check, and the forms to recall and freeze."""

from __future__ import annotations

from datetime import datetime

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import NoReverseMatch, reverse
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import ReasonForm
from controlplane.fleet.models import Pool, Slot
from controlplane.flex import actions, effects, queries, wording
from controlplane.flex.act_page import Act, act_page
from controlplane.flex.effects import Effect
from controlplane.flex.forms import FreezeForm
from controlplane.flex.models import Decision
from controlplane.tenants.access import may, requires
from controlplane.web.pagination import BadCursor, keyset_page

DECISIONS_PER_PAGE = 25
LOANS_SHOWN = 25


@requires("flex.read")
def pool_page(request: HttpRequest, slug: str) -> HttpResponse:
    """A band's week, its ledger of loans and its decisions."""
    pool, now = _pool_or_404(slug), timezone.now()
    acting = request.GET.get("acts") == "1"
    try:
        page = keyset_page(
            queries.decisions(pool.pk, acting=acting).defer("snapshot", "checks"),
            ("-at", "-id"),
            cursor=request.GET.get("cursor"),
            limit=DECISIONS_PER_PAGE,
        )
    except BadCursor:
        return redirect("flex-pool", slug=slug)
    review = queries.week_review(pool, now)
    context = {
        "now": now,
        "pool": pool,
        "page": page,
        "rows": [(row, [wording.action_sentence(action) for action in row.actions]) for row in page.rows],
        "acting": acting,
        "loans": [(loan, wording.REASONS.get(loan.recall_reason, "")) for loan in queries.lend_ledger(
            pool.pk, limit=LOANS_SHOWN)],
        "review": review,
        "findings": [wording.FINDINGS[finding] for finding in review.found.findings],
        "reasons": [(wording.REASONS.get(name, name), count) for name, count in review.by_reason.items()],
        "freeze": queries.freeze_of(pool, now),
        "may_act": may(request.user, "flex.act"),
        "nav_section": "pools",
    }  # fmt: skip
    return render(request, "flex/pool.html", context)


@requires("flex.read")
def decision_page(request: HttpRequest, decision_id: int) -> HttpResponse:
    """A decision with every check: name, value, limit, held, used for; and the same made again from its evidence."""
    try:
        row = queries.decision(decision_id)
    except Decision.DoesNotExist as error:
        raise Http404("There is no such decision.") from error
    context = {
        "row": row,
        "groups": wording.check_groups(row.checks),
        "sentences": [wording.action_sentence(action) for action in row.actions],
        "acted": any(action["kind"] != "renew" for action in row.actions),
        "same": queries.recomputes(row),
        "loans": queries.loans_of(row),
        "slots": row.snapshot.get("slots", []),
        "jobs": row.snapshot.get("jobs", []),
        "nav_section": "pools",
    }
    return render(request, "flex/decision.html", context)


@requires("flex.read", write="flex.act")
def recall(request: HttpRequest, slot_id: int) -> HttpResponse:
    slot = Slot.objects.select_related("pool").filter(pk=slot_id).first()
    if slot is None:
        raise Http404("There is no such slot.")
    act = _act(
        slot.pool,
        title=f"Recall {slot.name}",
        text=f"{slot.name} of {slot.pool.slug} comes home: it stops taking batch at once, and what runs may finish.",
        verb=f"Recall {slot.name}",
        done=f"Requested: {slot.name} is recalled within a second.",
        noun="slot",
        object_id=str(slot.pk),
        button="button-danger",
    )

    def do(form: ReasonForm, effect: Effect, now: datetime) -> None:
        actions.recall_slot(
            slot_id=slot.pk, actor=actor_of(request), now=now, reason=form.cleaned_data["reason"], noted=effect.noted
        )

    return act_page(request, act, lambda now: effects.of_recall(slot, now), do)


@requires("flex.read", write="flex.act")
def freeze(request: HttpRequest, slug: str) -> HttpResponse:
    pool = _pool_or_404(slug)
    act = _act(
        pool,
        title=f"Freeze lending in {pool.slug}",
        text="No new loan until the freeze ends; loans run on unless you recall them. Takes effect within 2 s.",
        verb="Freeze lending",
        done=f"Requested: no new loans in {pool.slug}.",
    )

    def do(form: ReasonForm, effect: Effect, now: datetime) -> None:
        if not isinstance(form, FreezeForm):
            raise TypeError("freezing needs its own form")
        recalls = form.cleaned_data["recall"]
        freeze_pool = actions.freeze_and_recall if recalls else actions.freeze
        freeze_pool(
            pool_id=pool.pk, actor=actor_of(request), now=now, reason=form.cleaned_data["reason"],
            until=now + form.length(), noted=effect.noted_with(recalls=recalls),
        )  # fmt: skip

    return act_page(request, act, lambda now: effects.of_freeze(pool, now), do, FreezeForm)


@requires("flex.read", write="flex.act")
def unfreeze(request: HttpRequest, slug: str) -> HttpResponse:
    pool = _pool_or_404(slug)
    act = _act(
        pool,
        title=f"Unfreeze lending in {pool.slug}",
        text="New loans are possible again when every check for one holds. Takes effect within 2 s.",
        verb="Unfreeze lending",
        done=f"Requested: loans are possible again in {pool.slug}.",
    )

    def do(form: ReasonForm, effect: Effect, now: datetime) -> None:
        actions.unfreeze(
            pool_id=pool.pk, actor=actor_of(request), now=now, reason=form.cleaned_data["reason"], noted=effect.noted
        )

    return act_page(request, act, lambda now: effects.of_unfreeze(pool, now), do)


def _act(
    pool: Pool, *, title: str, text: str, verb: str, done: str, noun: str = "pool", object_id: str = "",
    button: str = "button-primary",
) -> Act:  # fmt: skip
    """An act on a pool's band, which leads back to the pool's page."""
    try:
        back = reverse("pool", args=[pool.slug])
    except NoReverseMatch:
        back = reverse("flex-pool", args=[pool.slug])
    return Act(
        title=title, text=text, verb=verb, done=done, permission="flex.act", noun=noun,
        object_id=object_id or pool.slug, acts=("flex.recall", "flex.freeze", "flex.unfreeze"), back=back,
        back_label=pool.slug, nav_section="pools", button=button,
    )  # fmt: skip


def _pool_or_404(slug: str) -> Pool:
    pool = Pool.objects.filter(slug=slug).first()
    if pool is None:
        raise Http404("There is no such pool.")
    return pool
