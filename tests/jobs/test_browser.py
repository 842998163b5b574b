"""What a person clicks on the pages of jobs, in a real Chromium, with the web process and a worker of its own."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from celery import current_app
from django.utils import timezone

from controlplane.exchange.database import close_pools
from controlplane.jobs.models import Batch, ItemHolder, Job
from tests.jobs import page_scene, page_site
from tests.jobs.batches import empty_items, jsonl, line
from tests.jobs.page_site import elsewhere, tab
from tests.jobs.settling import run_all
from tests.world import build_world

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.django_db(transaction=True)]

SIZES = [(320, "dark"), (390, "light"), (1280, "dark"), (1280, "light")]
UNNAMED = """[...document.querySelectorAll('input:not([type=hidden]), select, textarea, button, a[href]')].filter(e =>
  !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')
  && !e.textContent.trim()).map(e => e.outerHTML)"""
SMALL = """[...document.querySelectorAll('main button, main a.button, main select, main input:not([type=hidden])')]
  .filter(e => e.offsetParent && e.getBoundingClientRect().height < 24 && e.type !== 'checkbox')
  .map(e => e.outerHTML)"""


@pytest.fixture
def files(settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    empty_items()
    ItemHolder.objects.all().delete()
    return tmp_path


def until(page, holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s on {page.url}: {page.inner_text('main')}"
        page.wait_for_timeout(200)


def press(page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()
    page.wait_for_load_state()


def test_a_member_hands_over_files_and_takes_the_results(files: Path):
    world = build_world()
    page_site.empty_queue()
    member = page_site.session("tenant", world.tenant)
    bad, good = files / "bad.jsonl", files / "letters.jsonl"
    bad.write_bytes(jsonl([line(1), "not json"]))
    good.write_bytes(jsonl([line(n) for n in range(1, 7)]))
    with page_site.web() as address, page_site.worker(files / "worker.log"), page_site.chromium() as browser:
        page = tab(browser, address, member)
        page.goto("/jobs/")
        page.get_by_role("link", name="Submit a file").first.click()
        press(page, "Submit file")
        assert "Choose a file." in page.locator(".error-summary").inner_text()
        page.set_input_files("[name=file]", bad)
        press(page, "Submit file")
        until(page, lambda: page.locator("#refused").count() == 1)
        assert re.search(r"2\s+The line is not a JSON object", page.locator("#refused").inner_text())

        page.get_by_role("link", name="Submit a corrected file").click()
        page.set_input_files("[name=file]", good)
        page.fill("[name=deadline]", "06:00 Europe/Berlin")
        press(page, "Submit file")
        until(page, lambda: re.search(r"/jobs/[0-9a-f-]{36}/$", page.url) is not None)
        assert "of 6 items are done" in page.inner_text("#progress")
        assert "written as 06:00 Europe/Berlin" in page.inner_text("#deadline")

        elsewhere(lambda: (run_all(world, parked={4: "the prompt is too long"}), close_pools(), True)[-1])
        elsewhere(lambda: (current_app.send_task("jobs.sweep", ignore_result=True), True)[-1])
        ends = Batch.State.COMPLETED
        until(page, lambda: elsewhere(lambda: [Batch.objects.latest("id").state == ends])[0])
        page.reload()
        assert "doc-4" in page.inner_text("#parked") and "the prompt is too long" in page.inner_text("#parked")
        with page.expect_download() as taken:
            page.get_by_role("link", name="Results").click()
        lines = [json.loads(text) for text in Path(taken.value.path()).read_text().splitlines()]
        assert [row["custom_id"] for row in lines] == [f"doc-{n}" for n in (1, 2, 3, 5, 6)]
        with page.expect_download() as taken:
            page.get_by_role("link", name="Errors").click()
        (failed,) = [json.loads(text) for text in Path(taken.value.path()).read_text().splitlines()]
        assert (failed["custom_id"], failed["error"]["message"]) == ("doc-4", "the prompt is too long")
        assert [text for text in page.complaints if "status of 422" not in text] == [], "a refused form says 422"


def test_an_admin_acts_with_the_effect_in_sight(files: Path):
    scene = page_scene.build(timezone.now())
    Job.objects.filter(pk=scene.late.pk).update(state="cancelled", finished_at=timezone.now())
    admin, night, loop = page_site.session("admin"), f"/jobs/{scene.night.uuid}/", f"/jobs/{scene.loop.uuid}/"
    with page_site.web() as address, page_site.chromium() as browser:
        page = tab(browser, address, admin)
        page.goto(night)
        page.get_by_role("link", name="Retry parked items").click()
        assert "2 parked items become leasable again" in page.inner_text("#effect")
        page.fill("[name=reason]", "the engine was mended")
        press(page, "Retry parked items")
        assert "No item is parked" in page.inner_text("#parked")
        assert "the engine was mended" in page.inner_text("#acts")

        page.get_by_role("link", name="Extend deadline").click()
        page.fill("[name=deadline]", "2026-01-01T00:00:00Z")
        press(page, "Show effect")
        assert "The deadline has passed" in page.locator(".error-summary").inner_text()
        later = elsewhere(lambda: (scene.night.deadline + timedelta(hours=4)).isoformat())
        page.fill("[name=deadline]", later)
        press(page, "Show effect")
        assert page.locator(".error-summary").count() == 0
        slack = page.locator("#effect tr").filter(has_text="Slack").locator("td").all_inner_texts()
        assert len(slack) == 2 and float(slack[1]) >= float(slack[0])
        page.fill("[name=reason]", "agreed with the owner")
        press(page, "Extend deadline")
        assert "agreed with the owner" in page.inner_text("#acts")

        page.goto(loop)
        page.get_by_role("link", name="Cancel job").click()
        before, then = page.locator("#effect tr").filter(has_text="Slack").locator("td").all_inner_texts()
        assert float(then) > float(before)
        page.fill("[name=reason]", "wrong input")
        press(page, "Cancel job")
        assert "Cancelled" in page.inner_text("h1")
        assert [text for text in page.complaints if "status of 422" not in text] == [], "a refused form says 422"


@pytest.mark.parametrize(("width", "theme"), SIZES)
def test_pages_fit_are_named_and_keep_the_policy(files: Path, width: int, theme: str):
    scene = page_scene.build(timezone.now())
    admin, member = page_site.session("admin"), page_site.session("tenant", scene.world.tenant)
    night = f"/jobs/{scene.night.uuid}/"
    visits = [(admin, path) for path in ("/jobs/", night, f"{night}cancel/", f"{night}extend-deadline/")]
    visits += [(member, path) for path in ("/jobs/", night, "/jobs/new/", f"{night}cancel/", f"{night}retry-parked/")]
    wrong = []
    with page_site.web() as address, page_site.chromium() as browser:
        for key, path in visits:
            page = tab(browser, address, key, width=width, theme=theme)
            page.goto(path)
            if page.locator("[data-chart-for]").count():
                page.wait_for_selector("[data-chart-for][data-ready]", state="attached")
            found = [*page.complaints, *page.evaluate(UNNAMED), *page.evaluate(SMALL)]
            if page.evaluate("document.documentElement.scrollWidth") > width:
                found.append("scrolls sideways")
            if page.locator("h1").count() != 1:
                found.append("not one heading of the first rank")
            wrong += [f"{path}: {text}" for text in found]
            page.context.close()
    assert wrong == []


def test_rows_change_in_place_and_turn_stale_when_nothing_comes(files: Path):
    scene = page_scene.build(timezone.now())
    admin = page_site.session("admin")
    row = "#job-rows tr:has-text('nightly summaries')"
    with page_site.web() as address, page_site.chromium() as browser:
        page = tab(browser, address, admin)
        page.goto("/jobs/")
        page.evaluate("window.sameDocument = true")
        elsewhere(lambda: [Job.objects.filter(pk=scene.night.pk).update(items_completed=33)])
        until(page, lambda: "33" in page.locator(row).locator("td.num").first.inner_text(), 60)
        assert page.evaluate("window.sameDocument") is True
        page.route("**/jobs/", lambda route: route.abort())
        until(page, lambda: page.locator("#job-rows.stale").count() == 1, 90)
        assert page.locator(row).locator("td.num").first.inner_text() == "—"
        assert "No update since" in page.inner_text("#jobs-stale")
