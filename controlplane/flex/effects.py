"""What recalling a slot, freezing a band or allowing loans would do: shown first, and kept beside the act."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.core.flex_decision import FlexActionKind
from controlplane.fleet.models import Pool, Slot
from controlplane.flex import band_now, evidence, wording
from controlplane.flex.band_now import FRESH, BandFigures, BandNow
from controlplane.flex.job_lines import JobLine, job_lines, jobs_noted, said_of_jobs
from controlplane.flex.models import Lend
from controlplane.web.numerals import DASH, duration, fixed

DRAINS_LOOKED_AT: Final = 20
#: From an order to the controller's next look at it.
TICK: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a preview, one value for each column; `grade` is that of the last value: bad, risk or empty."""

    label: str
    values: tuple[str, ...]
    grade: str = ""


@dataclass(frozen=True, slots=True)
class Effect:
    """A preview. `noted` goes into the audit entry, to be compared with what is measured; `instants` are foretold."""

    columns: tuple[str, ...]
    said: tuple[str, ...]
    figures: tuple[Figure, ...]
    jobs: tuple[JobLine, ...]
    jobs_more: int
    noted: dict[str, Any]
    instants: tuple[tuple[str, datetime], ...] = ()

    def noted_with(self, *, recalls: bool) -> dict[str, Any]:
        """`noted` of a freeze: what becomes of jobs only where lent slots are recalled with it."""
        return {name: value for name, value in self.noted.items() if recalls or name != "jobs"}


def of_recall(slot: Slot, now: datetime) -> Effect:
    """A lent slot is asked back: what runs there, when it is home, and what that leaves to batch."""
    band = band_now.read(slot.pool, now)
    before, after = band.figures(), band.figures(home=[slot.pk])
    running, worth_us = _running_batch(band, slot)
    drains = _drains(slot.pool)
    bound_us = band.policy.drain_bound_us
    latest = now + TICK + timedelta(microseconds=bound_us)
    said = [f"It stops taking batch within a second; what runs has {duration(bound_us)} to end."]
    if drains:
        said.append(
            f"Of the last drains measured here ({len(drains)}) the median took"
            f" {duration(round(statistics.median(drains)))} and the longest {duration(max(drains))}."
        )
    else:
        said.append("No drain of this pool has been measured yet.")
    said.append(_at_the_bound(band))
    said += said_of_jobs([before, after], band.best_effort)
    jobs = job_lines([before, after])
    rows = [
        Figure("Batch requests that run on it", (fixed(running), "0"), ""),
        Figure("Their GPU time, estimated", (duration(worth_us) if worth_us else fixed(worth_us), "0"), ""),
    ]
    return Effect(
        columns=("Now", "Once it is home"),
        said=tuple(said),
        figures=(*rows, *band_lines(band, [before, after])),
        **jobs,
        noted={
            "running_batch": running,
            "bound_us": bound_us,
            "home_expected_us": round(statistics.median(drains)) if drains else None,
            **slack_noted(before, after),
            **jobs_noted(jobs["jobs"]),
        },
        instants=(
            ("Home at the latest", latest),
            ("No slot of the pool is lent again before", now + TICK + timedelta(microseconds=band.policy.cooldown_us)),
        ),
    )


def of_freeze(pool: Pool, now: datetime) -> Effect:
    """No new loan: what stays lent, and what batch would be without and with the recall of all."""
    band = band_now.read(pool, now)
    lent = [slot.slot_id for slot in band.lent()]
    before, recalled = band.figures(), band.figures(home=lent)
    names = ", ".join(slot.name for slot in band.lent())
    said = [f"Stays lent: {names}." if names else "Nothing is lent now."]
    said.append(_next_loan(band))
    jobs = job_lines([before, before, recalled])
    if lent:
        said.append(
            f"Recalled too, {'they are' if len(lent) > 1 else 'it is'} home within"
            f" {duration(band.policy.drain_bound_us)} and a second. {_at_the_bound(band)}"
        )
        said += said_of_jobs([before, before, recalled], band.best_effort)
    return Effect(
        columns=("Now", "Frozen", "Frozen and recalled"),
        said=tuple(said),
        figures=(
            Figure("Slots lent", (fixed(len(lent)), fixed(len(lent)), "0")),
            *band_lines(band, [before, before, recalled]),
        ),
        **jobs,
        noted={"lent": len(lent), "bound_us": band.policy.drain_bound_us, **slack_noted(before, before),
               "slack_expected_recalled": recalled.slack.slack, **jobs_noted(jobs["jobs"])},
    )  # fmt: skip


