"""Alerts about batch: deadlines at risk or missed, and items that were parked, each with its likeliest causes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from controlplane.core.period import from_us
from controlplane.fleet.models import Pool
from controlplane.jobs.queries import unfinished_items
from controlplane.live.attention import link
from controlplane.live.deadlines import Night
from controlplane.live.job_risks import JobRisk, ParkedItems
from controlplane.live.readings import Reading
from controlplane.live.strip import iso
from controlplane.web.numerals import duration, fixed

JOBS_NAMED: Final = 5

Row = dict[str, Any]


def job_alerts(reading: Reading) -> Iterator[Row]:
    """Those of every pool, and of every batch contract whose night was missed."""
    for pool in reading.pools:
        if short := reading.job_risks.short.get(pool.pk):
            yield _deadline(reading, pool, short)
        if parked := reading.job_risks.parked.get(pool.pk):
            yield _parked(pool, parked)
    slugs = {standing.contract.pk: standing.contract for standing in reading.standings}
    for contract_id, night in reading.nights.items():
        if night.grade == "bad":
            contract = slugs[contract_id]
            yield _night(contract.slug, contract.name or contract.slug, night)


def _deadline(reading: Reading, pool: Pool, risks: list[JobRisk]) -> Row:
    missed = [risk for risk in risks if risk.missed]
    ahead = [risk for risk in risks if not risk.missed]
    said = []
    slow, unpaid = [risk for risk in ahead if risk.short_of_slots], [risk for risk in ahead if risk.unpaid]
    if slow:
        said.append(f"{_jobs(len(slow))} too slow for the deadline")
    if unpaid:
        said.append(f"{_jobs(len(unpaid))} short of money for the deadline")
    if missed:
        said.append(f"{_jobs(len(missed))} past the deadline and not done")
    first = min(risk.job.deadline for risk in risks if risk.job.deadline is not None)
    return {
        "key": f"deadline-{pool.slug}",
        "kind": "deadline",
        "pool": pool.slug,
        "contract": "",
        "causes": [
            *(_why_short(reading, pool) if slow or missed else ()),
            *_why_unpaid(risks),
            *(_job_cause(risk, reading) for risk in (*ahead, *missed)[:JOBS_NAMED]),
        ],
        "grade": "risk",
        "word": "Ticket",
        "title": f"{pool.slug}: {', '.join(said)}",
        "text": " ".join([f"The first is due {first:%H:%M} UTC.", *_said_why(slow, unpaid)]),
        "since": iso(first) if missed else None,
        "url": link("jobs") + f"?pool={pool.slug}" if link("jobs") else link("pool", pool.slug),
    }


def _said_why(slow: list[JobRisk], unpaid: list[JobRisk]) -> Iterator[str]:
    if unpaid:
        yield "Hard budgets do not pay for all items that are left before it is too late for them."
    if slow or not unpaid:
        yield (
            "The slots that serve batch are too few for the work that is left,"
            " and loans did not come or are not enough."
        )


def _why_unpaid(risks: list[JobRisk]) -> Iterator[dict[str, str]]:
    """Each budget that jobs wait for, with when it has money again."""
    windows = dict.fromkeys(risk.unpaid.window for risk in risks if risk.unpaid is not None)
    for window in list(windows)[:JOBS_NAMED]:
        value = (
            f"{window.window} of {window.level}: its next window begins {from_us(window.ends_at_us):%Y-%m-%d %H:%M} UTC"
        )
        yield {"label": "Budget", "value": value, "url": link("tenant", window.level)}


def _jobs(count: int) -> str:
    return f"{count} job{'s' if count > 1 else ''}"


def _job_cause(risk: JobRisk, reading: Reading) -> dict[str, str]:
    job = risk.job
    assert job.deadline is not None
    left = f"{duration(risk.remaining_us)} of GPU time left"
    if risk.missed:
        late = duration(round((reading.now - job.deadline).total_seconds() * 1_000_000))
        value = f"due {late} ago, {left}"
    else:
        short = "nothing serves batch" if risk.slack is None else f"slack {fixed(risk.slack, 2)}"
        if risk.unpaid is not None:
            short = f"budget pays for {risk.unpaid.items:,} of {unfinished_items(job):,} items"
        value = f"{short}, due {job.deadline:%H:%M} UTC, {left}"
    return {
        "label": f"{job.name or str(job.uuid)[:8]} of {job.tenant.slug}",
        "value": value,
        "url": link("job", job.uuid),
    }


def _why_short(reading: Reading, pool: Pool) -> Iterator[dict[str, str]]:
    """What keeps slots from batch now: a freeze, no slot left to lend, the weekly budget, load, agents not heard."""
    here = link("pool", pool.slug)
    flex = [slot for slot in reading.slots.get(pool.pk, []) if slot.band == "flex"]
    lent = sum(slot.state == "lent" for slot in flex)
    frozen = pool.frozen_since is not None and (pool.frozen_until is None or pool.frozen_until > reading.now)
    if frozen:
        until = "until someone allows it" if pool.frozen_until is None else f"until {pool.frozen_until:%H:%M} UTC"
        yield {"label": "Lending is frozen", "value": f"by {pool.frozen_by or 'the controller'}, {until}", "url": here}
    elif flex and lent == len(flex):
        yield {"label": "Every flex slot is lent", "value": f"{lent} of {len(flex)}", "url": here}
    elif not flex:
        yield {"label": "Nothing to lend", "value": "the pool has no flex slot", "url": here}
    else:
        yield {"label": "Lent", "value": f"{lent} of {len(flex)} flex slots", "url": here}
    lends = reading.lends_this_week.get(pool.pk, 0)
    if lends >= pool.spillover_per_week:
        yield {"label": "Weekly budget of loans", "value": f"{lends} of {pool.spillover_per_week} used", "url": here}
    sample = reading.samples.get(pool.pk)
    if sample is not None and sample.admitted_per_s is not None and sample.safe_rate_per_s:
        load = sample.admitted_per_s / sample.safe_rate_per_s
        if load >= pool.load_limit:
            value = f"{fixed(load, 2)}, loans need under {fixed(pool.load_limit, 2)}"
            yield {"label": "Interactive load", "value": value, "url": here}
    quiet = [word.name for word in reading.words.get(pool.pk, []) if not word.fresh(reading.now)]
    if quiet:
        yield {"label": "Silent agents", "value": ", ".join(quiet[:3]), "url": link("agents")}


def _parked(pool: Pool, rows: list[ParkedItems]) -> Row:
    items = sum(row.job.items_parked for row in rows)
    return {
        "key": f"parked-{pool.slug}",
        "kind": "parked",
        "pool": pool.slug,
        "contract": "",
        "causes": [
            {
                "label": f"{row.job.name or str(row.job.uuid)[:8]} of {row.job.tenant.slug}",
                "value": f"{row.job.items_parked:,} of {row.job.items:,}{f': {row.reason}' if row.reason else ''}",
                "url": link("job", row.job.uuid),
            }
            for row in rows[:JOBS_NAMED]
        ],
        "grade": "risk",
        "word": "Ticket",
        "title": f"{items:,} item{'s' if items > 1 else ''} of {_jobs(len(rows))} parked in {pool.slug}",
        "text": "Each failed three times and is not tried again until somebody asks for it. Its job ends without it.",
        "since": None,
        "url": link("job", rows[0].job.uuid) if len(rows) == 1 else link("jobs"),
    }


def _night(slug: str, name: str, night: Night) -> Row:
    result = night.result
    late = result.jobs - result.finished_in_time
    causes = [{"label": "Finished in time", "value": f"{result.finished_in_time:,} of {result.jobs:,} jobs", "url": ""}]
    if result.waited_too_long:
        value = f"{result.waited_too_long:,} jobs"
        causes.append({"label": "Waited too long for the first attempt", "value": value, "url": ""})
    return {
        "key": f"deadline-contract-{slug}",
        "kind": "deadline",
        "pool": "",
        "contract": slug,
        "causes": causes,
        "grade": "bad",
        "word": "Page",
        "title": f"{name} is missed: {late:,} of {result.jobs:,} jobs late",
        "text": f"{_share(result.share)} finished in time, {_share_of(night)} are promised.",
        "since": iso(from_us(night.night.due_us)),
        "url": link("contract", slug) or link("contracts"),
    }


def _share(share: Any) -> str:
    return "An unknown share" if share is None else f"{fixed(float(share) * 100, 1)} %"


def _share_of(night: Night) -> str:
    return f"{fixed(night.version.target_ppm / 10_000, 1)} %"
