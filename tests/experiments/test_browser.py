"""A walk through the lab in a real Chromium: a new interference test, running, verdict, compare, again; nothing is
cut off, nothing complains. How its pages look with an answer on them, `tests/access/test_pages_axe.py` sees.

`PICTURES=/some/folder` keeps a picture of each page.
"""

import os
import shutil
import threading
from pathlib import Path

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.conf import settings
from django.db import connections
from playwright.sync_api import expect, sync_playwright

from controlplane.experiments import running
from controlplane.experiments.models import Experiment
from tests import factories
from tests.access.test_pages_axe import ASK, RULES
from tests.web.conftest import CHROMIUM_ARGS

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LONGEST_MS = 400_000
"""For a run on a machine that does much else: its process gives way to everybody."""


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
    """visit(path) -> page of a signed-in admin; `page.heard` holds what the console said."""
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = os.environ.get("FLEXBAND_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGS)

        def open_page(path):
            context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=live_server.url)
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
    page.evaluate(AXE_SCRIPT)
    assert page.evaluate(ASK, RULES) == [], name
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