def of_unfreeze(pool: Pool, now: datetime) -> Effect:
    """Loans are possible again: whether one follows at once, and what every loan that may be made would bring."""
    band = band_now.read(pool, now)
    away = sum(slot.band == "flex" for slot in band.slots) - len(band.at_home())
    room = band.at_home()[: max(0, band.policy.max_lent - away)] if band.policy.max_lent is not None else band.at_home()
    before, most = band.figures(), band.figures(lent=[slot.slot_id for slot in room])
    return Effect(
        columns=("Now", "With every loan allowed"),
        said=(_next_loan(band, frozen=False),),
        figures=(
            Figure("Slots lent", (fixed(len(band.lent())), fixed(len(band.lent()) + len(room)))),
            *band_lines(band, [before, most]),
        ),
        **job_lines([before, most]),
        noted={"lent": len(band.lent()), **slack_noted(before, before)},
    )


# ---- lines that previews share ----


def band_lines(band: BandNow, found: Sequence[BandFigures]) -> tuple[Figure, ...]:
    """Slots, load, slack and jobs in time, one value for each state of the band."""
    last = found[-1]
    policy = band.policy
    loaded = last.load is not None and last.load >= policy.load_limit
    short = bool(last.slack.jobs or last.slack.backlog_us) and (last.slack.slack is None or last.slack.slack < 0)
    return (
        Figure("Slots that serve interactive", tuple(fixed(one.interactive) for one in found),
               "" if last.interactive else "bad"),
        Figure(f"Interactive load, limit {fixed(policy.load_limit, 2)}", tuple(fixed(one.load, 2) for one in found),
               "risk" if loaded else ""),
        Figure("Slots that serve batch", tuple(fixed(one.batch) for one in found)),
        Figure("Batch slack", tuple(slack_text(one) for one in found), "risk" if short else ""),
        Figure("Jobs that make their deadline at this pace",
               tuple(f"{one.in_time:,} of {len(one.rooms):,}" if one.rooms else DASH for one in found),
               "risk" if last.in_time < found[0].in_time else ""),
    )  # fmt: skip


def slack_text(one: BandFigures) -> str:
    """Slack with three places; a word where no number of slots is enough."""
    if one.slack.slack is None:
        return "missed" if one.slack.missed else "nothing serves batch"
    return fixed(one.slack.slack, 3)


def slack_noted(before: BandFigures, after: BandFigures) -> dict[str, Any]:
    """As the audit log keeps it, by the names that jobs use."""
    return {"slack_before": before.slack.slack, "slack_expected": after.slack.slack}


def _running_batch(band: BandNow, slot: Slot) -> tuple[int | None, int | None]:
    """Batch requests on a slot and their estimated GPU time, by a report that is fresh; None is not known."""
    live = band.live.get(slot.agent_id) if slot.agent_id is not None else None
    if live is None or not timedelta(0) <= band.now - live.reported_at <= FRESH:
        return None, None
    for said in live.figures.get("slots", ()):
        if said["slot_id"] == slot.pk:
            return said["running_batch"], max(0, said["running_batch_gpu_us"])
    return None, None


def _drains(pool: Pool) -> list[int]:
    rows = Lend.objects.filter(pool=pool, drain_us__isnull=False).order_by("-lent_at")
    return list(rows.values_list("drain_us", flat=True)[:DRAINS_LOOKED_AT])  # type: ignore[arg-type]


def _at_the_bound(band: BandNow) -> str:
    if band.cancellable:
        return "What has not ended by then is cancelled and tried again elsewhere."
    return "What has not ended by then cannot be cancelled: the slot would be overdue until it ends."


def _next_loan(band: BandNow, *, frozen: bool | None = None) -> str:
    """What the controller would do next if nothing else changed."""
    decision = band.decision(frozen=frozen)
    if decision is None:
        return "The controller has not looked at this band yet: what it would lend is not known."
    lends = [action.slot for action in decision.actions if action.kind is FlexActionKind.LEND]
    if lends:
        return f"Without a freeze the controller lends {', '.join(lends)} at its next tick."
    checks = [check for check in evidence.checks_as_json(decision) if check["used_for"] == "lend" and not check["held"]]
    lines = [line for group in wording.check_groups(checks) for line in group.lines]
    reasons = "; ".join(f"{line.label.lower()} is {_valued(line)}" for line in lines[:3])
    return f"No loan is about to be made: {reasons}." if reasons else "No loan is about to be made."


def _valued(line: wording.CheckLine) -> str:
    unit = f" {line.unit}" if line.unit else ""
    return f"{line.value}{unit}, has to be {line.limit}{unit}" if line.limit else line.value
