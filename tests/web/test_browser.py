"""The house look in a real browser: strict policy kept, both themes, keyboard, narrow screens, ageing values."""

import pytest

pytestmark = pytest.mark.browser

CHARTS_READY = "document.querySelectorAll('[data-ready]').length === document.querySelectorAll('[data-chart]').length"


@pytest.mark.parametrize(("width", "theme"), [(320, "dark"), (390, "light"), (1110, "dark"), (1280, "light")])
def test_no_complaint_and_no_sideways_scrolling(open_page, width, theme):
    page = open_page(width=width, theme=theme)
    page.wait_for_function(CHARTS_READY)
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('.chart-plot .trace, .chart-plot .bars').length") >= 4


@pytest.mark.parametrize("selector", ["h1", ".crumbs", ".panel-head h2", ".panel-foot", "main label", ".stat .label"])
def test_a_name_without_a_space_never_widens_a_phones_page(open_page, selector):
    page = open_page(width=390)
    page.wait_for_function(CHARTS_READY)
    page.evaluate("s => document.querySelectorAll(s).forEach(e => e.append('n'.repeat(120)))", selector)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_theme_is_stored_and_charts_follow(open_page):
    page = open_page(theme="light")
    page.wait_for_function(CHARTS_READY)
    fill = "getComputedStyle(document.querySelector('[data-chart-for=bars] .point path')).fill"
    light = page.evaluate(fill)
    toggle = page.locator("[data-theme-toggle]")
    toggle.click()
    toggle.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert toggle.get_attribute("aria-label") == "Theme: dark. Change theme"
    page.wait_for_function(f"{fill} !== '{light}'")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("[data-theme-toggle]").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme ?? ''") == ""


def test_keys_work_and_can_be_switched_off(open_page):
    page = open_page()
    page.wait_for_function(CHARTS_READY)
    page.locator("h1").click()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("?acme")
    assert page.locator("[data-filter]").input_value() == "?acme"
    page.locator("h1").click()
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.locator("#keys-enabled").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert not page.locator("#help").is_visible()


def test_stacked_tables_keep_their_meaning(open_page):
    page = open_page(width=390)
    page.wait_for_function("document.querySelector('table.stack').getAttribute('role') === 'table'")
    row = page.get_by_role("row").filter(has_text="chat · TTFT")
    assert row.get_by_role("rowheader").count() == 1
    assert row.get_by_role("cell").count() == 6
    assert row.get_by_role("cell").nth(1).get_attribute("data-label") == "Burn 5 min ×"


def test_values_past_their_age_become_a_dash_with_a_sentence(open_page):
    page = open_page()
    panel = page.locator("#ageing")
    page.wait_for_function("document.querySelector('#ageing').classList.contains('stale')")
    assert panel.locator("[data-value]").inner_text() == "—"
    assert "No update since 13:00:00" in panel.locator("[data-stale-note]").inner_text()


@pytest.mark.parametrize("age", ["", "yesterday", "2999-01-01T00:00:00Z"])
def test_no_time_a_bad_one_and_one_in_the_future_are_stale(open_page, age):
    page = open_page()
    state = page.evaluate(
        """async (age) => {
            const { touch } = await import("/static/flexband/js/ages.js");
            const panel = document.querySelector("#ageing");
            touch(panel, new Date().toISOString());
            const fresh = [panel.classList.contains("stale"), panel.querySelector("[data-value]").textContent];
            touch(panel, age);
            return [...fresh, panel.classList.contains("stale"), panel.querySelector("[data-value]").textContent];
        }""",
        age,
    )
    assert state == [False, "19", True, "—"]


def test_a_value_written_while_stale_waits_behind_the_dash(open_page):
    page = open_page()
    page.wait_for_function("document.querySelector('#ageing').classList.contains('stale')")
    seen = page.evaluate(
        """async () => {
            const { setValue, touch } = await import("/static/flexband/js/ages.js");
            const value = document.querySelector("#ageing [data-value]");
            setValue(value, "23");
            const held = value.textContent;
            touch(document.querySelector("#ageing"), new Date().toISOString());
            return [held, value.textContent];
        }"""
    )
    assert seen == ["—", "23"]


def test_times_are_the_viewers_and_billing_times_stay(open_page):
    page = open_page()
    page.wait_for_function("!document.querySelector('time[data-form]')")
    assert page.locator("#hot time").first.inner_text() == "13:00:00"
    assert page.locator("#hot time").first.get_attribute("title") == "2026-11-12 12:00:00 UTC"
    assert page.locator("time[data-zone]").inner_text() == "12 Nov 2026 13:00:00"


def test_confirm_dialog_opens_and_closes_by_keyboard(open_page):
    page = open_page()
    page.wait_for_function(CHARTS_READY)
    page.locator("[data-open-dialog]").focus()
    page.keyboard.press("Enter")
    assert page.locator("#example-confirm").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#example-confirm").is_visible()


def test_the_page_stands_without_scripts(open_page):
    page = open_page(java_script_enabled=False)
    assert page.locator("#contracts table").is_visible()
    assert "Burn of chat near 0.8" in page.locator("#chart-burn").inner_text()
    assert "12:00:00 UTC" in page.locator("#hot").inner_text()


def test_new_rows_wait_until_they_are_wanted(open_page):
    page = open_page()
    seen = page.evaluate(
        """async () => {
            const { WaitingRows } = await import("/static/flexband/js/rows.js");
            const list = document.createElement("ul"), button = document.createElement("button");
            list.innerHTML = "<li data-key=a>old</li>";
            document.body.append(list, button);
            const rows = new WaitingRows(list, button);
            const row = (key, text) => Object.assign(document.createElement("li"), { textContent: text });
            const keyed = (key, text) => { const r = row(key, text); r.dataset.key = key; return r; };
            const hidden = button.hidden;
            rows.add(keyed("a", "changed in place"));
            rows.add(keyed("b", "b"));
            rows.add(keyed("c", "c"));
            const before = [list.textContent, button.textContent];
            button.click();
            return [hidden, ...before, list.textContent, button.hidden];
        }"""
    )
    assert seen == [True, "changed in place", "+2 new", "cbchanged in place", True]
