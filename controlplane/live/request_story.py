"""One request as a story: its stages on a line, its attempts, what was decided at admission, and what it cost."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db.models import QuerySet

from controlplane.contracts.models import WorkloadClass
from controlplane.core.reasons import BY_CODE, Outcome
from controlplane.core.stage_stack import STAGES
from controlplane.fleet.models import Agent, Pool, ServedModel, Slot
from controlplane.ledger.queries import rate_cards
from controlplane.live.check_labels import CheckRow, check_rows
from controlplane.live.stages import STAGE_FILLS, STAGE_NAMES
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.usage.models import DecisionSample, UsageRecord
from controlplane.usage.queries import RequestStory, find_request
from controlplane.wire.report import (
    FLAG_CAPPED,
    FLAG_ESTIMATED,
    FLAG_NOT_CHARGED,
    FLAG_OUTAGE,
    FLAG_STREAMED,
    FLAG_TOKENLESS,
)

if TYPE_CHECKING:
    from controlplane.ledger.models import RateCard


@dataclass(frozen=True, slots=True)
class Bar:
    """One stage of one attempt on the line: from and length as shares of the whole."""

    left: float
    width: float
    failed: bool
    label: str


@dataclass(frozen=True, slots=True)
class Row:
    """One stage of the timeline over all attempts; `us` None is unknown."""

    name: str
    fill: str
    bars: tuple[Bar, ...]
    us: int | None


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    slot: str
    agent: str
    start_us: int
    end_us: int
    gpu_us: int
    output_tokens: int | None
    outcome: str
    grade: str
    status: int
    charged: bool


@dataclass(frozen=True, slots=True)
class Story:
    """Everything the request page shows. `records` may be empty: refused at admission, or not reported yet.

    `ended_at` is when its last attempt ended, None before that.
    """

    request_id: uuid.UUID
    tenant: Tenant | None
    facts: list[dict[str, Any]]
    sentence: str
    rows: list[Row]
    total_us: int | None
    axis: list[tuple[float, str]]
    attempts: list[Attempt]
    checks: list[CheckRow]
    decision: str
    decided: str
    charges: list[tuple[str, int, int]]
    charge_nanos: int
    identifiers: list[dict[str, Any]]
    chip: str
    word: str
    pool: str
    reason: str
    card: RateCard | None
    class_slug: str
    ended_at: datetime | None


def tell(request_id: uuid.UUID, *, now: datetime) -> Story | None:
    """The story, or None when nothing is known of the id. It says which tenant it belongs to; the caller decides."""
    found = find_request(request_id, now=now)
    if not found.records and found.sample is None:
        return None
    return _story(request_id, found)


def visible_story(request_id: uuid.UUID, tenants: QuerySet[Tenant], now: datetime) -> Story | None:
    """The story of a request of one of these tenants; None for another's and for one that nothing is known of."""
    story = tell(request_id, now=now)
    known = story is not None and story.tenant is not None and tenants.filter(pk=story.tenant.pk).exists()
    return story if known else None


def as_json(story: Story) -> dict[str, Any]:
    """For REST: how it ended or why it was refused, with the checks of its admission."""
    return {
        "request_id": str(story.request_id),
        "state": "refused" if story.decision == "reject" else "ended" if story.attempts else "admitted",
        "sentence": story.sentence,
        "tenant": story.tenant.slug if story.tenant else None,
        "pool": story.pool,
        "decision": story.decision or None,
        "reason": story.reason or None,
        "checks": [
            {"name": check.name, "value": check.value, "limit": check.limit, "held": check.held}
            for check in story.checks
        ],
        "attempts": [
            {"number": one.number, "outcome": one.outcome, "status": one.status, "charged": one.charged}
            for one in story.attempts
        ],
        "charge_nanos": story.charge_nanos,
    }


def _story(request_id: uuid.UUID, found: RequestStory) -> Story:
    records, sample = found.records, found.sample
    said = records[-1] if records else sample
    assert said is not None, "something is known of the request"
    names = _Names(said)
    rows, total_us = _timeline(records)
    outcome = str(BY_CODE.get(records[-1].outcome, "unknown")) if records else ""
    refused = str(BY_CODE.get(sample.reason, "")) if sample is not None and sample.decision == "reject" else ""
    return Story(
        request_id=request_id,
        tenant=names.tenant,
        facts=_facts(records, sample, names),
        sentence=_sentence(records, rows, total_us, refused),
        rows=rows,
        total_us=total_us,
        axis=_axis(total_us),
        attempts=[_attempt(record, records[0].arrived_at, names) for record in records],
        checks=_checks(sample),
        decision="" if sample is None else sample.decision,
        decided=_decided(sample, names),
        charges=_charges(records),
        charge_nanos=sum(nanos for _, _, nanos in _charges(records)),
        identifiers=_identifiers(request_id, found, names),
        chip=_chip(outcome, refused),
        word=(refused or outcome or "Running").replace("_", " ").capitalize(),
        pool=names.pool,
        reason=refused or outcome,
        card=_card(records),
        class_slug=names.klass.slug if names.klass else "",
        ended_at=records[-1].ended_at if records else None,
    )


