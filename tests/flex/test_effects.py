"""Previews of recall, freeze and loans again: what they foretell is what the controller then measures."""

from __future__ import annotations

from datetime import datetime, timedelta
from math import ceil

import pytest
from django.urls import reverse

from controlplane.audit.models import AuditEntry
from controlplane.fleet.models import Slot
from controlplane.flex import effects
from controlplane.flex.models import Lend, PoolSample
from controlplane.jobs.listing import slack_at_deadlines
from controlplane.jobs.models import Job
from tests.flex.conftest import Band, SaidSlot, add_job


def lines(effect: effects.Effect) -> dict[str, tuple[str, ...]]:
    return {figure.label: figure.values for figure in effect.figures}


def slot(band: Band, name: str) -> Slot:
    return Slot.objects.select_related("pool").get(pk=band.slots[name].pk)


def test_a_recall_says_what_runs_there_when_it_is_home_and_what_is_left(busy: Band):
    busy.until_lent(2)
    busy.said["f1"] = SaidSlot(running_batch=3)
    busy.step()
    effect = effects.of_recall(slot(busy, "f1"), busy.now)
    found = lines(effect)
    assert found["Batch requests that run on it"] == ("3", "0")
    assert found["Their GPU time, estimated"] == ("3.00\N{NO-BREAK SPACE}s", "0")
    assert found["Slots that serve interactive"] == ("4", "5")
    assert found["Slots that serve batch"] == ("4", "3")
    assert found["Jobs that make their deadline at this pace"] == ("1 of 1", "1 of 1")
    home = busy.now + timedelta(seconds=1 + 6)
    assert dict(effect.instants)["Home at the latest"] == home
    assert "No drain of this pool has been measured yet." in effect.said
    (line,) = effect.jobs
    assert line.slacks == pytest.approx((0.375, 1 / 6), abs=0.01)


def test_what_a_recall_foretells_is_measured(busy: Band, people):
    busy.until_lent(2)
    effect = effects.of_recall(slot(busy, "f1"), busy.now)
    url = reverse("flex-recall", args=[busy.slots["f1"].pk])
    page = people["oncall"].get(url).content.decode()
    assert "Batch slack" in page and "Once it is home" in page and "Jobs it touches" in page
    answer = people["oncall"].post(url, {"reason": "paged", "next": "/pools/"})
    entry = AuditEntry.objects.filter(action="flex.recall").latest("id")
    assert answer.url == f"/acts/{entry.pk}/?next=%2Fpools%2F"
    assert entry.after["slack_expected"] == pytest.approx(effect.noted["slack_expected"], abs=0.01)
    waiting = people["viewer"].get(answer.url).content.decode()
    assert "hx-get" in waiting and "Recall of f1" in waiting and 'href="/pools/"' in waiting
    busy.waits_us = [20_000] * 20
    behind = entry.at - busy.now  # pages have the clock of this machine
    busy.step(40 + max(0, ceil(behind.total_seconds())))
    loan = Lend.objects.get(slot=busy.slots["f1"], fence=1)
    assert loan.recall_reason == "manual" and loan.home_at is not None
    told = people["viewer"].get(reverse("act", args=[entry.pk])).content.decode()
    assert "2.50\N{NO-BREAK SPACE}s" in told, "the drain that the agent measured"
    sample = PoolSample.objects.filter(at__gte=entry.at + timedelta(seconds=30)).order_by("at").first()
    assert f"{sample.slack:.3f}" in told
    (job,), (kept,) = Job.objects.all(), entry.after["jobs"]
    assert kept["slack_before"] == pytest.approx(effect.jobs[0].slacks[0], abs=0.01)
    assert "What came of the jobs" in told and reverse("job", args=[job.uuid]) in told
    assert "In time at this pace" in told and f"{kept['slack_before']:.3f}" in told


def test_later_recalls_know_how_long_drains_take(busy: Band):
    busy.until_lent(2)
    Lend.objects.filter(slot=busy.slots["f2"]).update(drain_us=2_100_000)
    effect = effects.of_recall(slot(busy, "f1"), busy.now)
    assert (
        "Of the last drains measured here (1) the median took 2.10\N{NO-BREAK SPACE}s and the longest" in effect.said[1]
    )
    assert effect.noted["home_expected_us"] == 2_100_000


def test_a_freeze_leaves_loans_and_shows_what_their_recall_would_cost(busy: Band):
    busy.until_lent(2)
    add_job(busy, gpu_s=15_000, due_in=timedelta(hours=2))
    effect = effects.of_freeze(slot(busy, "f1").pool, busy.now)
    found = lines(effect)
    assert effect.columns == ("Now", "Frozen", "Frozen and recalled")
    assert found["Slots lent"] == ("2", "2", "0")
    assert found["Slots that serve batch"] == ("4", "4", "2")
    assert found["Jobs that make their deadline at this pace"] == ("2 of 2", "2 of 2", "0 of 2")
    assert "Stays lent: f1, f2." in effect.said
    assert effect.jobs[0].slacks[-1] < 0 <= effect.jobs[0].slacks[0]


def named(band: Band, name: str, **values) -> Job:
    job = add_job(band, **values)
    Job.objects.filter(pk=job.pk).update(name=name)
    return job


