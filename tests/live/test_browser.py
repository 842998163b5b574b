"""Live pages in a real Chromium over the real socket: values change in place, unknown shows, policy kept."""

import os
import shutil
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth.models import User
from django.db import connection, connections
from django.test import Client
from playwright.sync_api import sync_playwright

from controlplane.access.models import Session
from controlplane.fleet.models import AgentLive
from controlplane.live.frames import Publisher, Ticker, connect
from controlplane.tenants.models import Member
from controlplane.usage.partitions import create_days, days_ahead
from tests.live import scene as scenes
from tests.web_thread import WebThread

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

CHROMIUM_ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
VIOLATIONS = """addEventListener("securitypolicyviolation", (e) => console.error("CSP " + e.violatedDirective));"""


class Site:
    """The web process, a controller that ticks when told, and agents that report when told."""

    def __init__(self):
        now = datetime.now(UTC)
        with connection.cursor() as cursor:
            create_days(cursor, days_ahead(now))
        self.scene = scenes.build(now)
        self.ticker = Ticker(Publisher(connect()))
        self.web = WebThread()
        self.address = self.web.address

    def report(self, depth):
        """Both agents of the pool say something new, and the controller tells it."""
        now = datetime.now(UTC)
        figures = scenes.chat_figures(self.scene, now, depth=depth)
        scenes.say(self.scene.agents[0], now, figures)
        AgentLive.objects.filter(agent=self.scene.agents[1]).update(reported_at=now)
        scenes.sample(self.scene, now)
        self.tick()

    def tick(self):
        for told in self.ticker.publisher._told.values():
            told.at_s -= 1
        self.ticker.tick(datetime.now(UTC))

    def session(self, role):
        user = User.objects.create(username=role, password="!")
        Member.objects.create(user=user, role=role)
        client = Client()
        client.force_login(user)
        return client.cookies["sessionid"].value

    def stop(self):
        self.web.stop()


@pytest.fixture
def site(transactional_db, frames_redis):
    one = Site()
    yield one
    one.stop()
    connections.close_all()


@pytest.fixture
def chromium():
    executable = os.environ.get("FLEXBAND_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


class Tab:
    """A signed-in tab. Playwright keeps a loop of its own in this thread, so rows are written from another."""

    def __init__(self, browser, site, key, **options):
        self.context = browser.new_context(timezone_id="Europe/Berlin", **options)
        self.context.add_cookies([{"name": "sessionid", "value": key, "url": site.address}])
        self.page = self.context.new_page()
        self.complaints = []
        self.page.add_init_script(VIOLATIONS)
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))


def elsewhere(work, *args):
    """Runs database work in a thread that has no event loop."""
    result = []

    def run():
        try:
            result.append(work(*args))
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert result, "the work failed"
    return result[0]


def until(page, expression, seconds):
    """Waits for a condition; the page's policy forbids the evaluation that Playwright's own waiting uses."""
    ends = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < ends, expression
        page.wait_for_timeout(50)


CHAT_DEPTH = "tr:has(th:has-text('chat')) [data-t=depth]"


def test_pages_go_live_change_in_place_turn_stale_and_end_with_the_session(site, chromium):
    key = elsewhere(site.session, "oncall")
    tab = Tab(chromium, site, key)
    page = tab.page
    elsewhere(lambda: (site.report(19), 1))
    page.goto(site.address + "/pools/chat-70b/")
    depth = page.locator("#queue " + CHAT_DEPTH).first
    until(page, "document.querySelector('[data-live-time]').textContent !== '—'", 60)
    depth.evaluate("element => { element.mark = 'the same element'; }")
    elsewhere(lambda: (site.report(27), 1))
    until(page, "document.querySelector('#queue [data-t=depth]').textContent === '27'", 60)
    assert depth.evaluate("element => element.mark") == "the same element"
    assert page.locator("[name=percentile][value=p99]").count() == 1
    page.locator("label:has([value=p99])").click()
    assert page.locator("#stages").get_attribute("data-q") == "p99"

    page.goto(site.address + "/")
    until(page, "document.querySelector('[data-live-time]').textContent !== '—'", 60)
    assert "(1 breached)" in page.title()
    elsewhere(lambda: (AgentLive.objects.update(reported_at=datetime.now(UTC) - timedelta(seconds=60)), site.tick(), 1))
    until(page, "document.title.includes('unknown')", 60)
    assert page.locator("#queues tr.stale").count() >= 2
    assert page.locator("#contracts tr.stale").count() == 3

    until(page, "document.querySelector('#contracts').classList.contains('stale')", 60)
    assert "No update since" in page.locator("#contracts [data-stale-note]").inner_text()
    until(page, "document.querySelector('#agents').classList.contains('stale')", 60)
    assert not page.locator(".while-heard:visible").count(), "nothing is called good that nobody hears of"
    assert page.locator("h1").inner_text().split() == ["Live", "Not", "known", "now"], "no tally of a time that is over"
    until(page, "document.title.startsWith('(not known)')", 60)
    until(page, "document.querySelector('[data-live-word]').textContent === 'Stale'", 60)
    assert page.get_by_text("Agents go on by themselves").is_visible()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "nothing is wider for it"
    breached = "(row) => { row.className = 'bad'; return getComputedStyle(row).backgroundColor; }"
    tint = page.locator("#contracts tbody tr").first.evaluate(breached)
    assert tint == "rgba(0, 0, 0, 0)", "nor does a colour say what the word no longer says"
    page.set_viewport_size({"width": 1280, "height": 720})
    assert page.locator("#band").get_by_text("chat-70b").first.is_visible(), "a name does not age"
    assert not page.locator(".stage-strip:visible, #contracts .meter > i:visible").count(), "nor is it drawn"
    assert tab.complaints == []

    elsewhere(lambda: (Session.objects.filter(session_key=key).delete(), 1))
    until(page, "!document.querySelector('#connection-banner').hidden", 60)


def test_first_paint_stands_without_scripts_and_fits_a_phone(site, chromium):
    tab = Tab(
        chromium, site, elsewhere(site.session, "viewer"), java_script_enabled=False,
        viewport={"width": 390, "height": 800},
    )  # fmt: skip
    elsewhere(lambda: (site.report(19), 1))
    for path, text in (
        ("/", "is burning"),
        ("/pools/chat-70b/", "f1 is lent to bulk"),
        ("/requests/", "records as they end"),
    ):
        tab.page.goto(site.address + path)
        assert tab.page.get_by_text(text).first.is_visible()
