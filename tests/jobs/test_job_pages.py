"""What people see and do on the pages of jobs: order, parked items, files, actions with their effect, uploads."""

from __future__ import annotations

import re
from datetime import timedelta
from io import BytesIO

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.fleet.models import AgentLive, Slot
from controlplane.flex.models import PoolSample
from controlplane.jobs import assembly, batch_import, storage
from controlplane.jobs.models import Batch, Job, JobProgress, StoredFile
from controlplane.tenants import key_actions
from controlplane.tenants.models import ApiKey, Tenant
from tests import factories
from tests.bodies import body_of
from tests.jobs import page_scene
from tests.jobs.batches import ADA, jsonl, line
from tests.jobs.page_scene import Scene, counted_job

STAFF = ("admin", "finance", "oncall", "viewer")


@pytest.fixture
def scene(db, settings, tmp_path) -> Scene:
    settings.JOB_STORAGE = str(tmp_path / "files")
    return page_scene.build(timezone.now())


@pytest.fixture
def people(scene):
    return factories.people()


def text(response) -> str:
    return response.content.decode()


def names(page: str) -> list[str]:
    return re.findall(r'<th scope="row"><a href="/jobs/[^"]+">([^<]+)</a>', page)


def ended(scene: Scene) -> Job:
    """The night's job with its files: every other item ran."""
    page_scene.settle(scene.night, range(24, 41), {}, timezone.now())
    batch = scene.night.batch
    assert assembly.begin(batch.pk, timezone.now()) and assembly.assemble(batch.pk, timezone.now())
    scene.night.refresh_from_db()
    return scene.night


# ---- the list ----


def test_who_needs_attention_comes_first(scene, people):
    shown = names(text(people["viewer"].get(reverse("jobs"))))
    due = Job.objects.filter(name__in=["embeddings", "nightly summaries"]).order_by("deadline")
    assert shown[:3] == ["evaluation of the week", *due.values_list("name", flat=True)]
    assert set(shown[4:]) == {"yesterday", "wrong input"}, "what ended comes last"


def test_pages_follow_one_another_without_a_gap_in_that_order(scene, people, monkeypatch):
    now = timezone.now()
    for number in range(70):
        counted_job(scene.world, now, name=f"n{number}", deadline=now + timedelta(hours=1 + number % 7))
    seen, address = [], reverse("jobs") + "?state=open"
    for _ in range(5):
        page = text(people["viewer"].get(address))
        seen += names(page)
        found = re.search(r'rel="next" href="([^"]+)"', page)
        if found is None:
            break
        address = reverse("jobs") + found[1].replace("&amp;", "&")
    assert len(seen) == len(set(seen)) == 74


def test_unknown_is_a_dash_and_zero_is_zero(scene, people):
    page = text(people["viewer"].get(reverse("jobs"), {"state": "running"}))
    row = next(part for part in page.split("<tr") if "embeddings" in part)
    assert "120,000" in row and "312" in row and "—" in row, "a job of a loop of its own has no parked items to count"
    best_effort = next(part for part in page.split("<tr") if "Best effort" in part)
    assert best_effort.count("—") >= 3 and "none" in best_effort


def test_slack_is_for_staff_and_counts_what_is_due_before(scene, people):
    page = text(people["viewer"].get(reverse("jobs")))
    assert "at its deadline" in page
    assert "at its deadline" not in text(people["tenant"].get(reverse("jobs")))


@pytest.mark.parametrize("name", ["state", "pool", "tenant", "class", "sort", "cursor"])
@pytest.mark.parametrize("value", ["\x00", "nonsense", "'", "9" * 2_000])
def test_whatever_a_filter_says_is_answered(scene, people, name, value):
    assert people["viewer"].get(reverse("jobs"), {name: value}).status_code in (200, 400)


@pytest.mark.parametrize("after", ["²", "٣", "-1", "", "2147483648", "0" * 12 + "9" * 30, "9" * 5_000])
def test_what_is_no_line_is_told_so(scene, people, after):
    page = people["viewer"].get(reverse("job", args=[scene.night.uuid]), {"after": after})
    rest = people["viewer"].get(f"/api/v1/jobs/{scene.night.uuid}/items", {"after": after})
    assert (page.status_code, rest.status_code) == (400, 400)
    assert "Write the number of a line" in page.content.decode() and list(rest.json()["errors"]) == ["after"]


