"""The past in a real Chromium: a recorded page, its steps, and what it says where nothing was recorded."""

import os
from datetime import UTC, datetime

import pytest

from controlplane.live.frames import Publisher, Ticker, connect
from controlplane.live.recording import Recorder
from tests.live.test_browser import CHAT_DEPTH, Tab, chromium, elsewhere, site, until

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]
__all__ = ["chromium", "site"]
SHOTS = os.environ.get("FLEXBAND_SHOTS")


def test_the_slider_goes_back_to_what_was_told(site, chromium):
    key = elsewhere(site.session, "oncall")
    recorder = Recorder()
    site.ticker = Ticker(Publisher(connect(), recorder=recorder), recorder)

    def record():
        site.report(19)
        first = datetime.now(UTC)
        while (datetime.now(UTC) - first).total_seconds() < 2.2:
            pass
        site.report(3)
        site.ticker.finish(datetime.now(UTC))
        return first

    first = elsewhere(record)
    tab = Tab(chromium, site, key)
    page = tab.page
    page.goto(f"{site.address}/pools/chat-70b/?at={first.isoformat().replace('+00:00', 'Z')}")
    assert page.locator(CHAT_DEPTH).first.inner_text() == "19"
    assert page.locator("[data-past-at]").inner_text()
    if SHOTS:
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 900})
                page.screenshot(path=f"{SHOTS}/past-{scheme}-{width}.png")
    for _ in range(3):
        page.locator("[data-past-step]", has_text="+1 s").click()
    until(page, 'document.querySelector("tr:has(th) [data-t=depth]") !== null', 60)
    depth_is_3 = (
        "[...document.querySelectorAll('tr')].some((row) => row.querySelector('th')?.innerText.includes('chat')"
        " && row.querySelector('[data-t=depth]')?.innerText === '3')"
    )
    until(page, depth_is_3, 60)
    assert not page.locator(".stale").count(), "a past page is not late"
    for _ in range(3):
        page.locator("[data-past-step]", has_text="−1 s").click()
    until(page, depth_is_3.replace("'3'", "'19'"), 60)
    page.locator("[data-past-step]", has_text="−10 min").click()
    until(page, "document.querySelector('[data-past-grain]').innerText.includes('nothing was recorded')", 60)
    assert "at=" in page.url
    assert tab.complaints == []
