"""What is known of a wave, read for its gates: answers, silence, and what contracts counted among its agents."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

from django.db.models import Sum

from controlplane.contracts.models import ContractVersion, ObjectiveMinute
from controlplane.core.period import to_us
from controlplane.core.slo import Objective, Population, Totals
from controlplane.core.wave_gates import ContractCounts, GateLimits, WaveFacts, WaveVerdict, judge_wave
from controlplane.fleet.models import Agent
from controlplane.policy.models import Delivery, Rollout, WatchedCount, Wave
from controlplane.policy.queries import SILENT_AFTER

# An agent that spoke when the wave was sent and has said nothing for this long has fallen silent.
FALLEN_SILENT_AFTER = timedelta(seconds=60)
EXPECTED_FROM = timedelta(hours=1)
PPM = 1_000_000


def limits_of(rollout: Rollout) -> GateLimits:
    return GateLimits(
        hold_us=rollout.hold_s * 1_000_000,
        timeout_us=rollout.gate_timeout_s * 1_000_000,
        refusals_most=rollout.refusals_most,
        refusals_most_percent=rollout.refusals_most_percent,
        silent_most=rollout.silent_most,
        burn_most=None if rollout.burn_most is None else Fraction(str(rollout.burn_most)),
    )


def verdict_of(rollout: Rollout, wave: Wave, now: datetime) -> WaveVerdict:
    """The gates of a wave that was sent, at `now`."""
    return judge_wave(limits_of(rollout), facts_of(rollout, wave, now), to_us(now))


def facts_of(rollout: Rollout, wave: Wave, now: datetime) -> WaveFacts:
    rows: list[Any] = list(
        Delivery.objects.filter(rollout=rollout, wave=wave.number)
        .order_by("agent__name")
        .values(
            "agent_id",
            "agent__name",
            "agent__pool_id",
            "agent__pool__slug",
            "state",
            "sent_at",
            "answered_at",
            "reason",
            "agent__live__reported_at",
        )
    )
    by_state = {state: [row for row in rows if row["state"] == state] for state in Delivery.State.values}
    silent = {row["agent_id"] for row in rows if _fell_silent(row, now)}
    if silent and not _fleet_speaks(now):
        silent = set()
    outstanding = [row for row in by_state["sent"] + by_state["pending"] if row["agent_id"] not in silent]
    answers = [row["answered_at"] for row in rows if row["answered_at"] is not None]
    refused = by_state["nacked"]
    return WaveFacts(
        agents=len(rows),
        acked=len(by_state["acked"]),
        refused=len(refused),
        silent=len(silent),
        unheard=sum(row["agent_id"] not in silent for row in by_state["timed_out"]),
        outstanding=len(outstanding),
        answered_us=None if outstanding else to_us(max(answers, default=wave.sent_at or now)),
        first_refusal=f"{refused[0]['agent__name']} says: {refused[0]['reason']}" if refused else "",
        contracts=_contracts(rollout, rows, wave, now),
    )


def _fell_silent(row: dict[str, Any], now: datetime) -> bool:
    """It spoke when the wave was sent, and it does not any more; what it had answered in between changes nothing."""
    reported, sent = row["agent__live__reported_at"], row["sent_at"]
    if reported is None or sent is None:
        return False
    return bool(reported >= sent - SILENT_AFTER and now - reported >= FALLEN_SILENT_AFTER)


def _fleet_speaks(now: datetime) -> bool:
    """Whether most agents are heard: when they are not, the silence is more likely ours than the revision's."""
    heard = list(
        Agent.objects.filter(state=Agent.State.ACTIVE, live__isnull=False).values_list("live__reported_at", flat=True)
    )
    return 2 * sum(now - at <= SILENT_AFTER for at in heard) >= len(heard)


def _contracts(rollout: Rollout, rows: list[Any], wave: Wave, now: datetime) -> tuple[ContractCounts, ...]:
    if rollout.burn_most is None or wave.sent_at is None:
        return ()
    pools = {row["agent__pool_id"]: row["agent__pool__slug"] for row in rows}
    versions = _promised(rollout, set(pools.values()), now)
    expected = _expected(versions, set(pools), wave.sent_at)
    counted = _counted(rollout, {row["agent_id"] for row in rows})
    found = []
    for version in versions:
        totals, bad = counted.get(version.pk, (Totals(), 0))
        objective = Objective(
            Fraction(version.target_ppm, PPM), Population(version.population), min_events=version.min_events
        )
        running = max(0, totals.offered - totals.good - totals.neutral - bad)
        found.append(ContractCounts(version.contract.slug, totals, running, objective, expected=version.pk in expected))
    return tuple(found)


def _promised(rollout: Rollout, pools: set[str], now: datetime) -> list[ContractVersion]:
    """Latency contracts in force now that the revision holds for these pools."""
    documents = rollout.revision.configuration["pools"]
    ids = {
        row["version_id"]
        for slug in pools
        for row in documents.get(slug, {}).get("contracts", [])
        if row["objective"] == ContractVersion.Objective.LATENCY
    }
    rows = ContractVersion.objects.filter(pk__in=ids, effective_from__lte=now).select_related("contract")
    newest: dict[int, ContractVersion] = {}
    for row in rows.order_by("contract__slug", "effective_from"):
        newest[row.contract_id] = row
    return list(newest.values())


def _expected(versions: Iterable[ContractVersion], pool_ids: set[int], sent_at: datetime) -> set[int]:
    """Versions with enough requests in these pools in the hour before the wave: of those silence is no good news."""
    least = {version.pk: version.min_events for version in versions}
    rows = (
        ObjectiveMinute.objects.filter(
            contract_version_id__in=least, pool_id__in=pool_ids, minute__gte=sent_at - EXPECTED_FROM, minute__lt=sent_at
        )
        .values_list("contract_version_id")
        .annotate(offered=Sum("offered"))
    )
    return {pk for pk, offered in rows if offered >= least[pk]}


def _counted(rollout: Rollout, agent_ids: set[int]) -> dict[int, tuple[Totals, int]]:
    rows = (
        WatchedCount.objects.filter(rollout=rollout, agent_id__in=agent_ids)
        .values_list("contract_version_id")
        .annotate(Sum("offered"), Sum("admitted"), Sum("successful"), Sum("good"), Sum("neutral"), Sum("bad"))
    )
    return {version: (Totals(*counts), bad) for version, *counts, bad in rows}
