"""A walk through the lab in a real Chromium: a new interference test, running, verdict, compare, again; each page light
and dark, wide and narrow, nothing cut off, no complaint.

`PICTURES=/some/folder` keeps a picture of each page, `AXE=/path/axe.min.js` runs its checks on each.
"""

import os
import shutil
import threading
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connections
from django.utils import timezone
from playwright.sync_api import expect, sync_playwright

from controlplane.experiments import actions, running
from controlplane.experiments.forms import FORMS
from controlplane.experiments.models import Experiment
from tests import factories
from tests.experiments.test_pages import ADA, SMALL
from tests.web.conftest import CHROMIUM_ARGS

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LONGEST_MS = 400_000
"""For a run on a machine that does much else: its process gives way to everybody."""
LOOKS = [(theme, width) for theme in ("light", "dark") for width in (1280, 390)]


@pytest.fixture
def session(transactional_db):
    factories.installation()
    factories.workload_class("chat")
    factories.workload_class("bulk", "batch")
    pool = factories.pool()
    for number, band in enumerate(("interactive", "interactive", "flex", "batch")):
        factories.slot(pool, f"s{number}", band)
    return factories.person("admin", name="ada").cookies[settings.SESSION_COOKIE_NAME].value


@pytest.fixture
def visit(session, live_server):
    """visit(path, theme, width) -> page of a signed-in admin; `page.heard` holds what the console said."""
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = os.environ.get("FLEXBAND_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGS)

        def open_page(path, theme="light", width=1280):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=theme, base_url=live_server.url
            )
            context.set_default_timeout(60_000)
            context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": session, "url": live_server.url}])
            page = context.new_page()
            page.heard = []
            page.on("console", lambda said: page.heard.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: page.heard.append(str(error)))
            page.goto(path)
            return page

        yield open_page
        browser.close()


def run_newest() -> threading.Thread:
    """The worker's part, in a thread without the browser's event loop."""

    def work() -> None:
        try:
            running.run(Experiment.objects.latest("id").pk)
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def look_at(page, name):
    if folder := os.environ.get("PICTURES"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is cut off"
    if path := os.environ.get("AXE"):
        page.evaluate(Path(path).read_text())
        found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa']})")
        assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]] == [], name
    assert page.heard == [], name


def test_a_walk_from_a_question_to_its_verdict_and_again(visit):
    page = visit("/lab/")
    page.get_by_role("link", name="New experiment").first.click()
    page.get_by_role("link", name="Whether to buy").click()
    for label, value in (
        ("Title", "Do we need another node"), ("Length, min", "1"), ("Items of a synthetic batch job", "5"),
        ("Objective: time to first token, ms", "6000"), ("Target, % of offered requests", "90"),
    ):  # fmt: skip
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Run the experiment").click()
    expect(page.get_by_text("It waits for a worker")).to_be_visible()
    look_at(page, "lab-waiting")
    worker = run_newest()
    expect(page.locator("#verdict")).to_be_visible(timeout=LONGEST_MS)
    worker.join(60)
    first = page.url
    look_at(page, "lab-answer")
    page.get_by_role("link", name="Verdict to print").click()
    expect(page.get_by_text("Do not buy if isolation restores")).to_be_visible()
    page.goto(first)
    page.get_by_role("button", name="Run again, same seed").click()
    expect(page.get_by_text("It waits for a worker")).to_be_visible()
    worker = run_newest()
    expect(page.get_by_text("Same bytes").first).to_be_visible(timeout=LONGEST_MS)
    worker.join(60)
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_text("Figure by figure")).to_be_visible()
    look_at(page, "lab-compare")


def test_each_page_in_both_looks_and_widths(visit):
    found: list[int] = []

    def work() -> None:
        try:
            found.append(answered())
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONGEST_MS / 1000)
    number = found[0]
    for theme, width in LOOKS:
        for name, path in (
            ("list", "/lab/"), ("choose", "/lab/new/"), ("new", "/lab/new/interference/?pool=chat-70b"),
            ("answer", f"/lab/{number}/"), ("verdict", f"/lab/{number}/verdict/"),
            ("use", f"/lab/{number}/safe-rate/"), ("compare", f"/lab/compare/?a={number}&b={number}"),
        ):  # fmt: skip
            one = visit(path, theme, width)
            one.wait_for_timeout(300)
            look_at(one, f"lab-{name}-{theme}-{width}")
            one.context.close()


def answered() -> int:
    """A small interference test that is done."""
    form = FORMS["interference"]({**SMALL, "minutes": "1", "batch_items": "5"})
    assert form.is_valid(), form.errors
    now = timezone.now()
    row = actions.ask(kind="interference", title="Do we need another node", values=form.values(now), actor=ADA, now=now)
    assert running.run(row.pk)
    return row.pk