def test_rows_are_renewed_alone_and_say_their_age(scene, people):
    page = text(people["viewer"].get(reverse("jobs"), headers={"hx-request": "true"}))
    assert page.lstrip().startswith('<tbody id="job-rows"') and "data-age=" in page and 'data-stale-after="35"' in page


def test_a_refused_file_stands_above_the_jobs_until_two_days_are_over(scene, people):
    batch = handed_over(people["tenant"], jsonl([line(1), "not json"]))
    assert "Refused" in text(people["tenant"].get(reverse("jobs")))
    assert "Refused" not in text(people["stranger"].get(reverse("jobs")))
    Batch.objects.filter(pk=batch.pk).update(created_at=timezone.now() - timedelta(days=3))
    assert "Refused" not in text(people["tenant"].get(reverse("jobs")))


# ---- one job ----


def test_the_page_has_the_line_the_strip_the_parked_items_and_the_facts(scene, people):
    page = text(people["viewer"].get(reverse("job", args=[scene.night.uuid])))
    assert "21 of 40 items are done" in page and "Slots were lent 2 times meanwhile" in page
    assert "context_length_exceeded: the prompt has 9,000 tokens" in page and "doc-8" in page
    assert "written as 06:00 Europe/Berlin" in page and "nightly summaries" in page and "ada" in page
    assert "still lent" in page and "Slack of the pool" in page


def test_a_member_sees_progress_and_reasons_and_nothing_of_the_pool(scene, people):
    page = text(people["tenant"].get(reverse("job", args=[scene.night.uuid])))
    assert "21 of 40 items are done" in page and "context_length_exceeded" in page
    for hidden in ("Slots were lent", "Slack of the pool", "What was done to it"):
        assert hidden not in page
    for own in ("Cancel job", "Retry parked", "Extend deadline"):
        assert own in page, "its own jobs it may act on"


def test_places_that_a_loop_of_its_own_keeps_taken_are_named(scene, people):
    tenant, url = scene.night.tenant, reverse("job", args=[scene.night.uuid])
    agent = factories.agent(scene.world.pool, "gpu-9")
    row = {"class_id": 2, "tenant_id": tenant.pk, "running": tenant.max_concurrency - 2, "depth": 2}
    live = AgentLive.objects.create(
        agent=agent, epoch=1, seq=1, reported_at=timezone.now(), figures={"tenants": [row, row | {"tenant_id": 0}]}
    )
    shown = text(people["tenant"].get(url))
    assert "All its places are taken" in shown and f"of {tenant.max_concurrency} allowed" in shown
    AgentLive.objects.filter(pk=live.pk).update(reported_at=timezone.now() - timedelta(minutes=5))
    silent = text(people["tenant"].get(url))
    assert "All its places are taken" not in silent and "<span data-value>—</span> of" in silent


def test_what_holds_a_job_back_is_named(scene, people):
    job, page = scene.night, reverse("job", args=[scene.night.uuid])
    assert "Its items wait." not in text(people["viewer"].get(page))
    key_actions.create_key(
        tenant_id=job.tenant.pk, name="n", classes=["bulk"], default_class="bulk", actor=ADA, now=timezone.now()
    )
    key = ApiKey.objects.latest("pk")
    Job.objects.filter(pk=job.pk).update(key=key)
    for row, said in (
        (job.tenant, "The tenant acme is suspended"),
        (job.workload_class, "The class bulk is suspended"),
        (key, "is revoked: cancel it"),
    ):
        kept = row.state
        type(row).objects.filter(pk=row.pk).update(state="revoked" if row is key else "suspended")
        assert said in text(people["viewer"].get(page))
        type(row).objects.filter(pk=row.pk).update(state=kept)
    assert "Its items wait." not in text(people["viewer"].get(page))


