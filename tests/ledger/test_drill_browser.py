"""One cent in a real Chromium: invoice line, bridge, attribution, hour, request and back, of a day that is retired."""

import shutil
from datetime import UTC, datetime, timedelta

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connection
from playwright.sync_api import expect, sync_playwright

from controlplane.ledger.attribution import attribute
from controlplane.ledger.models import PoolSku
from controlplane.usage import retirement
from controlplane.usage.models import RetiredDay, UsageRecord
from controlplane.usage.partitions import create_days
from tests import factories
from tests.ledger.fleet_rows import HOUR, ONE_HOUR, worked_example
from tests.ledger.test_bridge import HEADER
from tests.ledger.test_hour_requests import record
from tests.usage.test_retired_records import id_of
from tests.web.conftest import CHROMIUM_ARGS

pytestmark = [pytest.mark.browser, pytest.mark.slow]
INVOICE = f"""{HEADER}
20.4,20.4,EUR,Usage,GPU,2026-11-20 10:00:00,chat-70b,8,own,here
1.9,1.9,EUR,Tax,VAT,2026-11-20,,,own,
"""
WAIT_MS = 90_000
LATER = max(datetime.now(UTC), HOUR + timedelta(days=40))


@pytest.fixture
def month(transactional_db, settings, tmp_path):
    """An attributed hour, its requests and its invoice; the day's records are in a file, no longer in the database."""
    settings.USAGE_ARCHIVE, settings.USAGE_RECORD_DAYS = tmp_path / "archive", 31
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE usage_record")
        create_days(cursor, [HOUR.date()])
    made = worked_example()
    attribute(made.pool, HOUR, HOUR + ONE_HOUR, HOUR + 2 * ONE_HOUR)
    PoolSku.objects.create(pool=made.pool, sku="chat-70b", updated_at=HOUR, updated_by="fin")
    at = HOUR + timedelta(minutes=7)
    record(made, 1, "a", at=at, gpu_us=7_000_000)
    wanted = id_of(at, 1)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE usage_record SET request_id = %s", [wanted])
    retirement.retire_old_days(LATER)
    assert RetiredDay.objects.get().day == HOUR.date() and not UsageRecord.objects.exists()
    path = tmp_path / "nordgrid.csv"
    path.write_text(INVOICE)
    call_command("import_invoice", str(path), "--period", "2026-11", "--json")
    client = factories.person("finance", name="fin")
    yield {"session": client.cookies[settings.SESSION_COOKIE_NAME].value, "request": wanted, "archive": tmp_path}
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE IF EXISTS usage_record_{HOUR:%Y%m%d}")


@pytest.fixture
def page(month, live_server):
    executable = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGS)
        context = browser.new_context(base_url=live_server.url, viewport={"width": 1280, "height": 900})
        context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": month["session"], "url": live_server.url}])
        context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield context.new_page()
        browser.close()


def to_the_hour(page):
    """From the invoice's list down to the hour, by what is on the pages."""
    page.goto("/finance/invoices/")
    page.get_by_role("link", name="nordgrid.csv").click()
    page.get_by_role("link", name="Line 2 in the bridge").click()
    expect(page.locator("#by-sku tr.selected").first).to_contain_text("chat-70b")
    expect(page.locator("#sku-lines")).to_contain_text("20.4")
    page.locator("#by-sku").get_by_role("link", name="Attribution of 2026-11-20").click()
    page.locator("#attribution").get_by_role("link", name="Show all rows").click()
    # tenant a, its class, its pool
    page.locator('tr[data-parent]:has-text("chat-70b") a').first.click()
    page.locator("#selected").get_by_role("link", name="10:00").click()


def test_a_line_of_an_invoice_leads_to_the_request_and_back(page, month):
    to_the_hour(page)
    requests = page.locator("#requests")
    expect(requests).to_contain_text("Read from the file of 2026-11-20")
    requests.get_by_role("link", name=month["request"]).click()
    expect(page.locator("#charge")).to_contain_text("0.000000005")
    expect(page.locator("#identifiers")).to_contain_text("read from the archive of that day")
    # and back
    page.locator("#charge").get_by_role("link", name="chat-70b, the hour of").click()
    expect(page.locator("#requests")).to_contain_text(month["request"])
    page.locator("nav.crumbs").get_by_role("link", name="Cost attribution").click()
    expect(page.locator("#selected")).to_contain_text("chat-70b")
    page.get_by_role("navigation").get_by_role("link", name="Invoice bridge").click()
    page.goto("/finance/reconciliation/?period=2026-11")
    page.locator("#by-sku").get_by_role("link", name="chat-70b").click()
    page.locator("#sku-lines").get_by_role("link", name="nordgrid.csv 2").click()
    expect(page.locator("#line-2")).to_contain_text("20.4")
    page.get_by_role("link", name="Line 3 in the bridge").click()
    expect(page.locator("#lines")).to_contain_text("VAT")


def test_a_file_that_is_gone_is_named_and_nothing_is_called_none(page, month):
    for path in (month["archive"] / "archive").rglob("*.parquet"):
        path.unlink()
    to_the_hour(page)
    expect(page.locator("#requests")).to_contain_text("Archive unreadable")
    expect(page.locator("#requests")).to_contain_text("2026-11-20")
    expect(page.locator("#requests")).not_to_contain_text("No record")
    page.goto(f"/requests/{month['request']}/")
    expect(page.locator("main")).to_contain_text("2026-11-20")
