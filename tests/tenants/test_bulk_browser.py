"""Rows ticked in a real browser: with the keyboard, with a script and without one."""

import os
from pathlib import Path

import pytest

from controlplane.audit.models import AuditEntry
from controlplane.tenants.models import Tenant
from tests import factories
from tests.jobs.page_site import chromium, elsewhere, session, tab, web

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def site(transactional_db):
    factories.installation()
    factories.workload_class("chat")
    for number in range(6):
        factories.tenant(f"team-{number}", classes=["chat"])
    factories.tenant("team-old", state="archived")
    with web() as address:
        yield address, session("admin")


def picture(page, name):
    if folder := os.environ.get("PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 900})
                page.screenshot(path=str(Path(folder) / f"bulk-{name}-{scheme}-{width}.png"), full_page=True)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1280, "height": 900})


def weights():
    return dict(Tenant.objects.order_by("slug").values_list("slug", "weight"))


def test_a_selection_made_by_keyboard_and_shift_is_reviewed_and_done(site):
    address, key = site
    with chromium() as browser:
        page = tab(browser, address, key)
        page.goto("/tenants/?sort=name&state=all")
        assert "weight" in page.inner_html("#bulk")
        page.focus("input[name=row] >> nth=0")
        page.keyboard.press("Space")
        page.click("input[name=row] >> nth=3", modifiers=["Shift"])
        assert page.inner_text("[data-selected]") == "4 selected"
        assert page.locator("[data-select-all]:indeterminate").count() == 1
        page.check("[data-select-all]")
        assert page.inner_text("[data-selected]") == "7 selected"
        picture(page, "list")
        page.uncheck("input[name=row] >> nth=5")
        assert not page.is_checked("[data-select-all]")
        page.select_option("#bulk [name=action]", "weight")
        page.focus("#bulk button")
        page.keyboard.press("Enter")
        page.wait_for_selector("[name=weight]")
        picture(page, "values")
        page.fill("[name=weight]", "7")
        page.click("button:text-is('Review changes')")
        page.wait_for_selector("text=Row by row")
        assert page.locator("tbody tr").count() == 6
        assert "An archived tenant cannot be changed" in page.inner_text("main")
        picture(page, "review")
        elsewhere(Tenant.objects.filter(slug="team-2").update, version=2, weight=3)
        page.fill("[name=reason]", "new prices")
        page.click("button:text-is('Set weight')")
        page.wait_for_selector("text=left alone")
        picture(page, "results")
        assert elsewhere(weights) == {f"team-{n}": 7 for n in (0, 1, 3, 4)} | {
            "team-2": 3, "team-5": 1, "team-old": 1,
        }  # fmt: skip
        page.click("button:text-is('Review the one left alone')")
        page.fill("[name=reason]", "new prices")
        page.click("button:text-is('Set weight')")
        page.wait_for_selector("text=1 changed")
        assert elsewhere(weights)["team-2"] == 7
        page.click("a:text-is('audit log')")
        page.wait_for_selector("#audit")
        assert page.locator("tbody tr").count() == 1
        page.go_back()
        page.click("a:text-is('Back to the list')")
        page.wait_for_url("**/tenants/?sort=name&state=all")
        assert page.complaints == []
    assert elsewhere(AuditEntry.objects.filter(action="tenant.edit").count) == 5


def test_without_a_script_all_on_the_page_are_taken(site):
    address, key = site
    with chromium() as browser:
        context = browser.new_context(java_script_enabled=False, base_url=address)
        context.add_cookies([{"name": "sessionid", "value": key, "url": address}])
        page = context.new_page()
        page.goto("/tenants/")
        page.check("[name=all]")
        page.select_option("#bulk [name=action]", "suspend")
        page.click("#bulk button")
        page.fill("[name=reason]", "flood")
        page.click("button:text-is('Suspend tenants')")
        assert "6 changed" in page.inner_text("main")
        context.close()
    assert elsewhere(Tenant.objects.filter(state="suspended").count) == 6
