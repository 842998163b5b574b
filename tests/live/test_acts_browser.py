"""A whole act from the panel by keyboard: the recall's effect, the reason, and what was measured, live."""

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.audit.models import AuditEntry
from controlplane.flex.models import Decision, Grant, Lend
from controlplane.jobs.models import Job
from tests.live.test_browser import Tab, chromium, elsewhere, site

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]
__all__ = ["chromium", "site"]


def add_job(scene):
    """In time with three slots for batch, not with two."""
    per_item = 1_000 * scene.pool.prefill_us_per_token + 200 * scene.pool.decode_us_per_token
    now = datetime.now(UTC)
    return Job.objects.create(
        tenant=scene.globex, workload_class=scene.bulk, pool=scene.pool, name="tight",
        items=round(18_000e6 / per_item), prompt_tokens=1_000, expected_output_tokens=200, created_by="test",
        created_at=now, deadline=now + timedelta(hours=2),
    )  # fmt: skip


def come_home(scene):
    """What the controller and the agent do about it: recalled after 0.4 s, home after 3.2 s."""
    entry = AuditEntry.objects.get(action="flex.recall")
    Lend.objects.filter(slot=scene.slots["f1"]).update(
        recalled_at=entry.at + timedelta(milliseconds=400), recall_reason="manual",
        recall_decision=Decision.objects.latest("id"), stop_admit_at=entry.at + timedelta(milliseconds=600),
        last_token_at=entry.at + timedelta(seconds=3), drained_at=entry.at + timedelta(seconds=3),
        drain_us=2_400_000, home_at=entry.at + timedelta(milliseconds=3_200),
    )  # fmt: skip
    return True


def test_a_recall_by_keyboard_from_its_effect_to_its_measure(site, chromium):
    key = elsewhere(site.session, "oncall")
    elsewhere(lambda: (site.report(19), add_job(site.scene)))
    tab = Tab(chromium, site, key)
    page = tab.page
    page.goto(f"{site.address}/pools/chat-70b/")
    page.get_by_role("link", name="Recall f1").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Recall f1", level=1).wait_for()
    effect = page.locator("#effect")
    assert "Once it is home" in effect.inner_text()
    assert "Batch requests that run on it" in effect.inner_text() and "Batch slack" in effect.inner_text()
    jobs = page.locator("#effect-jobs")
    assert "tight" in jobs.inner_text() and "Would miss it" in jobs.inner_text()
    assert jobs.get_by_role("link", name="tight").is_visible() and "globex" in jobs.inner_text()
    button = page.get_by_role("button", name="Recall f1")
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_text("There is a problem").wait_for()
    page.get_by_label("Reason").focus()
    page.keyboard.type("interactive waits")
    page.get_by_role("button", name="Recall f1").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Recall of f1").wait_for()
    assert elsewhere(lambda: [Grant.objects.get(slot=site.scene.slots["f1"]).manual_recall]) == [True]
    measured = page.locator("#measured")
    assert "after" not in measured.inner_text()
    assert elsewhere(come_home, site.scene)
    measured.get_by_text("after 3.20").wait_for(timeout=60_000)
    came = page.locator("#act-jobs")
    assert "Would miss it" in came.inner_text() and "at this pace" in came.inner_text()
    assert "2.40" in measured.inner_text() and "interactive waits" in page.content()
    assert [said for said in tab.complaints if "422" not in said] == [], "only the form without a reason was refused"