def test_jobs_that_go_first_are_counted_for_staff_and_named_for_a_member(scene, people):
    url, now = reverse("job", args=[scene.night.uuid]), timezone.now()
    said = "Jobs with an earlier deadline go first"
    assert said not in text(people["viewer"].get(url))
    for hours in (-1, 1):
        page_scene.counted_job(
            scene.world, now, name=f"due {hours}", items=500, items_completed=80, has_items=True, day=scene.night.day,
            deadline=scene.night.deadline + timedelta(hours=hours),
        )  # fmt: skip
    shown = text(people["viewer"].get(url))
    assert f"{said}: <span data-value>1</span> with 420 items left" in shown, "the later one waits for this one"
    own = text(people["tenant"].get(url))
    assert said in own and "420 items left" not in own
    Job.objects.filter(name="due -1").update(state=Job.State.CANCELLED)
    assert said not in text(people["viewer"].get(url))


def test_every_page_of_a_foreign_job_looks_like_none(scene, people):
    for name in ("job", "job-cancel", "job-retry", "job-extend"):
        answer = people["stranger"].get(reverse(name, args=[scene.night.uuid]))
        assert answer.status_code == 404, name
        assert people["stranger"].post(reverse(name, args=[scene.night.uuid])).status_code in (404, 405), name
    ended(scene)
    assert people["stranger"].get(reverse("job-file", args=[scene.night.uuid, "results"])).status_code == 404
    upload = reverse("job-upload", args=[scene.night.batch.uuid])
    assert people["stranger"].get(upload).status_code == 404


@pytest.mark.parametrize(("person", "statements"), [("viewer", 17), ("tenant", 9)])
def test_a_job_is_read_in_a_known_number_of_statements(
    scene, people, person, statements, django_assert_max_num_queries
):
    url = reverse("job", args=[scene.night.uuid])
    with django_assert_max_num_queries(statements):
        people[person].get(url)


def test_parked_items_are_paged_by_line(scene, people, monkeypatch):
    monkeypatch.setattr("controlplane.jobs.views.PARKED_PER_PAGE", 1)
    url = reverse("job", args=[scene.night.uuid])
    first = text(people["viewer"].get(url))
    assert "doc-3" in first and "doc-8" not in first and "after=3" in first
    second = text(people["viewer"].get(url, {"after": 3}))
    assert "doc-8" in second and "doc-3" not in second and "Later lines" not in second
    assert people["viewer"].get(url, {"after": "-1"}).status_code == 400
    assert people["viewer"].get(url, {"after": "9" * 30}).status_code == 400


def test_a_job_without_samples_lends_or_items_still_has_a_page(scene, people):
    JobProgress.objects.all().delete()
    Slot.objects.filter(band="flex").update(band="batch")
    bare = counted_job(scene.world, timezone.now(), deadline=None, created_at=timezone.now())
    page = text(people["viewer"].get(reverse("job", args=[bare.uuid])))
    assert "Its pool has no flex slots" in page and "Best effort" in page and "Parked items" not in page


# ---- files ----


@pytest.mark.parametrize("person", ["tenant", "viewer"])
def test_results_and_errors_are_downloaded_and_staff_is_noted(scene, people, person):
    job = ended(scene)
    results = people[person].get(reverse("job-file", args=[job.uuid, "results"]))
    errors = people[person].get(reverse("job-file", args=[job.uuid, "errors"]))
    lines = body_of(results).splitlines()
    assert len(lines) == 38 and b'"doc-1"' in lines[0]
    assert [part in body for body in [body_of(errors)] for part in (b'"doc-3"', b'"doc-8"')] == [True, True]
    assert results["Content-Disposition"].startswith("attachment") and results["Cache-Control"] == "private, no-store"
    assert AuditEntry.objects.filter(action="file.download").count() == (0 if person == "tenant" else 2)


def test_a_file_that_is_not_there_says_why_and_is_404(scene, people):
    url = reverse("job", args=[scene.night.uuid])
    assert "written when the job ends" in text(people["tenant"].get(url))
    assert people["tenant"].get(reverse("job-file", args=[scene.night.uuid, "results"])).status_code == 404
    job = ended(scene)
    assert people["tenant"].get(reverse("job-file", args=[job.uuid, "input"])).status_code == 404
    StoredFile.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert "no longer kept" in text(people["tenant"].get(url))
    assert people["tenant"].get(reverse("job-file", args=[job.uuid, "results"])).status_code == 404


