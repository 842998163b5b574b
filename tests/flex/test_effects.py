"""Previews of recall, freeze and loans again: what they foretell is what the controller then measures."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse

from controlplane.audit.models import AuditEntry
from controlplane.fleet.models import Slot
from controlplane.flex import effects
from controlplane.flex.models import Lend, PoolSample
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
    assert "Batch slack" in page and "Once it is home" in page and "Slack of each job" in page
    answer = people["oncall"].post(url, {"reason": "paged", "next": "/pools/"})
    entry = AuditEntry.objects.filter(action="flex.recall").latest("id")
    assert answer.url == f"/acts/{entry.pk}/?next=%2Fpools%2F"
    assert entry.after["slack_expected"] == pytest.approx(effect.noted["slack_expected"], abs=0.01)
    waiting = people["viewer"].get(answer.url).content.decode()
    assert "hx-get" in waiting and "Recall of f1" in waiting and 'href="/pools/"' in waiting
    busy.waits_us = [20_000] * 20
    busy.step(40)
    loan = Lend.objects.get(slot=busy.slots["f1"], fence=1)
    assert loan.recall_reason == "manual" and loan.home_at is not None
    told = people["viewer"].get(reverse("act", args=[entry.pk])).content.decode()
    assert "2.50\N{NO-BREAK SPACE}s" in told, "the drain that the agent measured"
    sample = PoolSample.objects.filter(at__gte=entry.at + timedelta(seconds=30)).order_by("at").first()
    assert f"{sample.slack:.3f}" in told


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
