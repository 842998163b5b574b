"""Pages and REST by role."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.fleet.models import Pool
from controlplane.flex import queries
from controlplane.flex.models import Decision, Lend
from tests.flex.conftest import Band

STAFF = ("admin", "finance", "oncall", "viewer")
RESPONDERS = ("admin", "oncall")


def test_pages_show_the_band_and_a_decision_with_every_check(busy: Band, people):
    busy.until_lent()
    busy.waits_us = [250_000] * 20
    busy.step(2)
    pool_url = reverse("flex-pool", args=[busy.pool.slug])
    decision = Lend.objects.get().lend_decision
    decision_url = reverse("flex-decision", args=[decision.pk])
    for role, client in people.items():
        expected = 200 if role in STAFF else 302 if role == "anonymous" else 403
        assert client.get(pool_url).status_code == expected, role
        assert client.get(decision_url).status_code == expected, role
    page = people["viewer"].get(decision_url).content.decode()
    for check in decision.checks:
        assert check["name"] in page
    assert "Lent f1 under fence 1" in page
    assert "the same way today" in page
    band_page = people["viewer"].get(pool_url, {"acts": "1"}).content.decode()
    assert "interactive queue wait" in band_page and "2,500" in band_page
    pool_page = reverse("pool", args=[busy.pool.slug])
    assert f'<nav class="crumbs" aria-label="Breadcrumb"><a href="{reverse("pools")}">Pools</a>' in band_page
    assert f'<a href="{pool_page}">{busy.pool.slug}</a></nav>' in band_page


def test_an_empty_band_says_what_it_is(band: Band, people):
    page = people["viewer"].get(reverse("flex-pool", args=[band.pool.slug]))
    assert b"Nothing was lent yet" in page.content and b"No decision yet" in page.content


def test_what_does_not_exist_is_404(people):
    client = people["admin"]
    assert client.get(reverse("flex-pool", args=["nowhere"])).status_code == 404
    assert client.get(reverse("flex-decision", args=[999_999])).status_code == 404
    assert client.post(reverse("flex-recall", args=[999_999]), {"reason": "x"}).status_code == 404


@pytest.mark.parametrize("name", ["flex-recall", "flex-freeze", "flex-unfreeze"])
def test_only_responders_act(busy: Band, people, name: str):
    busy.until_lent()
    url = reverse(name, args=[busy.slots["f1"].pk if name == "flex-recall" else busy.pool.slug])
    for role, client in people.items():
        assert client.get(url).status_code == (200 if role in STAFF else 302 if role == "anonymous" else 403), role
        empty = client.post(url, {"reason": ""}).status_code
        assert empty == (422 if role in RESPONDERS else 302 if role == "anonymous" else 403), role
    answer = people["oncall"].post(url, {"reason": "paged", "next": "/pools/?a=1"})
    entry = AuditEntry.objects.filter(action__startswith="flex.").order_by("-id").first()
    afterwards = "/pools/?a=1" if entry is None else f"/acts/{entry.pk}/?next=%2Fpools%2F%3Fa%3D1"
    assert (answer.status_code, answer.url) == (302, afterwards)
    foreign = people["oncall"].post(url, {"reason": "paged", "next": "https://example.org/"}).url
    assert foreign.startswith("/") and "example.org" not in foreign


def test_a_form_freezes_with_and_without_recall(busy: Band, people):
    busy.until_lent()
    url = reverse("flex-freeze", args=[busy.pool.slug])
    people["oncall"].post(url, {"reason": "paged", "minutes": "15"})
    pool = Pool.objects.get()
    assert pool.frozen_until - pool.frozen_since == timedelta(minutes=15)
    assert not busy.grant("f1").manual_recall
    people["oncall"].post(url, {"reason": "worse", "recall": "on"})
    assert busy.grant("f1").manual_recall
    people["oncall"].post(reverse("flex-unfreeze", args=[busy.pool.slug]), {"reason": "over"})
    assert Pool.objects.get().frozen_since is None


def test_a_recall_of_a_slot_at_home_says_so(busy: Band, people):
    busy.step(1)
    answer = people["oncall"].post(reverse("flex-recall", args=[busy.slots["f1"].pk]), {"reason": "x"})
    assert answer.status_code == 422 and b"there is nothing to recall" in answer.content


def test_rest_lists_and_acts(busy: Band, people):
    busy.until_lent()
    viewer, oncall = people["viewer"], people["oncall"]

    def post(client, url: str, body: dict):
        return client.post(url, body, content_type="application/json")

    decisions = viewer.get("/api/v1/flex/decisions/", {"pool": busy.pool.slug, "acts": "true"}).json()["results"]
    assert [row["actions"][0]["kind"] for row in decisions] == ["lend"]
    detail = viewer.get(f"/api/v1/flex/decisions/{decisions[0]['id']}/").json()
    assert detail["recomputes"] is True and len(detail["checks"]) == len(Decision.objects.latest("id").checks)
    slots = viewer.get("/api/v1/flex/slots/", {"pool": busy.pool.slug}).json()["results"]
    assert [(row["name"], row["state"], row["fence"]) for row in slots] == [("f1", "lent", 1), ("f2", "home", 0)]
    slot_url = f"/api/v1/flex/slots/{slots[0]['id']}/"
    assert post(viewer, f"{slot_url}recall/", {"reason": "x"}).status_code == 403
    assert post(oncall, f"{slot_url}recall/", {}).status_code == 400
    assert post(oncall, f"{slot_url}recall/", {"reason": "x"}).json()["manual_recall"] is True
    refused = post(oncall, f"/api/v1/flex/slots/{slots[1]['id']}/recall/", {"reason": "x"})
    assert refused.status_code == 400 and "not lent" in str(refused.json())
    assert post(oncall, f"{slot_url}freeze/", {"reason": "x", "minutes": 5}).json()["frozen_by"] == "oncall"
    thawed = post(oncall, f"/api/v1/flex/pools/{busy.pool.slug}/freeze/", {"reason": "x", "frozen": False})
    assert thawed.json()["frozen_since"] is None
    assert people["tenant"].get("/api/v1/flex/decisions/").status_code == 403


def test_the_strip_tiles_the_window(busy: Band):
    busy.until_lent()
    busy.waits_us = [250_000] * 20
    busy.step(3)
    since = busy.now - timedelta(minutes=2)
    strip = queries.strip(busy.pool.pk, since, busy.now)
    assert [lane.name for lane in strip.lanes] == ["i1", "i2", "i3", "i4", "f1", "f2", "b1", "b2"]
    for lane in strip.lanes:
        assert lane.spans[0].started_at == since
        for before, after in zip(lane.spans, lane.spans[1:], strict=False):
            assert before.ended_at == after.started_at
        assert lane.spans[-1].ended_at is None
    assert [span.state for span in strip.lanes[4].spans] == ["home", "lent", "draining", "home"]
    assert [(loan.slot, loan.recall_reason) for loan in strip.loans] == [("f1", "interactive_p95")]


def test_the_week_finds_a_slot_that_has_settled(busy: Band):
    busy.until_lent()
    review = queries.week_review(busy.pool, busy.now + timedelta(days=8))
    assert review.found.settled_with_batch == ("f1",)
    assert review.found.settled_with_interactive == ("f2",)
    assert review.week.queue_p99_us is None
    assert review.week.lends == 0


def test_the_band_now_in_few_queries(busy: Band, django_assert_max_num_queries):
    busy.until_lent()
    with django_assert_max_num_queries(2):
        band = queries.band(busy.pool.pk)
    lent = next(slot for slot in band if slot.name == "f1")
    assert (lent.state, lent.owner_class, lent.fence, lent.reason) == ("lent", "bulk", 1, "lend")


def test_each_loan_shows_its_measured_way_home(busy: Band, people):
    busy.until_lent()
    busy.waits_us = [250_000] * 20
    busy.step(2)
    Lend.objects.update(lent_at=timezone.now() - timedelta(minutes=1))  # the band's clock runs ahead of the page's
    loan = Lend.objects.get()
    page = people["viewer"].get(reverse("flex-pool", args=[busy.pool.slug])).content.decode()
    assert "1,700" in page and "2,500" in page and "<dd>1 of 1</dd>" in page
    recalled = people["viewer"].get(reverse("flex-decision", args=[loan.recall_decision_id])).content.decode()
    assert "Its loans" in recalled and "1,700" in recalled and "2,500" in recalled
    (row,) = people["viewer"].get("/api/v1/flex/loans/", {"pool": busy.pool.slug}).json()["results"]
    assert (row["slot"], row["fence"], row["drain_us"], row["overdue"]) == ("f1", 1, 2_500_000, False)
    assert row["stop_admit_at"] < row["last_token_at"] < row["drained_at"]
    assert people["viewer"].get("/api/v1/flex/loans/", {"pool": "nowhere"}).json()["results"] == []
    Lend.objects.update(overdue=True)
    page = people["viewer"].get(reverse("flex-pool", args=[busy.pool.slug])).content.decode()
    assert "f1 under fence 1 (overdue)" in page
