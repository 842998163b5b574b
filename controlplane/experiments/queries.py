"""Reading experiments: lists, answers, and what was run for a draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.db.models import QuerySet
from django.http import Http404

from controlplane.experiments.models import Experiment


def experiments(*, kind: str = "", state: str = "", pool: str = "") -> QuerySet[Experiment]:
    """Those that fit; an empty filter fits everything. Inputs and answers are not read."""
    wanted = {"kind": kind, "state": state, "pool": pool}
    return Experiment.objects.filter(**{name: value for name, value in wanted.items() if value}).defer(
        "parameters", "arguments", "inputs"
    )


def experiment_or_404(pk: int) -> Experiment:
    return _one_or_404(pk=pk)


def shared_or_404(token: str) -> Experiment:
    """By the token of its link; a withdrawn one is as one that never was."""
    return _one_or_404(share_token=token)


def _one_or_404(**wanted: Any) -> Experiment:
    """With its result and that of the one it is again of; their bytes are read only by who asks for an answer."""
    rows = Experiment.objects.select_related("result", "rerun_of__result")
    row = rows.defer("result__content", "rerun_of__result__content").filter(**wanted).first()
    if row is None:
        raise Http404("There is no such experiment.")
    return row


def answer_of(row: Experiment) -> dict[str, Any]:
    """The stored answer; an experiment without one is an illegal call (RelatedObjectDoesNotExist)."""
    return json.loads(bytes(row.result.content))


def safe_rates_of(answer: Mapping[str, Any]) -> dict[str, float]:
    """Slots -> requests/s of an interference test, without those that met nothing, and never falling.

    A rate below that of fewer slots is left out: bisection stops within a few per cent.
    """
    found: dict[str, float] = {}
    highest = 0.0
    for slots, rate in sorted((answer.get("safe_rates") or {}).items(), key=lambda pair: int(pair[0])):
        if rate > 0 and rate >= highest:
            found[slots] = highest = round(rate, 4)
    return found


def effects_of_draft(digest: str, pools: list[str]) -> dict[str, Experiment]:
    """Pool slug -> the newest experiment on the effect of that draft there."""
    rows = (
        Experiment.objects.filter(draft_digest=digest, pool__in=pools)
        .exclude(state__in=(Experiment.State.CANCELLED,))
        .select_related("result")
        .order_by("pool", "-id")
        .distinct("pool")
    )
    return {row.pool: row for row in rows}
