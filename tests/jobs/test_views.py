"""Pages of jobs: progress, the arithmetic, and only the own tenant's for its members."""

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.fleet.models import SlotInterval
from controlplane.jobs.models import Job
from controlplane.jobs.queries import pool_slack
from controlplane.tenants.models import Tenant
from tests import factories


def text(response) -> str:
    return response.content.decode()


@pytest.fixture
def pool(people):
    return factories.pool("chat", prefill_us_per_token=0, decode_us_per_token=1_000)


@pytest.fixture
def bulk(people):
    return factories.workload_class("bulk", "batch")


@pytest.fixture
def make(pool, bulk):
    def job(tenant="acme", **values):
        defaults = {
            "workload_class": bulk, "pool": pool, "name": f"night of {tenant}", "items": 1_000, "prompt_tokens": 1,
            "expected_output_tokens": 100, "deadline": timezone.now() + timedelta(hours=4), "created_by": "key",
            "created_at": timezone.now(),
        }  # fmt: skip
        return Job.objects.create(tenant=Tenant.objects.get(slug=tenant), **{**defaults, **values})

    return job


def test_a_members_list_holds_the_own_tenants_jobs_only(make, people):
    mine, theirs = make(), make("stranger")
    page = text(people["tenant"].get(reverse("jobs")))
    assert "night of acme" in page and "night of stranger" not in page
    assert people["tenant"].get(reverse("job", args=[theirs.uuid])).status_code == 404
    own = text(people["tenant"].get(reverse("job", args=[mine.uuid])))
    assert "Slack of the pool" not in own and "Cancel job" in own
    assert people["tenant"].post(reverse("job-cancel", args=[theirs.uuid])).status_code == 404


def test_the_page_shows_the_arithmetic_of_what_remains(make, people):
    job = make(items_completed=400, items_failed=100, gpu_us_done=400 * 36_000_000)
    page = text(people["viewer"].get(reverse("job", args=[job.uuid])))
    # 600 that have not completed: what failed is not done
    assert "600" in page and "36,000.0 ms" in page and "6\xa0h" in page and "of 1,000 items are done, 40 %" in page
    assert "Attempts that ended" in page and "500" in page and "of them failed" in page
    assert "what 400 completed ones took" in page


def test_slack_is_the_cores_over_slots_that_serve_batch_now(make, pool, people):
    for name, band in (("b1", "batch"), ("b2", "batch"), ("f1", "flex"), ("f2", "flex"), ("i1", "interactive")):
        slot = factories.slot(pool, name, band)
        state = "lent" if name == "f1" else "home"
        SlotInterval.objects.create(slot=slot, state=state, started_at=factories.NOW)
    now = timezone.now()
    # 36,000 GPU-s due in 4 h ask for 2.5 slots; with 3 that serve batch slack is 0.1667
    make(items=36_000, expected_output_tokens=1_000, prompt_tokens=0, deadline=now + timedelta(hours=4))
    slack = pool_slack(pool, now)
    assert (slack.required, slack.available) == (pytest.approx(2.5), 3)
    assert slack.slack == pytest.approx(1 / 6)
    page = text(people["viewer"].get(reverse("job", args=[Job.objects.get().uuid])))
    assert "Slack of the pool" in page


def test_a_missed_job_is_marked_and_found(make, people):
    make(name="late", deadline=timezone.now() - timedelta(minutes=10))
    make(name="in time")
    page = text(people["viewer"].get(reverse("jobs"), {"state": "missed"}))
    assert "late" in page and "in time" not in page and "Deadline missed" in page


def test_an_admin_cancels_with_a_reason(make, people):
    job = make()
    people["admin"].post(reverse("job-cancel", args=[job.uuid]), {"reason": "wrong input"})
    assert Job.objects.get().state == "cancelled"


@pytest.mark.parametrize(("person", "statements"), [("viewer", 13), ("tenant", 7)])
def test_the_list_needs_as_many_statements_for_one_as_for_twenty(
    make, people, django_assert_num_queries, person, statements
):
    for count in (1, 20):
        while Job.objects.count() < count:
            make()
        with django_assert_num_queries(statements):
            page = text(people[person].get(reverse("jobs")))
        assert page.count("night of acme") == count


def test_a_cursor_of_another_list_is_a_bad_request(make, people):
    assert people["viewer"].get(reverse("jobs") + "?cursor=nonsense").status_code == 400


def test_an_empty_list_says_how_to_declare_one(people):
    assert "Authorization: Bearer" in text(people["viewer"].get(reverse("jobs")))
