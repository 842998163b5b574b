"""Nights of batch contracts on their pages: shares by the wall clock of the zone, missed jobs, who sees whose."""

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.contracts.nights import last_night, nights_of
from controlplane.core.slo import Verdict
from controlplane.fleet.models import Pool
from controlplane.jobs.models import Job
from controlplane.tenants.models import Tenant
from tests import factories

BERLIN = ZoneInfo("Europe/Berlin")
EVENING = datetime(2026, 11, 28, 19, 0, tzinfo=BERLIN)
DUE = datetime(2026, 11, 29, 6, 0, tzinfo=BERLIN)
MORNING = DUE + timedelta(hours=3)


def promise(contract: Contract, number: int = 1, **changes) -> ContractVersion:
    values = {
        "effective_from": datetime(2026, 1, 1, tzinfo=UTC), "objective": "deadline", "target_ppm": 750_000,
        "admitted_before": time(20), "finished_by": time(6), "first_attempt_within_s": 7_200, "zone": "Europe/Berlin",
        "created_by": "ada", "created_at": factories.NOW,
    }  # fmt: skip
    return ContractVersion.objects.create(contract=contract, number=number, **{**values, **changes})


@pytest.fixture
def contract(installation) -> Contract:
    bulk = factories.workload_class("bulk", "batch")
    row = Contract.objects.create(slug="nightly", name="Nightly", workload_class=bulk, created_at=factories.NOW)
    promise(row)
    return row


def job(
    contract: Contract, *, at=EVENING, done=None, begun=timedelta(minutes=5), due=DUE, tenant="acme", **values
) -> Job:
    owner = Tenant.objects.filter(slug=tenant).first() or factories.tenant(tenant)
    state = "running" if done is None else "completed"
    return Job.objects.create(
        **{"tenant": owner, "workload_class": contract.workload_class, "pool": pool_of(), "items": 10,
           "prompt_tokens": 1_000, "expected_output_tokens": 100, "created_by": "t", "created_at": at, "deadline": due,
           "state": state, "finished_at": done, "first_attempt_at": None if begun is None else at + begun, **values}
    )  # fmt: skip


def pool_of() -> Pool:
    return Pool.objects.first() or factories.pool()


def test_each_night_has_its_share_by_the_zones_wall_clock_newest_first(contract):
    for before in (0, 0, 0, 1):
        night = timedelta(days=before)
        job(contract, at=EVENING - night, done=DUE - night - timedelta(minutes=1), due=DUE - night)
    late = job(contract, done=DUE + timedelta(minutes=1))
    tonight, last, one_before, *_ = nights_of([contract], MORNING)[contract.pk]
    assert (tonight.result.jobs, tonight.word) == (0, "No jobs")
    assert last.due_at == DUE and last.due_text == "Sun 29 Nov, 06:00 CET" and last.hours == 10
    assert (last.result.jobs, last.result.finished_in_time, last.share, last.word) == (4, 3, 0.75, "Met")
    assert [row.job for row in last.missed] == [late] and last.missed[0].left_backlog_at is None
    assert (one_before.result.jobs, one_before.result.verdict) == (1, Verdict.MET)
    assert last_night([tonight, last, one_before]) is last


def test_the_night_on_which_clocks_change_is_an_hour_longer(contract):
    autumn = datetime(2026, 10, 25, 12, 0, tzinfo=BERLIN)
    long, usual = nights_of([contract], autumn)[contract.pk][1:3]
    assert (long.hours, long.due_text, usual.hours) == (11, "Sun 25 Oct, 06:00 CET", 10)


def test_missed_jobs_are_told_with_what_they_missed_and_since_when_they_ask_for_nothing(contract):
    still = job(contract, name="slow")
    waited = job(contract, done=DUE - timedelta(hours=1), begun=timedelta(hours=3))
    expired = job(contract, done=DUE - timedelta(hours=2), state="expired")
    for at, since in ((DUE + timedelta(minutes=29), None), (DUE + timedelta(minutes=30), DUE + timedelta(minutes=30))):
        night = last_night(nights_of([contract], at)[contract.pk])
        found = {row.job: row for row in night.missed}
        assert set(found) == {still, waited, expired} and night.grade == "bad"
        assert found[still].left_backlog_at == since and found[still].finished_late
        assert found[waited].waited_us == 3 * 3_600_000_000 and not found[waited].finished_late
        assert found[expired].finished_late and found[expired].waited_us is None


def test_a_night_is_judged_by_the_version_in_force_when_its_admission_closed(contract):
    strict = promise(contract, 2, effective_from=EVENING, target_ppm=900_000, finished_by=time(5))
    first, second, third = nights_of([contract], MORNING)[contract.pk][:3]
    assert (first.version, second.version) == (strict, strict) and second.due_text.startswith("Sun 29 Nov, 05:00")
    assert third.version.number == 1 and third.due_text == "Sat 28 Nov, 06:00 CET"


def test_latency_contracts_have_no_nights(contract):
    chat = factories.workload_class("chat")
    row = Contract.objects.create(slug="ttft", name="t", workload_class=chat, created_at=factories.NOW)
    promise(row, objective="latency")
    assert set(nights_of([contract, row], MORNING)) == {contract.pk}


def test_the_pages_show_nights_and_missed_jobs_and_a_tenant_its_own_only(contract, people):
    now = timezone.now().astimezone(BERLIN)
    Tenant.objects.filter(slug="acme").update(classes=["bulk"])
    ContractVersion.objects.update(
        admitted_before=(now - timedelta(hours=1)).time(), finished_by=(now - timedelta(minutes=1)).time()
    )
    night = {"at": now - timedelta(hours=2), "due": now - timedelta(minutes=45)}
    mine, other = job(contract, **night, name="mine"), job(contract, **night, tenant="other", name="others")
    url = reverse("contract", args=["nightly"])
    for person in ("admin", "viewer"):
        page = people[person].get(url).content.decode()
        assert "Last nights" in page and "Missed jobs" in page and "In no slack since" in page
        assert all(reverse("job", args=[row.uuid]) in page for row in (mine, other))
    page = people["tenant"].get(url).content.decode()
    assert reverse("job", args=[mine.uuid]) in page and str(other.uuid) not in page and "others" not in page
    listed = people["viewer"].get(reverse("contracts")).content.decode()
    assert "0.00" in listed and "of 2 jobs done, due" in listed