def test_a_lost_file_is_told_from_a_store_that_does_not_answer(scene, people, settings, tmp_path):
    url = reverse("job-file", args=[ended(scene).uuid, "results"])
    (tmp_path / "no-folder").touch()
    settings.JOB_STORAGE = str(tmp_path / "no-folder" / "files")
    away = people["tenant"].get(url)
    assert (away.status_code, "the file is not lost" in away.content.decode()) == (503, True)
    settings.JOB_STORAGE = str(tmp_path / "emptied")
    lost = people["tenant"].get(url)
    assert (lost.status_code, lost.content.decode()) == (404, storage.LOST)


# ---- actions ----


def act(people, name: str, job: Job, person: str = "admin", **values):
    return people[person].post(reverse(name, args=[job.uuid]), values)


@pytest.mark.parametrize("name", ["job-cancel", "job-retry", "job-extend"])
def test_only_those_who_may_write_see_and_do_it(scene, people, name):
    url = reverse(name, args=[scene.night.uuid])
    for person, client in people.items():
        allowed = person in ("admin", "tenant")
        expected = 200 if allowed else {"anonymous": 302, "stranger": 404}.get(person, 403)
        assert client.get(url).status_code == expected, person
        if not allowed:
            assert client.post(url, {"reason": "x", "deadline": "06:00 UTC"}).status_code == expected, person
    scene.night.refresh_from_db()
    assert (scene.night.state, scene.night.items_parked) == ("running", 2)


@pytest.mark.parametrize("name", ["job-cancel", "job-retry"])
def test_without_a_reason_nothing_happens(scene, people, name):
    answer = act(people, name, scene.night, reason=" ")
    assert answer.status_code == 422 and "Enter a reason." in text(answer)
    scene.night.refresh_from_db()
    assert (scene.night.state, scene.night.items_parked) == ("running", 2)


def test_cancelling_shows_the_slack_before_and_is_noted_with_it(scene, people):
    Job.objects.filter(pk=scene.late.pk).update(deadline=timezone.now() + timedelta(hours=4))
    page = text(people["admin"].get(reverse("job-cancel", args=[scene.late.uuid])))
    assert "Slack = 1 − required / available" in page and "900" in page
    assert act(people, "job-cancel", scene.late, reason="wrong input").status_code == 302
    entry = AuditEntry.objects.get(action="job.cancel")
    assert entry.reason == "wrong input" and entry.after["slack_before"] < entry.after["slack_expected"] < 1
    shown = text(people["oncall"].get(reverse("job", args=[scene.late.uuid])))
    assert "What was done to it" in shown and "wrong input" in shown
    assert f"{entry.after['slack_expected']:.3f}" in shown


@pytest.mark.parametrize("name", ["job-cancel", "job-retry", "job-extend"])
def test_a_member_acts_on_its_own_jobs_and_sees_its_own_demand_only(scene, people, name):
    later = (scene.night.deadline + timedelta(hours=3)).isoformat()
    values = {"reason": "not needed", "deadline": later}
    url = reverse(name, args=[scene.night.uuid])
    page = text(people["tenant"].post(url, values) if name == "job-extend" else people["tenant"].get(url))
    assert "Slots that their deadlines ask for" in page and "What other tenants ask for is not shown" in page
    for hidden in ("Slack =", "Available, slots", "lent while slack"):
        assert hidden not in page
    if name != "job-extend":
        assert people["tenant"].post(url, values).status_code == 302
        entry = AuditEntry.objects.filter(noun="job", object_id=str(scene.night.uuid)).latest("id")
        assert entry.actor_role == "tenant" and "slack_expected" in entry.after


def test_what_the_controller_measured_afterwards_stands_beside_what_was_expected(scene, people):
    act(people, "job-cancel", scene.loop, reason="given up")
    at = AuditEntry.objects.get(action="job.cancel").at
    for seconds, slack in ((5, 0.111), (40, 0.777), (70, 0.888)):
        PoolSample.objects.create(pool=scene.world.pool, at=at + timedelta(seconds=seconds), slack=slack)
    page = text(people["viewer"].get(reverse("job", args=[scene.loop.uuid])))
    assert "0.777" in page and "0.111" not in page and "0.888" not in page