def test_a_recall_names_the_jobs_it_delays_and_whose_deadline_it_costs(busy: Band, people):
    busy.until_lent(1)
    early = named(busy, "reports", gpu_s=3_000, due_in=timedelta(hours=1))
    tight = named(busy, "embeddings", gpu_s=15_000, due_in=timedelta(hours=2))
    hopeless = named(busy, "backfill", gpu_s=3_000_000, due_in=timedelta(hours=9))
    named(busy, "someday", gpu_s=100, due_in=None)
    effect = effects.of_recall(slot(busy, "f1"), busy.now)
    nightly = Job.objects.exclude(pk__in=[early.pk, tight.pk, hopeless.pk]).get(deadline__isnull=False)
    assert [line.room.job.pk for line in effect.jobs] == [early.pk, tight.pk, nightly.pk, hopeless.pk], "by deadline"
    assert [line.word for line in effect.jobs] == ["In time", "Would miss it", *["Misses it already"] * 2]
    assert "1 job in time now would miss its deadline: see below." in effect.said
    assert "1 job without a deadline waits longer." in effect.said
    first = effect.jobs[0]
    assert first.room.required == pytest.approx(3_000 / 3_600, abs=0.001)
    assert first.delay_us == pytest.approx(3_000e6 / 2 - 3_000e6 / 3, rel=0.001), "by two slots instead of three"
    url = reverse("flex-recall", args=[busy.slots["f1"].pk])
    page = people["viewer"].get(url).content.decode()
    for job, text in ((early, "reports"), (tight, "embeddings"), (hopeless, "backfill")):
        assert reverse("job", args=[job.uuid]) in page and text in page and job.tenant.slug in page
    assert page.count("Would miss it") == 1 and "Misses it already" in page
    noted = effect.noted["jobs"][1]
    assert (noted["job"], noted["becomes"]) == (str(tight.uuid), "misses")
    assert (noted["slack_before"], noted["slack_expected"]) == pytest.approx((1 - 2.5 / 3, 1 - 2.5 / 2), abs=0.001)
    done_at = datetime.fromisoformat(noted["done_expected"])
    assert abs(done_at - busy.now - timedelta(seconds=9_000)) < timedelta(seconds=2)
    assert "tight" not in str(effect.noted) and tight.tenant.slug not in str(effect.noted["jobs"]), "no names"


def test_of_many_jobs_those_that_would_miss_are_shown(busy: Band):
    busy.until_lent(1)
    for number in range(14):
        named(busy, f"small-{number}", gpu_s=1, due_in=timedelta(minutes=30 + number))
    late = named(busy, "late", gpu_s=15_000, due_in=timedelta(hours=2))
    effect = effects.of_recall(slot(busy, "f1"), busy.now)
    assert len(effect.jobs) == 10 and effect.jobs_more == 6
    assert next(line.room.job.pk for line in effect.jobs if line.becomes == "misses") == late.pk
    deadlines = [line.room.job.deadline for line in effect.jobs]
    assert deadlines == sorted(deadlines)


def test_loans_again_says_whether_one_follows_and_why_not(busy: Band):
    busy.step(1)
    pool = slot(busy, "f1").pool
    assert "under that limit at every tick for" in effects.of_unfreeze(pool, busy.now).said[0]
    found = lines(effects.of_unfreeze(pool, busy.now))
    assert found["Slots lent"] == ("0", "2") and found["Slots that serve batch"] == ("2", "4")


def test_an_agent_that_is_silent_makes_dashes_of_what_it_runs(busy: Band):
    busy.until_lent()
    found = lines(effects.of_recall(slot(busy, "f1"), busy.now + timedelta(minutes=1)))
    assert found["Batch requests that run on it"][0] == "—"
    assert found["Interactive load, limit 0.70"] == ("—", "—")


def test_the_list_of_jobs_and_the_pages_of_acts_say_the_same_slack_of_a_job(busy: Band):
    busy.until_lent(1)
    for number, gpu_s in enumerate((3_000, 15_000, 40_000)):
        named(busy, f"job {number}", gpu_s=gpu_s, due_in=timedelta(hours=1 + number))
    rooms = effects.of_freeze(busy.pool, busy.now).jobs
    listed = slack_at_deadlines([line.room.job for line in rooms], busy.now)
    assert len(rooms) == 4 and listed == {line.room.job.pk: line.slacks[0] for line in rooms}


def test_what_is_expected_of_an_act_by_rest_is_kept_as_that_of_a_page(busy: Band, people):
    busy.until_lent(2)
    named(busy, "reports", gpu_s=3_000, due_in=timedelta(hours=1))
    foretold = effects.of_recall(slot(busy, "f1"), busy.now).noted
    pool = f"/api/v1/flex/pools/{busy.pool.slug}/freeze/"

    def told(url: str, action: str, **body: object) -> dict:
        answer = people["oncall"].post(url, {"reason": "paged", **body}, content_type="application/json")
        assert answer.status_code == 200, answer.content
        return AuditEntry.objects.filter(action=action).latest("id").after

    recalled = told(f"/api/v1/flex/slots/{busy.slots['f1'].pk}/recall/", "flex.recall")
    assert foretold and recalled.keys() >= foretold.keys()
    assert recalled["slack_expected"] == pytest.approx(foretold["slack_expected"], abs=0.01)
    assert [row["job"] for row in recalled["jobs"]] == [row["job"] for row in foretold["jobs"]]
    frozen = told(pool, "flex.freeze", minutes=5)
    assert "slack_expected" in frozen and "jobs" not in frozen, "loans run on"
    assert "jobs" in told(pool, "flex.freeze", minutes=5, recall=True)
    assert told(pool, "flex.unfreeze", frozen=False).keys() >= effects.of_unfreeze(busy.pool, busy.now).noted.keys()
