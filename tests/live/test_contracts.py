"""Contracts from exact counts: populations, out of range, unknown, still running, burn, budget, the `slo` command."""

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.urls import reverse

from controlplane.contracts.queries import standings
from controlplane.core.slo import Population, UnknownReason, Verdict
from controlplane.live import contracts
from tests import factories
from tests.live.scene import contract_row, objective
from tests.live.test_pages import person

pytestmark = pytest.mark.django_db


@pytest.fixture
def pool(installation):
    return factories.pool()


@pytest.fixture
def chat(pool):
    return factories.workload_class()


def judged(row, now):
    return contracts.evaluate(standings([row], now), now)[row.pk]


def test_the_worked_example_three_populations_side_by_side(pool, chat, now):
    row, version = contract_row("chat", chat, now, threshold_ms=700, load_limit_per_s=18.0)
    old = now - timedelta(minutes=10)
    for number in range(10):
        objective(
            version, pool, old + timedelta(seconds=number * 30), 1_000, 0, admitted=980, successful=970, good=965,
            causes={"rejected": 20, "timed_out": 10, "slow": 5},
        )  # fmt: skip
    found = judged(row, now)
    shares = {name: float(found.result.populations[name].compliance) for name in Population}
    assert shares["successful"] == pytest.approx(0.994845, abs=1e-6)
    assert shares["offered"] == pytest.approx(0.965)
    assert shares["admitted"] == pytest.approx(9_650 / 9_800)
    assert found.result.verdict is Verdict.MISSED
    assert float(found.own.burn_rate) == pytest.approx(3.5)
    assert found.bad_by_cause == {"rejected": 200, "timed_out": 100, "slow": 50}


def test_minutes_above_the_load_range_leave_the_verdict_and_are_counted(pool, chat, now):
    row, version = contract_row("chat", chat, now, load_limit_per_s=10.0)
    objective(version, pool, now - timedelta(minutes=8), 500, 0)
    objective(version, pool, now - timedelta(minutes=7), 900, 400)
    found = judged(row, now)
    assert found.result.verdict is Verdict.MET
    assert (found.window.minutes_in_range, found.window.minutes_out_of_range, found.window.offered_out_of_range) == (
        1,
        1,
        900,
    )


def test_load_is_the_class_rate_in_the_pool_not_the_tenants(pool, chat, now):
    _, everyone = contract_row("chat", chat, now)
    acme = factories.tenant("acme")
    row, version = contract_row("chat-acme", chat, now, tenant=acme, load_limit_per_s=10.0)
    objective(everyone, pool, now - timedelta(minutes=8), 900, 0)
    objective(version, pool, now - timedelta(minutes=8), 200, 100)
    assert judged(row, now).window.minutes_out_of_range == 1


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ([], UnknownReason.SILENCE),
        ([{"offered": 99, "bad": 0}], UnknownReason.FEW_DATA),
        ([{"offered": 500, "bad": 0, "good": 501}], UnknownReason.NONSENSE),
        ([{"offered": 500, "bad": 0}, {"offered": 10, "bad": 0, "successful": 11}], UnknownReason.NONSENSE),
    ],
)
def test_silence_few_data_and_nonsense_are_unknown_never_met(pool, chat, now, counts, reason):
    row, version = contract_row("chat", chat, now)
    for number, values in enumerate(counts):
        objective(version, pool, now - timedelta(minutes=8 - number), **values)
    found = judged(row, now)
    assert (found.result.verdict, found.result.unknown_reason, found.grade) == (Verdict.UNKNOWN, reason, "unknown")


def test_requests_that_still_run_are_not_judged_yet_and_are_bad_when_they_never_end(pool, chat, now):
    row, version = contract_row("chat", chat, now)
    objective(version, pool, now - timedelta(minutes=1), 300, 0, good=150, successful=150)
    found = judged(row, now)
    assert (found.result.verdict, found.own.total, found.window.running) == (Verdict.MET, 150, 150)
    later = now + timedelta(minutes=7)
    found = judged(row, later)
    assert (found.result.verdict, found.own.total, found.window.running) == (Verdict.MISSED, 300, 0)


