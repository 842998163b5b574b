"""What the present draft of the policy would have done, pool by pool, for its review."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from django.core.cache import cache
from django.core.exceptions import ValidationError

from controlplane.audit.actors import Actor
from controlplane.experiments import actions, queries
from controlplane.experiments.answers import lookup, say
from controlplane.experiments.models import Experiment
from controlplane.experiments.recorded import policies_in_force
from controlplane.fleet.models import Pool
from controlplane.policy.compile import Source, compile_configuration, compile_source, load_source
from controlplane.policy.drafts import remembered
from controlplane.policy.queries import desired
from controlplane.web.numerals import money
from controlplane.wire.policy import PolicyDocument

MINUTES_MAX = 10_080.0
SEED = 1
ROWS_MAX = 20_000
OBJECTIVE_MS = 700.0
REMEMBERED_S = 3_600
"""Longer than any draft is simulated; where it is forgotten the draft is compiled once more."""


@dataclass(frozen=True, slots=True)
class PoolEffect:
    """A pool that the draft changes: its newest experiment, None before the first, and its figures once it is done."""

    pool: str
    row: Experiment | None
    problem: str
    figures: list[list[str]]
    whole: bool = True

    @property
    def at_work(self) -> bool:
        return self.row is not None and self.row.at_work


@dataclass(frozen=True, slots=True)
class DraftEffect:
    """The draft by its digest, with the pools that it changes."""

    digest: str
    pools: list[PoolEffect]

    @property
    def at_work(self) -> bool:
        return any(pool.at_work for pool in self.pools)


def effect_of_draft(now: datetime, digest: str = "") -> DraftEffect:
    """What is known of the present draft; nothing is run.

    While the draft of `digest` is simulated that one is told, without compiling anything: pages ask every two seconds.
    """
    if digest and (changed := cache.get(_key(digest))) is not None:
        effect = _effect(digest, changed)
        if effect.at_work:
            return effect
    source = load_source(now)
    in_force = tuple(sorted(desired(pool.pk for pool in source.pools).items()))
    drafted, changed = remembered(source, ("effect", in_force), now, lambda: _compared(source))
    effect = _effect(drafted, changed)
    if effect.at_work:
        cache.set(_key(drafted), changed, REMEMBERED_S)
    return effect


def _compared(source: Source) -> tuple[str, list[tuple[str, str]]]:
    """The digest of the draft, and the pools that it changes."""
    configuration = compile_source(source)
    return configuration.digest, _changed(configuration.pools)


def _effect(digest: str, changed: list[tuple[str, str]]) -> DraftEffect:
    known = queries.effects_of_draft(digest, [slug for slug, problem in changed if not problem])
    return DraftEffect(digest, [_pool(slug, problem, known.get(slug)) for slug, problem in changed])


def _key(digest: str) -> str:
    return f"lab:draft:{digest}"


def ask(minutes: str, *, actor: Actor, now: datetime) -> list[Experiment]:
    """One experiment for each pool that the draft changes, on its usage up to now. Raises ValidationError."""
    try:
        length = float(minutes)
    except ValueError:
        length = math.nan
    if not 0 < length <= MINUTES_MAX:
        raise ValidationError(f"Enter a length of more than 0 and at most {MINUTES_MAX:,.0f} minutes.")
    values = {
        "until": now.astimezone(UTC).replace(microsecond=0).isoformat(), "minutes": length, "seed": SEED,
        "rows_max": ROWS_MAX, "objective_ms": OBJECTIVE_MS,
    }  # fmt: skip
    asked, problems = [], []
    draft = compile_configuration(now)
    changed = _changed(draft.pools)
    for slug, problem in changed:
        if problem:
            continue
        try:
            asked.append(
                actions.ask(
                    kind=Experiment.Kind.EFFECT, title=f"Draft of {slug}", values={**values, "pool": slug}, actor=actor,
                    now=now, draft=draft,
                )
            )  # fmt: skip
        except ValidationError as error:
            problems.append(f"{slug}: {' '.join(error.messages)}")
    if not asked:
        raise ValidationError(problems or ["The draft changes no pool that has a policy in force."])
    cache.set(_key(draft.digest), changed, REMEMBERED_S)
    return asked


def _changed(drafts: dict[str, PolicyDocument]) -> list[tuple[str, str]]:
    """(pool, why it cannot be compared) of each pool whose document differs from the one in force."""
    pools = dict(Pool.objects.filter(slug__in=list(drafts)).values_list("slug", "pk"))
    in_force = policies_in_force(pools.values())
    found = []
    for slug in sorted(pools):
        document = in_force.get(pools[slug])
        if document is None:
            found.append((slug, "It has no policy in force yet, so there is nothing to compare with."))
        elif _content(document) != _content(drafts[slug]):
            found.append((slug, ""))
    return found


def _content(document: PolicyDocument) -> PolicyDocument:
    """Without the stamp of a push, and with slots on no agent: a binding is a fact, not a rule."""
    slots = [msgspec.structs.replace(slot, agent_id=None) for slot in document.pool.slots]
    pool = msgspec.structs.replace(document.pool, slots=slots)
    return msgspec.structs.replace(document, revision=0, not_before="", accept_until="", pool=pool)


def _pool(slug: str, problem: str, row: Experiment | None) -> PoolEffect:
    if row is None or getattr(row, "result", None) is None:
        return PoolEffect(slug, row, problem or ("" if row is None else row.problem), [])
    answer = queries.answer_of(row)
    return PoolEffect(slug, row, problem, _figures(answer), answer["load"]["whole"])


def _figures(answer: dict[str, Any]) -> list[list[str]]:
    """figure, now, draft: what a person who pushes looks at."""
    now, draft = answer["current"], answer["draft"]
    rows = []
    for slug in now["classes"]:
        for path, title, decimals in (
            ("wait_ms.p50", "wait p50, ms", 1), ("wait_ms.p95", "wait p95, ms", 1), ("wait_ms.p99", "wait p99, ms", 1),
            ("rejected", "refused", 0),
        ):  # fmt: skip
            values = [lookup(side["classes"].get(slug), path) for side in (now, draft)]
            rows.append([f"{slug}: {title}", *(say(value, decimals) for value in values)])
    rows.append(["Loans", *(say(lookup(side, "flex.lends")) for side in (now, draft))])
    missed = [sum(job["deadline_met"] is False for job in side["jobs"]) for side in (now, draft)]
    rows.append(["Deadlines missed", *map(say, missed)])
    rows.append(["Not in the policy, requests", *(say(side["not_in_policy"]) for side in (now, draft))])
    rows.append(["Charges", *(money(side["charge_nanos"]) for side in (now, draft))])
    return rows