def test_parked_items_are_tried_again(scene, people):
    page = text(people["admin"].get(reverse("job-retry", args=[scene.night.uuid])))
    assert "2 parked items become leasable again" in page
    act(people, "job-retry", scene.night, reason="the engine was mended")
    scene.night.refresh_from_db()
    assert (scene.night.items_parked, scene.night.state) == (0, "running")
    assert AuditEntry.objects.get(action="job.retry_parked").reason == "the engine was mended"


def test_a_deadline_is_extended_after_its_effect_was_shown(scene, people):
    later = (scene.night.deadline + timedelta(hours=3)).isoformat()
    shown = act(people, "job-extend", scene.night, deadline=later)
    page = text(shown)
    assert shown.status_code == 200 and "Enter a reason" not in page and "Slack = 1" in page
    assert act(people, "job-extend", scene.night, deadline=later, reason="agreed").status_code == 200, "not seen yet"
    seen = re.search(r'name="seen" value="([^"]+)"', page)
    assert seen is not None
    other = (scene.night.deadline + timedelta(hours=5)).isoformat()
    assert act(people, "job-extend", scene.night, deadline=other, seen=seen[1], reason="agreed").status_code == 200
    before = scene.night.deadline
    scene.night.refresh_from_db()
    assert scene.night.deadline == before
    assert act(people, "job-extend", scene.night, deadline=later, seen=seen[1]).status_code == 422
    assert act(people, "job-extend", scene.night, deadline=later, seen=seen[1], reason="agreed").status_code == 302
    scene.night.refresh_from_db()
    assert scene.night.deadline == before + timedelta(hours=3)
    assert AuditEntry.objects.get(action="job.extend_deadline").reason == "agreed"


@pytest.mark.parametrize(
    ("deadline", "said"),
    [
        ("", "Enter the new deadline."),
        ("tomorrow", "Write an instant with its offset"),
        ("2020-01-01T00:00:00Z", "The deadline has passed"),
        ("06:00 Nowhere/Land", "There is no time zone"),
        ("EARLIER", "Choose an instant after the present deadline"),
    ],
)
def test_a_deadline_that_cannot_be_is_refused_with_what_to_do(scene, people, deadline, said):
    deadline = (timezone.now() + timedelta(seconds=90)).isoformat() if deadline == "EARLIER" else deadline
    answer = act(people, "job-extend", scene.night, deadline=deadline, reason="x")
    assert answer.status_code == 422 and said in text(answer)


# ---- handing over a file ----


def post_file(client, content: bytes, **values):
    file = BytesIO(content)
    file.name = values.pop("filename", "night.jsonl")
    return client.post(reverse("job-new"), {"file": file, "endpoint": "/v1/chat/completions", **values})


def handed_over(client, content: bytes, **values) -> Batch:
    """The batch of a file that was taken, after its import."""
    answer = post_file(client, content, **values)
    assert answer.status_code == 302, text(answer)
    batch = Batch.objects.latest("id")
    assert answer.url == reverse("job-upload", args=[batch.uuid])
    assert "Being checked" in text(client.get(answer.url))
    batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    return batch


def test_a_member_hands_over_a_file_that_becomes_a_job(scene, people):
    batch = handed_over(people["tenant"], jsonl([line(n) for n in (1, 2, 3)]), name="letters", deadline="06:00 UTC")
    assert (batch.state, batch.tenant.slug, batch.created_by) == ("in_progress", "acme", "tenant")
    assert batch.metadata == {"name": "letters", "deadline": "06:00 UTC", "if_late": "refuse"}
    assert (batch.job.items, batch.job.name, batch.deadline.hour) == (3, "letters", 6)
    address = reverse("job", args=[batch.job.uuid])
    upload = reverse("job-upload", args=[batch.uuid])
    assert people["tenant"].get(upload).url == address
    assert people["tenant"].get(upload, headers={"hx-request": "true"})["HX-Redirect"] == address
    actions = set(AuditEntry.objects.filter(actor_name="tenant").values_list("action", flat=True))
    assert {"file.upload", "batch.submit"} <= actions


def test_bad_lines_are_listed_with_their_numbers(scene, people):
    batch = handed_over(people["tenant"], jsonl([line(1), "not json", line(3, url="/v1/embeddings")]))
    page = text(people["tenant"].get(reverse("job-upload", args=[batch.uuid])))
    assert batch.state == "failed" and "Refused" in page
    assert re.search(r'<th scope="row" class="num">2</th><td class="full">The line is not a JSON object', page)
    assert re.search(r'<th scope="row" class="num">3</th><td class="full">This batch is for /v1/chat/completions', page)