def test_a_constant_success_leaves_the_whole_budget(pool, chat, now):
    row, version = contract_row("chat", chat, now)
    for minutes in (9, 400, 4_000, 9_000):
        objective(version, pool, now - timedelta(minutes=minutes), 1_000, 0)
    assert judged(row, now).budget_left == 1


def test_a_page_needs_both_windows(pool, chat, now):
    row, version = contract_row("chat", chat, now)
    for minutes in range(7, 60):
        objective(version, pool, now - timedelta(minutes=minutes), 100, 30)
    over = judged(row, now)
    assert [state for state in over.firing if float(state.rule.factor) == 14.4] == []
    for minutes in range(1, 7):
        objective(version, pool, now - timedelta(minutes=minutes), 100, 30)
    burning = judged(row, now)
    assert {float(state.rule.factor) for state in burning.firing} >= {14.4}
    assert burning.grade == "bad"


def test_one_failure_in_thin_traffic_pages_nobody(pool, chat, now):
    row, version = contract_row("chat", chat, now)
    objective(version, pool, now - timedelta(minutes=2), 3, 1)
    found = judged(row, now)
    assert found.firing == () and found.grade != "bad"


def test_burn_series_has_gaps_where_nothing_was_counted(pool, chat, now):
    row, version = contract_row("chat", chat, now)
    objective(version, pool, now - timedelta(minutes=30), 100, 2)
    points = contracts.burn_series([version], now)[row.pk]
    known = [burn for _, burn in points if burn is not None]
    assert len(points) == 60 and len(known) == 5
    assert known == pytest.approx([2.0] * 5)


def command(*args):
    out = StringIO()
    call_command("slo", *args, stdout=out)
    return out.getvalue()


def test_the_command_judges_between_two_instants(pool, chat, now):
    _, version = contract_row("chat", chat, now)
    objective(version, pool, now - timedelta(minutes=30), 1_000, 5)
    objective(version, pool, now - timedelta(minutes=50), 1_000, 500)
    since, until = (now - timedelta(minutes=40)).isoformat(), now.isoformat()
    said = json.loads(command("--contract", "chat", "--from", since, "--to", until, "--json"))
    assert (said["verdict"], said["met"], said["populations"]["offered"]["total"]) == ("met", True, 1_000)
    low, high = said["populations"]["offered"]["interval"]
    assert low < 0.995 < high
    assert "chat version 1: met" in command("--contract", "chat", "--from", since, "--to", until)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--contract", "nothing"), "there is no contract"),
        (("--contract", "chat", "--from", "yesterday"), "is not a time"),
        (("--contract", "chat", "--from", "2026-11-29T21:00", "--to", "2026-11-29T20:00"), "must lie before"),
        (("--contract", "chat", "--to", "2020-01-01T00:00"), "no version"),
    ],
)
def test_unusable_arguments_end_with_2_and_say_what_is_wrong(pool, chat, now, args, word):
    contract_row("chat", chat, now)
    with pytest.raises(CommandError, match=word) as problem:
        command(*args)
    assert problem.value.returncode == 2


def test_rest_answers_by_role(scene):
    staff = person("viewer").get(reverse("api-slo-status")).json()
    assert {row["contract"] for row in staff["results"]} == {"chat-ttft", "chat-e2e", "embed-e2e"}
    assert {row["contract"]: row["verdict"] for row in staff["results"]}["chat-ttft"] == "missed"
    member = person("tenant", scene.globex, "g")
    assert {row["contract"] for row in member.get(reverse("api-slo-status")).json()["results"]} == {
        "chat-ttft",
        "chat-e2e",
    }
    assert member.get(reverse("api-alerts")).status_code == 403
    assert person("oncall").get(reverse("api-alerts")).status_code == 200