def _card(records: list[UsageRecord]) -> RateCard | None:
    """The version of the rates that the request was charged at, as it stood then."""
    version = records[-1].rate_version if records else 0
    return rate_cards([version]).get(version) if version else None


class _Names:
    """Ids of one record or sample as names; a row that is gone is its number."""

    def __init__(self, said: UsageRecord | DecisionSample) -> None:
        self.tenant = Tenant.objects.filter(pk=said.tenant_id).first()
        self.klass = WorkloadClass.objects.filter(pk=said.class_id).first()
        pool = Pool.objects.filter(pk=said.pool_id).first()
        self.pool = pool.slug if pool else ""
        key = ApiKey.objects.filter(pk=said.key_id).first()
        self.key = f"{key.name} ({key.public_id})" if key else str(said.key_id)
        self.slots = dict(Slot.objects.filter(pool_id=said.pool_id).values_list("pk", "name"))
        self.agents = dict(Agent.objects.filter(pool_id=said.pool_id).values_list("pk", "name"))
        model_id = getattr(said, "model_id", None)
        self.model = (
            ServedModel.objects.filter(pk=model_id).values_list("name", flat=True).first() if model_id else None
        )


def _chip(outcome: str, refused: str) -> str:
    if refused:
        return "bad"
    if not outcome:
        return "unknown"
    return {Outcome.COMPLETED: "ok", Outcome.CANCELLED_BY_CLIENT: "neutral"}.get(outcome, "bad")  # type: ignore[call-overload]


def _timeline(records: list[UsageRecord]) -> tuple[list[Row], int | None]:
    if not records:
        return [], None
    first = records[0].arrived_at
    total_us = max(_since(record.ended_at, first) for record in records)
    total_us = max(total_us, *(sum(max(0, us) for us in _stages(record).values()) for record in records), 1)
    bars: dict[str, list[Bar]] = {stage: [] for stage in STAGES}
    sums: dict[str, int | None] = dict.fromkeys(STAGES)
    for number, record in enumerate(records):
        own = _stages(record)
        length = sum(max(0, us) for us in own.values())
        # An attempt's stages end when it ended; attempts after the first begin in the queue again.
        at = max(0, _since(record.ended_at, first) - length)
        failed = number < len(records) - 1
        for stage, us in own.items():
            if us < 0:
                continue
            sums[stage] = (sums[stage] or 0) + us
            if us:
                bars[stage].append(Bar(at / total_us, us / total_us, failed, f"{us / 1000:,.1f} ms"))
            at += us
    # What is not streamed has no first token: its engine time is one stage.
    together = not any(record.flags & FLAG_STREAMED for record in records)
    names = STAGE_NAMES | ({"prefill": STAGE_NAMES["upstream"]} if together else {})
    shown = [stage for stage in STAGES if not (together and stage == "decode" and not sums[stage])]
    rows = [Row(names[stage], f"fill-{STAGE_FILLS[stage]}", tuple(bars[stage]), sums[stage]) for stage in shown]
    return rows, total_us


def _since(at: datetime, first: datetime) -> int:
    return max(0, round((at - first).total_seconds() * 1_000_000))


def _stages(record: UsageRecord) -> dict[str, int]:
    return {stage: getattr(record, f"{stage.rstrip('_')}_us") for stage in STAGES}


def _axis(total_us: int | None) -> list[tuple[float, str]]:
    if not total_us:
        return []
    return [(part / 4, f"{total_us * part / 4 / 1000:,.0f} ms") for part in range(5)]


def _sentence(records: list[UsageRecord], rows: list[Row], total_us: int | None, refused: str) -> str:
    if refused:
        return f"Refused at admission: {refused.replace('_', ' ')}. Nothing ran."
    if not records or not total_us:
        return "Admitted. Its record has not arrived yet: it comes with a report of its agent after it ended."
    known = [row for row in rows if row.us is not None]
    worst = max(known, key=lambda row: row.us or 0)
    own_us = worst.us or 0
    text = f"{worst.name} took {own_us / 1000:,.1f} ms, {own_us / total_us:.0%} of its {total_us / 1000:,.1f} ms"
    if len(records) > 1:
        text += f"; {len(records) - 1} attempt{'s' if len(records) > 2 else ''} failed before the last"
    return text + "."


