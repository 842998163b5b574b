"""Every page with rows in a real Chromium, read by axe-core: wide and dark, narrow and light, nothing found and nothing
cut off. The addresses come out of the resolver, so that a new page is read as soon as it has an example.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.conf import settings as project
from django.core.cache import cache
from django.test import Client
from django.urls import resolve
from playwright.sync_api import Browser, Page, TimeoutError

from tests.access.test_matrix import ROUTES, address, body, world
from tests.access.test_page_forms import just_confirmed, pages
from tests.jobs.page_site import chromium, web

__all__ = ["pages", "world"]

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

LOOKS = (("dark", 1280), ("light", 390))
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
ASK = """async (rules) => {
    const answer = await axe.run(document, {runOnly: rules, resultTypes: ["violations"]});
    return answer.violations.map((one) => [one.id, one.nodes.map((node) => node.target.join(" ") + " " + node.html)]);
}"""
SETTLED = """() => document.readyState === "complete" && !document.querySelector(".htmx-request")
    && document.querySelectorAll("[data-ready]").length
        >= document.querySelectorAll("[data-chart], [data-schema]").length"""
FITS = "() => document.documentElement.scrollWidth <= innerWidth"
#: These are named, so that none can go missing from the walk.
NEVER_LEFT_OUT = {
    "home", "requests", "request", "pools", "pool", "flex-pool", "flex-decision", "agents", "agent", "classes", "class",
    "contracts", "contract", "jobs", "job", "job-upload", "lab", "lab-new", "experiment", "experiment-verdict",
    "lab-compare", "lab-shared", "tenants", "tenant", "tenant-usage", "api-keys", "budgets", "budget", "budget-new",
    "finance", "finance-interval", "finance-ledger", "finance-bridge", "statements", "statement", "periods", "period",
    "invoices", "invoice", "invoice-upload", "exports", "compare", "what-if", "proposals",
    "rates", "policy", "policy-review", "policy-revision", "rollout", "alerts", "alert", "silences", "receivers",
    "audit", "audit-entry", "members", "member-access", "invitations", "account", "token-new", "login", "invitation",
}  # fmt: skip


def opened(client: Client, addresses: Iterable[str | None]) -> list[str]:
    """The addresses that answer with a whole page: no files, no fragments, nothing that leads elsewhere."""
    found = []
    for url in dict.fromkeys(filter(None, addresses)):
        response = client.get(url)
        if (
            response.status_code == 200
            and "text/html" in response.get("Content-Type", "")
            and "<html" in body(response)
        ):
            found.append(url)
    return found


@contextmanager
def looking(browser: Browser, site: str, cookies: dict[str, str]) -> Iterator[Page]:
    context = browser.new_context(reduced_motion="reduce", timezone_id="Europe/Berlin", base_url=site)
    context.add_cookies([{"name": name, "value": value, "url": site} for name, value in cookies.items()])
    context.add_init_script(AXE_SCRIPT)
    page = context.new_page()
    page.set_default_timeout(120_000)
    yield page
    context.close()


Fault = tuple[str, str, int, str, list[str]]


def faults(page: Page, url: str) -> Iterator[Fault]:
    """What axe finds on a page in each look: address, theme, width in px, rule, elements."""
    for number, (theme, width) in enumerate(LOOKS):
        look(page, theme, width)
        if number == 0:
            page.goto(url, wait_until="load")
        yield from faults_now(page, url, theme, width)


def look(page: Page, theme: str, width: int) -> None:
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size({"width": width, "height": 900})


def faults_now(page: Page, url: str, theme: str, width: int) -> Iterator[Fault]:
    """What axe finds on the page as it stands."""
    page.wait_for_function(SETTLED)
    for rule, elements in page.evaluate(ASK, RULES):
        yield url, theme, width, rule, elements
    try:  # charts take their new width a moment after the window did
        page.wait_for_function(FITS, timeout=30_000)
    except TimeoutError:
        yield url, theme, width, "cut off", []


def test_axe_finds_nothing_on_any_page(world, pages, capsys):
    cache.clear()
    admin, nobody = world["admin"], Client()
    just_confirmed(admin)
    inside = opened(admin, pages)
    public = [address(route, "acme") for route in ROUTES if route.public and not route.rest and "get" in route.needs]
    outside = opened(nobody, public)
    inside = [url for url in inside if url not in outside]
    names = {resolve(url.partition("?")[0]).url_name for url in (*inside, *outside)}
    assert names >= NEVER_LEFT_OUT, NEVER_LEFT_OUT - names
    session = {project.SESSION_COOKIE_NAME: admin.cookies[project.SESSION_COOKIE_NAME].value}
    found = []
    with web() as site, chromium() as browser:
        for urls, cookies in ((inside, session), (outside, {})):
            with looking(browser, site, cookies) as page:
                for url in urls:
                    found += faults(page, url)
    with capsys.disabled():
        print(f"\n  {len(inside)} pages of an admin, {len(outside)} of nobody")
    assert found == [], "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("budget-new", "There is a problem"),
        ("rate-card-new", "There is a problem"),
        ("cost-rate-new", "There is a problem"),
        ("budget-edit", "Nothing was changed"),
    ],
)
def test_axe_finds_nothing_on_the_answer_to_a_form_of_money(world, pages, name, says):
    """What is refused, and the notice of what was done, are read in both themes and at both widths."""
    admin = world["admin"]
    (url,) = opened(admin, [url for url in pages if resolve(url.partition("?")[0]).url_name == name])
    session = {project.SESSION_COOKIE_NAME: admin.cookies[project.SESSION_COOKIE_NAME].value}
    with web() as site, chromium() as browser, looking(browser, site, session) as page:
        page.goto(url, wait_until="load")
        with page.expect_navigation():
            page.evaluate("""document.querySelector("main form[method=post]").requestSubmit()""")
        assert says in page.locator("main").inner_text()
        found = []
        for theme, width in product(("dark", "light"), (1280, 390)):
            look(page, theme, width)
            found += faults_now(page, url, theme, width)
    assert found == [], "\n".join(map(str, found))
