"""Budgets, rates and the ledger in a real Chromium: light and dark, wide and narrow, nothing cut off, no complaint.

`PICTURES=/some/folder` keeps a picture of each page.
"""

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.utils import timezone
from playwright.sync_api import sync_playwright

from controlplane.budgets.increases import add_increase
from controlplane.budgets.ingest import settle_soft
from controlplane.budgets.sweep import sweep
from controlplane.core.period import to_us
from controlplane.exchange.database import close_pools, connection
from controlplane.ledger.posting import PostingLine, Source, post
from controlplane.ledger.proposals import billed_account, revenue_account
from tests import factories
from tests.budgets.test_budget_actions import ADA, EUR, create
from tests.budgets.test_budget_forecasts import days_of
from tests.web.conftest import CHROMIUM_ARGS

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LOOKS = [(theme, width) for theme in ("light", "dark") for width in (1280, 390)]


@pytest.fixture
def world(transactional_db):
    """A tenant with three budgets: a raised one that has passed thresholds, one with a forecast, one without days."""
    factories.installation()
    now = timezone.now()
    acme, young = factories.tenant("acme"), factories.tenant("young")
    days_of(acme, now, [900 * EUR, 1_100 * EUR, 1_000 * EUR, 950 * EUR, 1_050 * EUR, 400 * EUR, 350 * EUR] * 2)
    month = create(acme, name="Production", hard=False, limit_nanos=22_000 * EUR, now=now, zone="Europe/Berlin")
    create(acme, name="Per day", period="day", limit_nanos=1_500 * EUR, now=now)
    create(young, name="Trial", limit_nanos=100 * EUR, now=now)
    with connection() as held, held.transaction(), held.cursor() as cursor:
        settle_soft(cursor, [(acme.pk, to_us(now), 18_400 * EUR)])
    sweep(now)
    add_increase(
        budget_id=month.pk, amount_nanos=4_000 * EUR, ends_at=now + timedelta(days=5), reason="Launch of the assistant",
        actor=ADA, now=now,
    )  # fmt: skip
    post(
        f"charges:{now - timedelta(days=1):%Y-%m-%d}:llama-70b#1", "charges",
        [PostingLine(billed_account("acme", "chat"), revenue_account("chat"), 912_345_678_901)],
        at=now - timedelta(days=1), now=now, created_by="system:charges",
        source=Source(f"charges:{now - timedelta(days=1):%Y-%m-%d}:llama-70b", now - timedelta(days=2), now),
    )  # fmt: skip
    client = factories.person("finance", name="fin")
    yield {"month": month.pk, "session": client.cookies[settings.SESSION_COOKIE_NAME].value}
    close_pools()


@pytest.fixture
def visit(world, live_server):
    """visit(path, theme, width) -> page of the signed-in finance person; `page.heard` holds what the console said."""
    executable = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGS)

        def open_page(path, theme="light", width=1280):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=theme, base_url=live_server.url
            )
            context.add_cookies(
                [{"name": settings.SESSION_COOKIE_NAME, "value": world["session"], "url": live_server.url}]
            )
            page = context.new_page()
            page.heard = []
            page.on("console", lambda said: page.heard.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: page.heard.append(str(error)))
            page.goto(path)
            return page

        yield open_page
        browser.close()


def keep(page, name):
    if folder := os.environ.get("PICTURES"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def test_pages_of_money_fit_every_look(world, visit):
    paths = {
        "budgets": "/budgets/",
        "budget": f"/budgets/{world['month']}/",
        "tenant": "/tenants/acme/?tab=budgets",
        "ledger": "/finance/ledger/",
        "rates": "/rates/",
    }
    for name, path in paths.items():
        for theme, width in LOOKS:
            page = visit(path, theme, width)
            keep(page, f"{name}-{theme}-{width}")
            assert page.locator("h1").count() == 1
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{path} is {wide} px too wide at {width}"
            heard = [text for text in page.heard if "favicon" not in text and "WebSocket" not in text]
            assert not heard, f"{path}: {heard}"
            page.context.close()


def test_the_ledger_says_how_far_charges_are_booked(world, visit):
    page = visit("/finance/ledger/")
    assert page.get_by_text("Charges booked until").count() == 1 and page.get_by_text("1 transfer", exact=True).count()


def test_a_limit_is_raised_and_ended_with_the_keyboard(world, visit):
    page = visit(f"/budgets/{world['month']}/")
    assert page.get_by_text("Raised by 4,000.00 to 26,000.00").count() == 1
    page.get_by_text("Increase the limit for a time").press("Enter")
    page.get_by_label("Increase by").fill("ten")
    page.get_by_role("button", name="Increase the limit").press("Enter")
    page.wait_for_selector("[data-error-summary]")
    keep(page, "budget-error")
    assert page.locator('[data-error-summary] a[href="#id_amount"]').count() == 1
    assert page.get_by_label("Increase by").input_value() == "ten"
    until = timezone.now() + timedelta(days=2)
    page.get_by_label("Increase by").fill("250.50")
    page.get_by_label("Until").fill(f"{until:%Y-%m-%dT%H:%M}")
    page.locator("#increases").get_by_label("Reason").last.fill("Busy week")
    page.get_by_role("button", name="Increase the limit").press("Enter")
    page.wait_for_selector("text=Raised by 4,250.50 to 26,250.50")
    page.get_by_text("End early").first.press("Enter")
    page.locator("#increases form").first.get_by_label("Reason").fill("Calm again")
    page.get_by_role("button", name="End this increase").first.press("Enter")
    page.wait_for_selector("text=Ended early")
    assert page.get_by_text("Raised by 4,000.00 to 26,000.00").count() == 1
