"""Batch contracts judged from jobs as they are: declared ones and those of rows, by the wall clock of the contract."""

from __future__ import annotations

import json
from datetime import datetime, time, timedelta
from io import StringIO
from zoneinfo import ZoneInfo

import pytest
from django.core.management import call_command

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.contracts.queries import standings
from controlplane.core.slo import Verdict
from controlplane.jobs import queries
from controlplane.jobs.models import Job
from controlplane.live import deadlines
from tests import factories

BERLIN = ZoneInfo("Europe/Berlin")
EVENING = datetime(2026, 11, 28, 19, 0, tzinfo=BERLIN)
DUE = datetime(2026, 11, 29, 6, 0, tzinfo=BERLIN)


@pytest.fixture
def contract(db):
    factories.installation()
    bulk = factories.workload_class("bulk", "batch")
    row = Contract.objects.create(slug="nightly", name="Nightly", workload_class=bulk, created_at=factories.NOW)
    ContractVersion.objects.create(
        contract=row, number=1, effective_from=EVENING - timedelta(days=30), objective="deadline", target_ppm=750_000,
        admitted_before=time(20), finished_by=time(6), first_attempt_within_s=7_200, zone="Europe/Berlin",
        created_by="ada", created_at=factories.NOW,
    )  # fmt: skip
    return row


def job(contract, *, done=None, begun=timedelta(minutes=5), state="completed", due=DUE, has_items=False, **values):
    pool = getattr(contract, "pool", None) or factories.pool()
    contract.pool = pool
    contract.acme = getattr(contract, "acme", None) or factories.tenant("acme")
    return Job.objects.create(
        tenant=contract.acme, workload_class=contract.workload_class, pool=pool, items=10, prompt_tokens=1_000,
        expected_output_tokens=100, created_by="t", created_at=EVENING, deadline=due, state=state, finished_at=done,
        first_attempt_at=None if begun is None else EVENING + begun, has_items=has_items,
        day=EVENING.date() if has_items else None, **values,
    )  # fmt: skip


def night(contract, now):
    return deadlines.evaluate(standings([contract], now), now)[contract.pk].result


def test_the_share_that_was_finished_by_the_wall_clock(contract):
    in_time = DUE - timedelta(minutes=1)
    job(contract, done=in_time)
    job(contract, done=in_time, has_items=True)
    job(contract, done=in_time)
    job(contract, done=DUE + timedelta(minutes=1), has_items=True)
    found = night(contract, DUE + timedelta(hours=1))
    assert (found.jobs, found.finished_in_time, found.verdict) == (4, 3, Verdict.MET)


def test_one_that_expired_is_not_finished(contract):
    job(contract, done=DUE - timedelta(hours=1), state="expired", has_items=True)
    job(contract, done=DUE - timedelta(hours=1))
    found = night(contract, DUE + timedelta(hours=1))
    assert (found.jobs, found.finished_in_time, found.verdict) == (2, 1, Verdict.MISSED)


def test_a_first_attempt_after_its_bound_is_a_miss_before_the_deadline(contract):
    job(contract, done=None, begun=None, state="running")
    assert night(contract, EVENING + timedelta(minutes=119)).verdict is Verdict.UNKNOWN
    late = night(contract, EVENING + timedelta(minutes=121))
    assert (late.waited_too_long, late.verdict) == (1, Verdict.MISSED)


def test_what_was_refused_cancelled_or_asked_for_no_deadline_was_not_promised(contract):
    job(contract, done=DUE, state="failed", has_items=True)
    job(contract, done=DUE, state="cancelled")
    job(contract, state="running", due=None)
    job(contract, state="importing", has_items=True)
    assert night(contract, DUE + timedelta(hours=1)).jobs == 0


def test_the_command_shows_the_night(contract):
    job(contract, done=DUE - timedelta(minutes=1), has_items=True)
    out = StringIO()
    call_command("slo", "--contract", "nightly", "--json", "--to", (DUE + timedelta(hours=1)).isoformat(), stdout=out)
    assert json.loads(out.getvalue())["verdict"] == "met", out.getvalue()


def test_a_missed_job_leaves_the_slack_after_its_grace_and_is_listed(contract):
    row = job(contract, state="running")
    pool = row.pool
    for minutes, counted in ((29, 1), (30, 0)):
        now = DUE + timedelta(minutes=minutes)
        assert len(queries.backlog(pool.pk, now)) == counted
        assert list(queries.missed(Job.objects.all(), now)) == [row]