def _facts(records: list[UsageRecord], sample: DecisionSample | None, names: _Names) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = [
        {"label": "Tenant", "value": names.tenant.slug if names.tenant else None},
        {
            "label": "Class",
            "value": names.klass.slug if names.klass else None,
            "note": names.klass.kind if names.klass else "",
        },
    ]
    if not records:
        return facts
    last = records[-1]
    streamed = bool(last.flags & FLAG_STREAMED)
    ttft = f"{last.ttft_us / 1000:,.1f} ms" if streamed and last.ttft_us >= 0 else None
    tpot = None
    if streamed and last.output_tokens > 1 and last.decode_us >= 0:
        tpot = f"{last.decode_us / (last.output_tokens - 1) / 1000:,.1f} ms"
    return [
        *facts,
        {"label": "Model", "value": names.model},
        *_token_facts(last),
        {"label": "TTFT", "value": ttft, "note": "" if streamed else "not streamed"},
        {"label": "TPOT", "value": tpot},
        {"label": "Revision", "value": last.revision or None},
    ]


def _token_facts(last: UsageRecord) -> list[dict[str, Any]]:
    if last.flags & FLAG_TOKENLESS:
        return [{"label": name, "value": None, "note": "not made of tokens"} for name in ("Prompt", "Output")]
    return [
        {"label": "Prompt", "value": f"{last.prompt_tokens:,}", "note": f"tokens, {last.cached_tokens:,} cached"},
        {"label": "Output", "value": f"{last.output_tokens:,}", "note": "tokens"},
    ]


def _attempt(record: UsageRecord, first: datetime, names: _Names) -> Attempt:
    outcome = str(BY_CODE.get(record.outcome, f"outcome {record.outcome}"))
    return Attempt(
        number=record.attempt,
        slot=names.slots.get(record.slot_id, "—"),
        agent=names.agents.get(record.agent_id, str(record.agent_id)),
        start_us=max(0, _since(record.ended_at, first) - sum(max(0, us) for us in _stages(record).values())),
        end_us=_since(record.ended_at, first),
        gpu_us=record.gpu_us,
        output_tokens=None if record.flags & FLAG_TOKENLESS else record.output_tokens,
        outcome=outcome,
        grade=_chip(outcome, ""),
        status=record.status,
        charged=not record.flags & FLAG_NOT_CHARGED,
    )


def _checks(sample: DecisionSample | None) -> list[CheckRow]:
    told = [
        check if isinstance(check, list) else (check["name"], check["value"], check["limit"], check["held"])
        for check in (sample.checks if sample is not None else ())
    ]
    return check_rows((name, str(value), str(limit), held) for name, value, limit, held in told)


def _decided(sample: DecisionSample | None, names: _Names) -> str:
    if sample is None:
        return (
            "Its explanation was not kept: refusals are explained for the first hundred of a kind in a minute at each"
            " agent, admitted requests one in 256."
        )
    agent = names.agents.get(sample.agent_id, str(sample.agent_id))
    return f"Decided by agent {agent} at {sample.at:%H:%M:%S.%f}"[:-3] + " UTC."


def _charges(records: list[UsageRecord]) -> list[tuple[str, int, int]]:
    """(line, quantity, nanos) over the attempts that are charged."""
    paid = [record for record in records if not record.flags & FLAG_NOT_CHARGED]
    return [
        ("Prompt", sum(r.prompt_tokens - r.cached_tokens for r in paid), sum(r.charge_prompt_nanos for r in paid)),
        ("Prompt, cached", sum(r.cached_tokens for r in paid), sum(r.charge_cached_nanos for r in paid)),
        ("Output", sum(r.output_tokens for r in paid), sum(r.charge_output_nanos for r in paid)),
        ("GPU time, µs", sum(r.gpu_us for r in paid), sum(r.charge_gpu_nanos for r in paid)),
    ]


def _identifiers(request_id: uuid.UUID, found: RequestStory, names: _Names) -> list[dict[str, Any]]:
    records = found.records
    items: list[dict[str, Any]] = [
        {"label": "x-request-id", "value": str(request_id)},
        {"label": "API key", "value": names.key},
    ]
    if records:
        last = records[-1]
        items += [
            {"label": "x-client-request-id", "value": last.client_request_id or None},
            {"label": "Status", "value": last.status},
            {"label": "Rate card version", "value": last.rate_version or None},
            {
                "label": "Budget",
                "value": "outage slice: neither the control plane nor a lease was there"
                if last.flags & FLAG_OUTAGE
                else None,
            },
            {
                "label": "Charge",
                "value": "ends at what was reserved; the engine produced more" if last.flags & FLAG_CAPPED else None,
            },
            {"label": "Received", "value": _received(found)},
            {"label": "Tokens", "value": "estimated" if last.flags & FLAG_ESTIMATED else "counted by the engine"},
        ]
    return items


def _received(found: RequestStory) -> str:
    where = ", read from the archive of that day" if found.archived else ""
    return f"{found.records[-1].received_at:%Y-%m-%d %H:%M:%S} UTC{where}"