def test_a_deadline_that_cannot_be_met_is_no_fault_of_a_line(scene, people):
    soon = (timezone.now() + timedelta(seconds=100)).isoformat()
    many = jsonl([line(n, body={"max_tokens": 2_000}) for n in range(1, 400)])
    batch = handed_over(people["tenant"], many, deadline=soon)
    assert (batch.state, batch.job.admission["verdict"]) == ("failed", "refused")
    page = text(people["tenant"].get(reverse("job-upload", args=[batch.uuid])))
    assert "The deadline cannot be met" in page and "Take it as best effort" in page and "Required, slots" in page
    assert "Correct these lines" not in page and "1 line." not in page
    of_job = text(people["tenant"].get(reverse("job", args=[batch.job.uuid])))
    assert "Refused" in of_job and reverse("job-upload", args=[batch.uuid]) in of_job and "Waiting" not in of_job


def test_what_is_wrong_with_the_order_stands_at_its_field_and_keeps_no_file(scene, people):
    answer = post_file(people["tenant"], jsonl([line(1)]), deadline="noon", name="kept")
    page = text(answer)
    assert answer.status_code == 422 and "Write an instant with its offset" in page and 'value="kept"' in page
    assert not StoredFile.objects.filter(filename="night.jsonl", deleted_at=None, purpose="batch", created_by="tenant")
    both = post_file(people["tenant"], jsonl([line(1)]), deadline="06:00 UTC", best_effort="on")
    assert "A best-effort batch has no deadline" in text(both)
    assert [list(each.context["form"].errors) for each in (answer, both)] == [["deadline"], ["deadline"]]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(scene, people, content):
    answer = post_file(people["tenant"], content)
    assert answer.status_code == 422 and "The file holds no request" in text(answer)


def test_a_file_over_the_forms_limit_is_sent_to_the_client(scene, people, monkeypatch):
    monkeypatch.setattr("controlplane.jobs.submit_views.PAGE_FILE_BYTES_MOST", 100)
    answer = post_file(people["tenant"], jsonl([line(1)]))
    assert answer.status_code == 422 and "Send it with the client." in text(answer)
    assert not StoredFile.objects.filter(created_by="tenant").exists()


def test_staff_names_a_tenant_and_only_an_admin_may(scene, people):
    before = Batch.objects.count()
    for person in ("finance", "oncall", "viewer"):
        assert post_file(people[person], jsonl([line(1)]), tenant="acme").status_code == 403
    assert "Write whose job it is." in text(post_file(people["admin"], jsonl([line(1)])))
    assert "nobody is no tenant to choose" in text(post_file(people["admin"], jsonl([line(1)]), tenant="nobody"))
    Tenant.objects.filter(slug="stranger").update(state="suspended")
    assert "stranger is suspended" in text(post_file(people["admin"], jsonl([line(1)]), tenant="stranger"))
    assert Batch.objects.count() == before
    batch = handed_over(people["admin"], jsonl([line(1)]), tenant="acme")
    assert (batch.tenant.slug, batch.created_by) == ("acme", "admin")


def test_the_form_asks_for_a_tenant_by_suggestions_and_not_by_a_menu_of_all(
    scene, people, django_assert_max_num_queries
):
    for number in range(40):
        factories.tenant(f"many-{number:02}")
    with django_assert_max_num_queries(9):
        page = text(people["admin"].get(reverse("job-new")))
    assert "many-25" in page and "many-35" not in page and "/tenant-names/" in page
    assert "many-25" not in text(people["tenant"].get(reverse("job-new")))


def test_a_member_cannot_name_another_tenant_and_a_suspended_one_hands_over_nothing(scene, people):
    batch = handed_over(people["tenant"], jsonl([line(1)]), tenant="stranger")
    assert batch.tenant.slug == "acme"
    Tenant.objects.filter(slug="acme").update(state="suspended")
    assert "No tenant can submit" in text(people["tenant"].get(reverse("job-new")))
    assert post_file(people["tenant"], jsonl([line(1)])).status_code == 200
    assert Batch.objects.count() == 2
