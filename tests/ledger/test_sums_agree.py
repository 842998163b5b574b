"""Attribution, statements, rollups and the book say one number to the nano; a chart shows the cents of its table."""

from datetime import timedelta

import pytest
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.audit.actors import Actor
from controlplane.core.cost_drivers import Drivers
from controlplane.core.money import cents_of
from controlplane.core.period import day_windows, load_zone
from controlplane.ledger.analysis_views import DRIVERS, driver_cents
from controlplane.ledger.attribution import attribute
from controlplane.ledger.models import StatementIssue
from controlplane.ledger.pages import cents_text, pivot, statement
from controlplane.ledger.periods import close_period
from controlplane.ledger.posting import balances
from controlplane.ledger.queries import charges, checks, cost_rows
from controlplane.ledger.reconciliation import month_window
from controlplane.ledger.what_if import DriverRow
from controlplane.usage.models import RollupDelta, RollupQuarter
from controlplane.usage.rollups import fold
from controlplane.usage.sketch import Sketch
from tests import factories
from tests.ledger.fleet_rows import MINUTE_US, make_fleet
from tests.ledger.test_bridge import OCTOBER
from tests.ledger.test_pages import roll_up

FIN = Actor(id=None, name="fin", role="finance")
HOURS = 2
nanos = st.integers(0, 10**12)
uses = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from(["chat", "bulk"]), st.integers(0, 30 * 96), st.integers(0, 2),
        st.tuples(nanos, nanos, nanos, nanos),
    ),
    min_size=1, max_size=12, unique_by=lambda use: use[:4],
)  # fmt: skip
busy = st.dictionaries(
    st.tuples(st.sampled_from(["i1", "f1"]), st.sampled_from("abc"), st.integers(0, HOURS * 60 - 1)),
    st.integers(1, MINUTE_US // 3), max_size=15,
)  # fmt: skip


@pytest.mark.django_db
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(uses=uses, busy=busy, rate=st.integers(1, 10**10), folded_days=st.integers(0, 31))
def test_pivot_statement_rollups_and_ledger_agree_to_the_nano(uses, busy, rate, folded_days):
    with transaction.atomic():
        fleet = make_fleet("i1 f1", tenants="a b c", since=OCTOBER, rate_nanos=rate)
        for tenant, class_, quarter, version, amounts in uses:
            roll_up(
                fleet, tenant, class_, model=RollupDelta, at=OCTOBER + timedelta(minutes=15 * quarter),
                version=version, nanos=amounts,
            )  # fmt: skip
        RollupDelta.objects.update(stages=Sketch().to_bytes())
        # a part stays unfolded, as the latest usage always is
        fold(OCTOBER + timedelta(days=folded_days))
        for (slot, tenant, minute), gpu_us in busy.items():
            fleet.use(slot, tenant, "chat", gpu_us, minute=OCTOBER + timedelta(minutes=minute))
        fleet.observe(OCTOBER, OCTOBER + timedelta(hours=HOURS))
        for hour in range(HOURS):
            starts = OCTOBER + timedelta(hours=hour)
            attribute(fleet.pool, starts, starts + timedelta(hours=1), timezone.now())
        agree(fleet)
        transaction.set_rollback(True)


def agree(fleet) -> None:
    window = month_window("2026-10", "UTC")
    rows = cost_rows(day_windows(load_zone("UTC"), window.start, window.end))
    charged = charges(window.start, window.end)
    close_period("2026-10", actor=FIN, now=window.end + timedelta(days=20), reason="generated")
    book = balances("2026-10")
    found = checks(window)

    cost = sum(row.nanos for row in rows)
    assert cost == found.intervals_nanos == found.ledger_nanos == -book[f"fleet:{fleet.pool.slug}"]
    owners = {code: amount for code, amount in book.items() if code.startswith(("tenant:", "platform:"))}
    assert sum(owners.values()) == cost
    for tenant in "abc":
        mine = sum(amount for code, amount in owners.items() if code.startswith(f"tenant:{tenant}:"))
        assert mine == sum(row.nanos for row in rows if row.tenant == tenant)
        billed = sum(amount for code, amount in book.items() if code.startswith(f"billed:{tenant}:"))
        made = statement(charges(window.start, window.end, [fleet.tenants[tenant].pk]))
        issued = StatementIssue.objects.filter(tenant_slug=tenant).first()
        assert billed == made.total_nanos == (issued.charge_nanos if issued else 0)
    whole = sum(one.nanos for one in charged)
    assert whole == sum(amount for code, amount in book.items() if code.startswith("billed:"))
    assert whole == rolled_up()
    table = pivot(rows, charged)
    assert (table.total.cents["cost"], table.total.cents["charges"]) == (cents_of(cost), cents_of(whole))
    for name in ("cost", "charges", "direct", "idle"):
        assert sum(row.cents[name] for row in table.rows if row.level == 0) == table.total.cents[name]


def rolled_up() -> int:
    """All charges as the rollups hold them."""
    return sum(
        row.charge_prompt_nanos + row.charge_cached_nanos + row.charge_output_nanos + row.charge_gpu_nanos
        for model in (RollupQuarter, RollupDelta)
        for row in model.objects.all()
    )


signed = st.integers(-(10**13), 10**13)


@given(before=st.integers(0, 10**13), volume=signed, mix=signed, price=signed, idle=signed)
def test_drivers_in_cents_add_up_along_the_row(before, volume, mix, price, idle):
    drivers = Drivers(volume, mix, price, idle)
    cents = driver_cents(DriverRow("a", before, before + drivers.total_nanos, drivers))
    assert cents["before"] + sum(cents[name] for name in DRIVERS) == cents["after"]
    assert (cents["before"], cents["after"]) == (cents_of(before), cents_of(before + drivers.total_nanos))


def test_the_comparisons_chart_shows_the_cents_of_its_table(db):
    fleet = make_fleet("i1", tenants="a b c", since=OCTOBER - timedelta(days=40), rate_nanos=3_333_333_333)
    for day, gpu_us in ((-20, 7_777_777), (-19, 1), (3, 33_333_333), (4, 59_999_999)):
        starts = OCTOBER + timedelta(days=day)
        fleet.use("i1", "abc"[day % 3], "chat", gpu_us, minute=starts)
        fleet.observe(starts, starts + timedelta(hours=1))
        attribute(fleet.pool, starts, starts + timedelta(hours=1), timezone.now())
    response = factories.person("finance").get("/finance/compare/?period=2026-10")
    total = response.context["total"]
    shown = [total["before"], *total["drivers"], total["after"]]
    bars = response.context["figure"]["data"][0]["y"]
    texts = [cents_text(round(value * 100), signed=0 < at < len(bars) - 1) for at, value in enumerate(bars)]
    assert texts == shown
    assert round(sum(bars[:-1]) * 100) == round(bars[-1] * 100)
