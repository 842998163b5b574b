"""A newcomer's walk through the running demo in a real browser: every entry of the navigation as every role, figures
that change in place, a tenant from form to agents, and sums of finance as they are printed.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, StorageState, sync_playwright

from tests.e2e.demo_run import DemoRun

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.slow]

ROLES = ("admin", "finance", "oncall", "viewer", "acme-member")
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NARROW, WIDE = 390, 1280
POOL = "chat-70b"
WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (e) => violations.push(e.violatedDirective + " " + e.blockedURI));
"""


@dataclass
class Site:
    """The demo's address, its logins, and the browser."""

    address: str
    logins: dict[str, str]
    browser: Browser
    contexts: list[BrowserContext] = field(default_factory=list)
    sessions: dict[str, StorageState] = field(default_factory=dict)

    def open(self, name: str, path: str, width: int = WIDE) -> Page:
        """A page of a person who signs in by the form, once a module; `complaints(page)` tells what went wrong."""
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, base_url=self.address, storage_state=self.sessions.get(name)
        )
        context.add_init_script(WATCH_POLICY)
        self.contexts.append(context)
        page = context.new_page()
        page.heard = []  # type: ignore[attr-defined]
        page.on("console", lambda said: page.heard.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.heard.append(str(error)))
        if name not in self.sessions:
            page.goto(f"/sign-in/?next={path}")
            page.fill("input[name=username]", name)
            page.fill("input[name=password]", self.logins[name])
            page.press("input[name=password]", "Enter")
            page.wait_for_url(lambda url: "/sign-in/" not in url)
            self.sessions[name] = context.storage_state()
        else:
            page.goto(path)
        return page


def complaints(page: Page) -> list[str]:
    """What the page's console and its content policy had to say since it was asked last."""
    said = page.heard + page.evaluate("window.violations")  # type: ignore[attr-defined]
    page.heard = []  # type: ignore[attr-defined]
    return said


