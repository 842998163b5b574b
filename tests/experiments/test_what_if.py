"""A pool's own traffic under the policy in force and under a proposed one."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from controlplane.experiments.recorded import NothingRecorded, fitted, policy_in_force, recorded
from controlplane.experiments.what_if import what_if
from controlplane.lab.service import Constants
from controlplane.usage.models import UsageRecord
from tests.experiments.conftest import HELD_US, ITEMS, REQUESTS

HALF_HOUR = timedelta(minutes=30)


def test_the_load_is_what_was_recorded_and_the_service_model_fits_it(served, until):
    document = policy_in_force(served.pool)
    found = recorded(served.pool, document, until - HALF_HOUR, until)
    assert len(found.load.workload) == REQUESTS and found.unknown == 0
    assert found.load.workload.at_us == sorted(found.load.workload.at_us)
    assert [len(job.prompts) for job in found.load.jobs] == [ITEMS]
    assert found.load.jobs[0].deadline_us == 90 * 60_000_000 and found.load.jobs[0].submitted_us == 5 * 60_000_000
    assert found.service == Constants(HELD_US, 50, 4_000)


def test_a_what_if_compares_the_policy_in_force_with_the_proposed_one(served, until):
    answer = what_if(
        served.pool, {"classes.chat.max_prompt_tokens": 1_000}, since=until - HALF_HOUR, until=until, objective_ms=700
    )
    long = UsageRecord.objects.filter(prompt_tokens__gt=1_000, job_id=0).count()
    refused = next(row for row in answer["effects"] if row["of"] == "class chat" and row["figure"] == "refused")
    assert 0 < long == refused["change"] == answer["against"]["result"]["classes"]["chat"]["refused"]["prompt_too_long"]
    assert answer["result"]["jobs"][0]["done"] == ITEMS and answer["result"]["jobs"][0]["deadline_met"] is True
    assert answer["revision"] == policy_in_force(served.pool).revision


def test_the_command_asks_of_a_pool(served, until):
    out = StringIO()
    call_command(
        "lab", "replay", "--pool", served.pool.slug, "--until", until.isoformat(), "--minutes", "30", "--propose",
        "pool.isolation=shared", "--json", stdout=out,
    )  # fmt: skip
    assert json.loads(out.getvalue())["against"]["set"] == {"pool.isolation": "shared"}


def test_a_window_without_usage_and_a_pool_that_is_not_there_are_said(served, until):
    document = policy_in_force(served.pool)
    with pytest.raises(NothingRecorded, match="no usage between"):
        recorded(served.pool, document, until - timedelta(days=30), until - timedelta(days=29))
    with pytest.raises(NothingRecorded, match="a service model needs 50"):
        fitted([])
    with pytest.raises(CommandError, match="there is no pool nowhere"):
        call_command("lab", "replay", "--pool", "nowhere")
    with pytest.raises(CommandError, match="--until needs a zone"):
        call_command("lab", "replay", "--pool", served.pool.slug, "--until", "2026-10-31T22:00:00")


def test_a_fit_never_gives_a_negative_time():
    rows = [(None, 1, 1, 0, 1, 100 + at, 50, 900_000 - 10 * at, 5_000_000, 1) for at in range(80)]
    service = fitted(rows)
    assert service.base_us > 0 and service.prompt_us == 0 and service.output_us == 100_000
    whole = [
        (None, 1, 1, 0, 1, 10 * at, 7 * at % 50, 5_000 + 300 * at + 2_000 * (7 * at % 50), 0, -1) for at in range(90)
    ]
    assert fitted(whole) == Constants(5_000, 30, 2_000)
