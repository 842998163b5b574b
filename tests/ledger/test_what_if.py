"""Questions about a month that touch nothing."""

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.core.period import load_zone, month_window
from controlplane.core.pricing import RateCard as Prices
from controlplane.core.pricing import charge
from controlplane.ledger.models import LedgerEvent, RateCard
from controlplane.ledger.what_if import compare_with_month_before, rerate
from controlplane.usage.models import RollupQuarter
from tests import factories
from tests.ledger.fleet_rows import make_fleet
from tests.ledger.test_bridge import OCTOBER, month
from tests.ledger.test_pages import roll_up

AT = OCTOBER + timedelta(days=3)
WINDOW = month_window(load_zone("UTC"), 2026, 10)


@pytest.fixture
def fleet(db):
    made = make_fleet("i1", tenants="a b", since=OCTOBER)
    lines = charge(Prices(9, 3, 20), prompt_tokens=1_000, cached_tokens=100, output_tokens=200, gpu_us=5_000_000)
    for tenant in "ab":
        roll_up(made, tenant, "chat", at=AT, nanos=(5_000, 1_000, 9_000, 0))
    # nobody paid for these
    roll_up(made, "a", "chat", at=AT, version=3, nanos=(0, 0, 0, 0))
    RateCard.objects.create(
        class_slug="chat", model=made.pool.model, effective_from=OCTOBER, prompt_nanos_per_mtok=9,
        cached_nanos_per_mtok=3, output_nanos_per_mtok=20, created_at=OCTOBER, created_by="t",
    )  # fmt: skip
    assert lines.total_nanos >= 0
    return made


def test_other_prices_are_told_by_tenant_and_nothing_is_written(fleet):
    before = (RollupQuarter.objects.count(), LedgerEvent.objects.count())
    card = Prices(10**12, 10**11, 2 * 10**12, None, 500_000)
    rows = {row.tenant: row for row in rerate(WINDOW, "chat", "llama-70b", card)}
    # half of 900 x 1,000 + 100 x 100 + 200 x 2,000 thousand nanos
    assert rows["a"].would_nanos == (900 * 10**6 + 100 * 10**5 + 200 * 2 * 10**6) // 2
    assert rows["a"].charged_nanos == 15_000 and rows["a"].requests == 10
    assert rerate(WINDOW, "bulk", "llama-70b", card) == [] and rerate(WINDOW, "chat", "none", card) == []
    assert (RollupQuarter.objects.count(), LedgerEvent.objects.count()) == before


def test_the_page_of_what_if(fleet):
    client = factories.person("viewer")
    assert "Enter prices" in client.get("/finance/what-if/?period=2026-10").content.decode()
    asked = "/finance/what-if/?period=2026-10&card=chat/llama-70b&prompt=1000&cached=100&output=2000&discount=50"
    text = client.get(asked).content.decode()
    assert "Changes nothing" in text and "+0.65" in text
    RateCard.objects.create(
        class_slug="chat", model=fleet.pool.model, prompt_nanos_per_mtok=10**12, cached_nanos_per_mtok=10**11,
        output_nanos_per_mtok=2 * 10**12, effective_from=AT, created_at=OCTOBER, created_by="fin",
    )  # fmt: skip
    text = client.get("/finance/what-if/?period=2026-10&card=chat/llama-70b&discount=50").content.decode()
    assert "+0.65" in text and 'placeholder="1000.00"' in text
    for wrong in ("&prompt=x", "&discount=101", "&discount=1e99999", "&discount=nan", "&card=no/model", "&output=-1"):
        response = client.get(asked + wrong)
        assert response.status_code == 400 and "There is a problem" in response.content.decode()
    RateCard.objects.all().delete()
    assert "no card is in force" in client.get(asked + "&cached=").content.decode(), "blank is not 0"


def test_the_month_before_is_compared_by_driver(fleet):
    month(fleet.pool, slots=2, rate=10**9, tenants=(("a", 1), ("b", 1)), days=10)
    october = compare_with_month_before(WINDOW, "UTC")
    assert october.total.before_nanos == 0 and october.total.drivers.total_nanos == october.total.after_nanos
    november = compare_with_month_before(month_window(load_zone("UTC"), 2026, 11), "UTC")
    assert november.total.drivers.total_nanos == -october.total.after_nanos
    assert sum(row.drivers.total_nanos for row in november.rows) == november.total.drivers.total_nanos
    response = factories.person("viewer").get("/finance/compare/?period=2026-10")
    text = response.content.decode()
    assert "2026-10 against 2026-09" in text and "+240.00" in text and "+480.00" in text
    empty = response.client.get("/finance/compare/?period=2026-07").content.decode()
    assert "Nothing was attributed in either month" in empty
    assert datetime(2026, 10, 1, tzinfo=UTC) == OCTOBER