def until(page: Page, holds: Callable[[], bool], seconds: float) -> None:
    """Looks again and again; from outside, because the pages' policy forbids evaluating text inside."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s on {page.url}"
        page.wait_for_timeout(200)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    named = os.environ.get("FLEXBAND_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if named is None:
        why = "no Chromium on the path and FLEXBAND_CHROMIUM is not set: the pages were not tried in a browser"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=named, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    run = DemoRun(tmp_path_factory.mktemp("browser"))
    try:
        run.wait_for(r"Ctrl-C stops everything")
        logins = dict(re.findall(r"^ {4}(\S+) +(\S+)$", run.text(), flags=re.M))
        yield Site(f"http://127.0.0.1:{run.port}", logins, chromium)
    finally:
        if run.process.poll() is None:
            run.stop(signal.SIGINT)
    assert run.left_behind() == []


@pytest.fixture(autouse=True)
def closed_contexts(site: Site) -> Iterator[None]:
    yield
    for context in site.contexts:
        context.close()
    site.contexts.clear()


def entries(page: Page) -> set[str]:
    """Paths of all entries that the navigation of this page offers."""
    return set(page.eval_on_selector_all("nav[aria-label]:not(.crumbs) a[href]", "all => all.map(a => a.pathname)"))


@pytest.mark.parametrize("name", ROLES)
def test_every_entry_of_the_navigation_opens_on_a_phone(site: Site, name: str) -> None:
    page = site.open(name, "/", NARROW)
    begins = "/tenants/acme/" if name == "acme-member" else "/"
    assert urlsplit(page.url).path == begins
    if name != "acme-member":
        assert page.get_by_role("link", name="All contracts").get_attribute("href") == "/contracts/"
    waiting, seen, wrong = entries(page), {begins}, faults(page)
    assert waiting, "the first page offers nothing"
    while waiting := (waiting | entries(page)) - seen:
        path = min(waiting)
        answer = page.goto(path)
        seen.add(path)
        if answer is None or answer.status >= 400:
            wrong.append(f"{path}: status {answer and answer.status}")
        wrong += faults(page)
    assert wrong == []
    assert len(seen) >= (3 if name == "acme-member" else 15), seen


def faults(page: Page) -> list[str]:
    """What is wrong with the page that a phone shows now."""
    width, headings = page.evaluate("[document.documentElement.scrollWidth, document.querySelectorAll('h1').length]")
    found = complaints(page)
    if width > NARROW:
        found.append(f"{width} px wide")
    if headings != 1:
        found.append(f"{headings} headings of the first rank")
    return [f"{page.url}: {text}" for text in found]


def test_a_pool_changes_in_place_over_the_socket(site: Site) -> None:
    page = site.open("viewer", f"/pools/{POOL}/")
    page.evaluate("window.sameDocument = true")
    figures = "[...document.querySelectorAll('#queue [data-value]')].map(value => value.textContent).join(' ')"
    stamp = "document.querySelector('[data-live-time]').textContent"
    before = [page.evaluate(figures), page.evaluate(stamp)]
    until(page, lambda: page.evaluate(figures) != before[0] and page.evaluate(stamp) != before[1], 60)
    assert page.evaluate("window.sameDocument") is True
    assert page.locator("[data-live-word]").inner_text() == "Live"
    assert page.locator("#queue").evaluate("panel => panel.classList.contains('stale')") is False
    assert complaints(page) == []


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()
    page.wait_for_load_state()
    assert page.locator(".error-summary").count() == 0, page.locator(".error-summary").inner_text()


def test_an_admin_makes_a_tenant_and_a_key_and_pushes_them_to_every_agent(site: Site) -> None:
    page = site.open("admin", "/tenants/new/")
    page.fill("[name=slug]", "umbrella")
    page.fill("[name=name]", "Umbrella Care")
    page.check("[name=classes][value=chat]")
    press(page, "Review changes")
    page.fill("[name=reason]", "a new customer")
    press(page, "Create tenant")
    assert urlsplit(page.url).path == "/tenants/umbrella/"

    page.goto("/tenants/umbrella/keys/new/")
    page.fill("[name=name]", "support desk")
    page.check("[name=classes][value=chat]")
    press(page, "Create key")
    secret = page.locator("#secret").inner_text()
    assert re.fullmatch(r"fb_[\w-]+", secret)
    page.goto("/keys/")
    assert "support desk" in page.locator("main").inner_text() and secret not in page.content()

    page.goto("/policy/review/")
    assert "umbrella" in page.locator("#changes").inner_text()
    page.fill("[name=reason]", "a new customer")
    press(page, "Push this configuration")
    assert urlsplit(page.url).path.startswith("/policy/rollouts/")
    until(page, lambda: page.locator("#progress .big").inner_text().startswith("3 of 3 agents apply revision"), 60)
    page.goto("/audit/")
    assert "umbrella" in page.locator("main").inner_text()
    assert complaints(page) == []


def amount(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", "").replace("−", "-").lstrip("+"))


def amounts(page: Page, selector: str) -> list[Decimal]:
    return [amount(text) for text in page.locator(selector).all_text_contents()]


def test_finance_adds_up_as_printed(site: Site) -> None:
    page = site.open("finance", "/finance/?rows=all")
    deadline = time.monotonic() + 90
    while page.locator("#where .stats").count() == 0 or amounts(page, "#where .stat .value")[0] == 0:
        assert time.monotonic() < deadline, "nothing was attributed"
        page.wait_for_timeout(2_000)
        page.reload()
    fleet, used, idle = amounts(page, "#where .stat .value")
    assert fleet == used + idle > 0
    lists = [amounts(page, f"#where dl.sum >> nth={at} >> dd") for at in range(2)]
    for parts, total in zip(lists, (used, idle), strict=True):
        assert sum(parts[:-1]) == parts[-1] == total
    charges, minus_cost, margin = amounts(page, "#charged dd")
    assert charges + minus_cost == margin and minus_cost == -fleet

    for column in range(3, 9):
        cells = amounts(page, f"#attribution tbody tr.level-0 td:nth-of-type({column})")
        total = amounts(page, f"#attribution tfoot td:nth-of-type({column})")[0]
        assert sum(cells) == total, f"column {column} of the pivot"
    assert page.locator("#time tbody tr").count() >= 1
    for column in range(1, page.locator("#time tfoot td").count() + 1):
        assert sum(amounts(page, f"#time tbody td:nth-of-type({column})")) == amounts(
            page, f"#time tfoot td:nth-of-type({column})"
        )[0]  # fmt: skip
    assert "Lines add up to the fleet cost exactly" in page.locator("#where").inner_text()
    assert complaints(page) == []
