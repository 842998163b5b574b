"""Forecasts that lists go by: kept for all budgets at once, against the limits of now, told with their age."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.budgets import kept_forecasts, spend_states
from controlplane.budgets.increases import add_increase
from controlplane.budgets.kept_forecasts import forecasts_made_at, keep_forecasts
from controlplane.budgets.models import Budget, BudgetForecast
from controlplane.budgets.queries import STATES, by_attention, standings
from controlplane.budgets.spend_states import budgets_in_state
from controlplane.budgets.tenant_queries import EXPIRING, FINE, FORECAST
from controlplane.budgets.tenant_queries import by_attention as tenants_by_attention
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.tenants.models import Tenant
from tests import factories
from tests.budgets.test_budget_actions import ADA, EUR, create, window
from tests.budgets.test_budget_forecasts import days_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def noon():
    """Of this month's first day: nearly all of it lies ahead, so that forecasts have room."""
    month = window_at(load_zone("UTC"), Calendar.MONTH, timezone.now())
    return month.start + timedelta(hours=12)


@pytest.fixture
def spending(people, noon):
    """Budgets by what is to be said of them, each of its own tenant."""
    found = {}
    for name, settled, day in (("stopped", 100, 0), ("near", 85, 0), ("forecast", 10, 20), ("fine", 10, 1)):
        row = create(factories.tenant(f"t-{name}"), now=noon)
        window(row, settled=settled, at=noon)
        days_of(row.tenant, noon, [day * EUR] * 8)
        found[name] = row
    return found


def states(now) -> dict[str, set[int]]:
    return {
        state: set(Budget.objects.filter(pk__in=budgets_in_state(*states, now=now)).values_list("pk", flat=True))
        for state, states in STATES.items()
    }


def test_the_order_of_attention_knows_forecasts_once_they_are_kept(spending, noon):
    assert {one.budget.pk: one.state for one in standings(spending.values(), noon)} == {
        row.pk: {"fine": "ok"}.get(name, name) for name, row in spending.items()
    }
    assert states(noon)["forecast"] == set() and forecasts_made_at(noon) is None
    assert keep_forecasts(noon) == len(spending)
    assert states(noon) == {name: {spending[name].pk} for name in ("stopped", "near", "forecast")}
    ordered = by_attention(Budget.objects.all(), noon).order_by("attention", "-tenant__slug")
    assert list(ordered) == [spending[name] for name in ("stopped", "near", "forecast", "fine")]
    places = dict(tenants_by_attention(Tenant.objects.all(), noon).values_list("slug", "attention"))
    assert (places["t-forecast"], places["t-fine"]) == (FORECAST, FINE) and FORECAST < EXPIRING


def test_a_limit_that_is_raised_counts_at_once_and_a_forecast_made_again_too(spending, noon):
    keep_forecasts(noon)
    row = spending["forecast"]
    add_increase(
        budget_id=row.pk, amount_nanos=10_000 * EUR, ends_at=noon + timedelta(days=2), reason="x", actor=ADA, now=noon
    )
    assert states(noon + timedelta(seconds=1))["forecast"] == set()
    later = noon + timedelta(days=3)
    keep_forecasts(later)
    assert states(later)["forecast"] == {row.pk}, "it ended"
    assert BudgetForecast.objects.count() == len(spending), "each is kept once"


def test_a_forecast_counts_for_an_hour_and_in_its_own_window_only(spending, noon):
    keep_forecasts(noon)
    last = noon + spend_states.KEPT_FOR - timedelta(seconds=1)
    assert states(last)["forecast"] and forecasts_made_at(last) == noon
    assert not states(last + timedelta(seconds=1))["forecast"]
    assert forecasts_made_at(last + timedelta(seconds=1)) is None
    assert not states(noon - timedelta(seconds=1))["forecast"], "not before it was made"
    BudgetForecast.objects.update(ends_at=noon + timedelta(minutes=5))
    assert not states(noon + timedelta(minutes=5))["forecast"]


def test_many_are_kept_in_batches_and_archived_ones_are_not(spending, noon, monkeypatch):
    monkeypatch.setattr(kept_forecasts, "BATCH", 3)
    Budget.objects.filter(pk=spending["fine"].pk).update(archived_at=noon)
    assert keep_forecasts(noon) == 3
    assert set(BudgetForecast.objects.values_list("budget_id", flat=True)) == {
        spending[name].pk for name in ("stopped", "near", "forecast")
    }


def test_the_lists_are_filtered_and_say_of_when_their_forecasts_are(people, db):
    now = timezone.now()
    over, fine = (create(factories.tenant(slug), period="week", now=now) for slug in ("t-over", "t-fine"))
    BudgetForecast.objects.create(budget=over, ends_at=now + timedelta(days=1), point_nanos=101 * EUR, made_at=now)
    client = people["finance"]
    page = client.get("/budgets/?state=forecast")
    assert [one.budget.pk for one in page.context["standings"]] == [over.pk]
    assert "Over forecast in this order: as of" in page.content.decode()
    assert [one.budget.pk for one in client.get("/budgets/").context["standings"]] == [over.pk, fine.pk]
    text = b"".join(client.get("/budgets/?format=csv").streaming_content).decode()
    assert text.index("t-over") < text.index("t-fine")
    found = client.get("/api/v1/budgets/", {"state": "forecast"}).json()["results"]
    assert [row["id"] for row in found] == [over.pk]
    assert client.get("/api/v1/budgets/", {"state": "x"}).status_code == 400
    assert "as of" not in client.get("/budgets/?sort=tenant").content.decode()
    BudgetForecast.objects.all().delete()
    for url in ("/budgets/", "/tenants/"):
        assert "No forecast of the last hour is kept" in people["admin"].get(url).content.decode()
