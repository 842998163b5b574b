"""What came of the jobs that a recall was to delay: as they stand now, each beside what its page said before."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.auth.models import AnonymousUser
from django.urls import reverse

from controlplane.audit.models import AuditEntry
from controlplane.flex.models import Grant
from controlplane.jobs.models import Job
from controlplane.live import act_jobs
from controlplane.tenants.models import Member
from tests.factories import person


@pytest.fixture
def jobs(scene, moment) -> dict[str, Job]:
    """Jobs of the pool: by the pace of three batch slots `tight` is in time, by that of two it is not."""
    per_item = 1_000 * scene.pool.prefill_us_per_token + 200 * scene.pool.decode_us_per_token

    def add(name, tenant, *, gpu_s, due_in):
        return Job.objects.create(
            tenant=tenant, workload_class=scene.bulk, pool=scene.pool, name=name, items=round(gpu_s * 1e6 / per_item),
            prompt_tokens=1_000, expected_output_tokens=200, created_by="test", created_at=moment,
            deadline=moment + due_in,
        )  # fmt: skip

    return {
        "early": add("early", scene.acme, gpu_s=600, due_in=timedelta(hours=1)),
        "tight": add("tight", scene.globex, gpu_s=17_400, due_in=timedelta(hours=2)),
    }


@pytest.fixture
def entry(scene, jobs) -> AuditEntry:
    """The recall of f1, asked on its page."""
    url = reverse("flex-recall", args=[scene.slots["f1"].pk])
    client = person("oncall")
    page = client.get(url).content.decode()
    assert "1 job in time now would miss its deadline" in page and page.index("early") < page.index("tight")
    client.post(url, {"reason": "paged"})
    return AuditEntry.objects.filter(action="flex.recall").latest("id")


def came(entry, now, user=None):
    staff = user or Member.objects.filter(role="oncall").first().user
    return {one.job.name if one.job else None: one for one in act_jobs.jobs_of(entry, staff, now)}


def test_each_job_stands_there_with_its_room_before_expected_and_now(scene, jobs, entry, moment):
    found = came(entry, moment)
    assert list(found) == ["early", "tight"]
    tight = found["tight"]
    assert tight.slack_before == pytest.approx(1 - 2.5 / 3, abs=0.01)
    assert tight.slack_expected == pytest.approx(1 - 2.5 / 2, abs=0.01)
    assert (tight.expected, tight.word) == ("Would miss it", "In time at this pace"), "f1 is not home yet"
    Grant.objects.filter(slot=scene.slots["f1"]).update(state="home")
    found = came(entry, moment)
    assert found["tight"].slack_now == pytest.approx(1 - 2.5 / 2, abs=0.01)
    assert (found["tight"].grade, found["tight"].word) == ("risk", "Would miss it at this pace")
    assert (found["early"].grade, found["early"].word) == ("", "In time at this pace")


@pytest.mark.parametrize(
    ("state", "finished", "asked_at", "shown"),
    [
        ("completed", timedelta(hours=1), timedelta(hours=3), ("ok", "Done in time")),
        ("completed", timedelta(hours=2, seconds=1), timedelta(hours=3), ("bad", "Missed")),
        ("running", None, timedelta(hours=2, seconds=1), ("bad", "Missed")),
        ("cancelled", timedelta(hours=3), timedelta(hours=4), ("", "Cancelled")),
        ("expired", timedelta(hours=3), timedelta(hours=4), ("bad", "Ended undone, its time was over")),
    ],
)
def test_what_really_happened_is_told_of_each(jobs, entry, moment, state, finished, asked_at, shown):
    tight = jobs["tight"]
    Job.objects.filter(pk=tight.pk).update(state=state, finished_at=finished and moment + finished)
    one = came(entry, moment + asked_at)["tight"]
    assert (one.grade, one.word) == shown and one.slack_now is None
    assert one.done_at == (moment + finished if finished else None)


def test_a_job_that_counts_no_longer_is_no_good_news(jobs, entry, moment):
    Job.objects.filter(pk=jobs["early"].pk).update(items_completed=jobs["early"].items)
    one = came(entry, moment)["early"]
    assert (one.grade, one.word, one.slack_now) == ("unknown", "Not counted now", None)


def test_names_are_for_those_who_may_see_the_tenant(scene, jobs, entry, moment):
    person("tenant", tenant_row=scene.acme)
    own = Member.objects.get(role="tenant").user
    assert set(came(entry, moment, own)) == {"early", None}
    assert set(came(entry, moment, AnonymousUser())) == {None}
    page = person("viewer").get(reverse("act", args=[entry.pk])).content.decode()
    assert "What came of the jobs" in page and reverse("job", args=[jobs["tight"].uuid]) in page
    assert "globex" in page and "acme" in page


def test_acts_that_delay_no_job_have_no_such_table(scene, jobs, moment):
    client = person("oncall")
    client.post(reverse("flex-freeze", args=["chat-70b"]), {"reason": "x", "minutes": "60"})
    frozen = AuditEntry.objects.filter(action="flex.freeze").latest("id")
    assert came(frozen, moment) == {} and "jobs" not in frozen.after, "loans run on"
    client.post(reverse("flex-freeze", args=["chat-70b"]), {"reason": "x", "minutes": "60", "recall": "on"})
    recalled = AuditEntry.objects.filter(action="flex.freeze").latest("id")
    assert list(came(recalled, moment)) == ["early", "tight"]
