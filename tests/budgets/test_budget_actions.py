"""Budgets: what can be written, and what a lowered limit does while leases are out."""

from datetime import UTC, datetime

import pytest
from django.core.exceptions import ValidationError
from hypothesis import given
from hypothesis import strategies as st

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.budgets import actions
from controlplane.budgets.forms import BudgetForm
from controlplane.budgets.models import Budget, BudgetWindow
from controlplane.budgets.queries import standings
from controlplane.core.money import format_nanos
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.tenants.actions import Stale
from tests import factories
from tests.tenants.conftest import side_by_side

NOW = factories.NOW
ADA = Actor(id=None, name="ada", role="finance")
EUR = 1_000_000_000


@pytest.fixture
def acme(installation):
    return factories.tenant("acme")


def create(tenant, **values) -> Budget:
    defaults = {"name": "Month", "limit_nanos": 100 * EUR, "reason": "plan", "actor": ADA, "now": NOW}
    return actions.create_budget(tenant_id=tenant.pk, **{**defaults, **values})


def edit(budget: Budget, *, version: int | None = None, now=NOW, **changes) -> Budget:
    return actions.edit_budget(
        budget_id=budget.pk, version=version or budget.version, changes=changes, reason="lower", actor=ADA, now=now
    )


def window(budget: Budget, *, settled: int = 0, leased: int = 0, at=NOW) -> BudgetWindow:
    span = window_at(load_zone(budget.zone), Calendar(budget.period), at, anchor_day=budget.anchor_day)
    return BudgetWindow.objects.create(
        budget=budget, starts_at=span.start, ends_at=span.end, limit_nanos=budget.limit_nanos, hard=budget.hard,
        settled_nanos=settled * EUR, leased_nanos=leased * EUR,
    )  # fmt: skip


@pytest.mark.django_db
class TestWriting:
    def test_old_and_new_value_and_the_reason_are_kept(self, acme):
        edit(create(acme), limit_nanos=120 * EUR + 1)
        entry = AuditEntry.objects.get(action="budget.edit")
        assert entry.before == {"limit_nanos": 100 * EUR, "limit": "100.00"}
        assert entry.after == {"limit_nanos": 120 * EUR + 1, "limit": "120.000000001"}
        assert (entry.reason, entry.actor_name, entry.tenant_slug) == ("lower", "ada", "acme")

    @pytest.mark.parametrize(
        "values,field",
        [
            ({"name": " "}, "name"),
            ({"limit_nanos": -1}, "limit"),
            ({"limit_nanos": 2**63}, "limit"),
            ({"zone": "Mars/Olympus"}, "zone"),
            ({"zone": "../etc/passwd"}, "zone"),
            ({"period": "year"}, "period"),
            ({"anchor_day": 0}, "anchor_day"),
            ({"anchor_day": 32}, "anchor_day"),
            ({"period": "week", "anchor_day": 3}, "anchor_day"),
            ({"thresholds_percent": [80, 50]}, "thresholds_percent"),
            ({"thresholds_percent": [0]}, "thresholds_percent"),
            ({"thresholds_percent": [50, 50]}, "thresholds_percent"),
        ],
    )
    def test_refuses_what_cannot_work(self, values, field, acme):
        with pytest.raises(ValidationError) as caught:
            create(acme, **values)
        assert list(caught.value.message_dict) == [field]

    def test_money_needs_a_reason(self, acme):
        with pytest.raises(ValidationError):
            create(acme, reason=" ")

    def test_an_old_version_is_stale(self, acme):
        budget = create(acme)
        edit(budget, limit_nanos=1)
        with pytest.raises(Stale):
            edit(budget, version=1, limit_nanos=2)

    def test_an_archived_budget_stays_as_it_is(self, acme):
        budget = create(acme)
        archived = actions.archive_budget(budget_id=budget.pk, version=1, reason="over", actor=ADA, now=NOW)
        assert archived.archived_at == NOW
        with pytest.raises(ValidationError):
            edit(archived, limit_nanos=1)


@pytest.mark.django_db
class TestCalendar:
    def test_moves_while_nothing_was_spent(self, acme):
        budget = create(acme)
        window(budget)
        edit(budget, zone="Asia/Tokyo")
        assert not BudgetWindow.objects.exists()

    @pytest.mark.parametrize("spent", [{"settled": 1}, {"leased": 1}])
    def test_stays_once_something_was_spent(self, spent, acme):
        budget = create(acme)
        window(budget, **spent)
        with pytest.raises(ValidationError, match="archive it"):
            edit(budget, zone="Asia/Tokyo")

    def test_a_new_limit_never_resets_what_was_spent(self, acme):
        budget = create(acme)
        row = window(budget, settled=40, leased=5)
        edit(budget, limit_nanos=200 * EUR)
        row.refresh_from_db()
        assert (row.settled_nanos, row.leased_nanos, row.limit_nanos) == (40 * EUR, 5 * EUR, 200 * EUR)

    @pytest.mark.parametrize(
        "at,start",
        [
            (datetime(2026, 7, 31, 14, 59, 59, 999_000, tzinfo=UTC), datetime(2026, 6, 30, 15, tzinfo=UTC)),
            (datetime(2026, 7, 31, 15, tzinfo=UTC), datetime(2026, 7, 31, 15, tzinfo=UTC)),
        ],
    )
    def test_the_window_depends_on_zone_and_calendar_alone(self, at, start, acme):
        budget = create(acme, zone="Asia/Tokyo")
        assert standings([budget], at)[0].starts_at == start

    def test_an_anchor_beyond_a_short_months_end_is_its_last_day(self, acme):
        budget = create(acme, anchor_day=31)
        february = standings([budget], datetime(2027, 3, 15, tzinfo=UTC))[0]
        assert (february.starts_at, february.ends_at) == (
            datetime(2027, 2, 28, tzinfo=UTC), datetime(2027, 3, 31, tzinfo=UTC)
        )  # fmt: skip


@pytest.mark.django_db
class TestLowering:
    def test_goes_down_at_once_to_what_is_settled_and_leased(self, acme):
        budget = create(acme)
        row = window(budget, settled=40, leased=20)
        edit(budget, limit_nanos=30 * EUR)
        row.refresh_from_db()
        assert row.limit_nanos == 60 * EUR
        standing = standings([Budget.objects.get()], NOW)[0]
        assert standing.limit_is_lowering and standing.limit_in_force_nanos == 60 * EUR
        assert standing.left_nanos == 0 and standing.state == "stopped"

    def test_with_room_it_is_in_force_at_once(self, acme):
        budget = create(acme)
        row = window(budget, settled=10, leased=5)
        edit(budget, limit_nanos=30 * EUR)
        row.refresh_from_db()
        assert row.limit_nanos == 30 * EUR
        assert not standings([Budget.objects.get()], NOW)[0].limit_is_lowering

    def test_a_soft_budget_follows_at_once_and_a_hard_one_takes_over_what_was_settled(self, acme):
        budget = create(acme, hard=False)
        row = window(budget, settled=40)
        edit(budget, limit_nanos=30 * EUR)
        row.refresh_from_db()
        assert row.limit_nanos == 30 * EUR
        edit(Budget.objects.get(), hard=True)
        row.refresh_from_db()
        assert (row.hard, row.limit_nanos) == (True, 40 * EUR)
        assert standings([Budget.objects.get()], NOW)[0].state == "stopped"


@pytest.mark.django_db(transaction=True)
def test_of_two_edits_of_one_version_one_wins(acme):
    budget = create(acme)
    results = side_by_side(lambda: edit(budget, limit_nanos=1), lambda: edit(budget, limit_nanos=2))
    assert sorted(type(result).__name__ for result in results) == ["Budget", "Stale"]


@pytest.mark.django_db
@given(nanos=st.integers(min_value=0, max_value=2**63 - 1))
def test_money_goes_through_the_form_to_the_last_nano(nanos):
    form = BudgetForm({"limit": format_nanos(nanos)}, budget=Budget(), zone="UTC")
    form.is_valid()
    assert form.cleaned_data["limit"] == nanos


@pytest.mark.django_db
@pytest.mark.parametrize("text", ["1,234.50", "12 EUR", "-1", "1.0000000001", "NaN", "1e99", ""])
def test_the_form_says_what_is_wrong_with_other_money(text):
    form = BudgetForm({"limit": text}, budget=Budget(), zone="UTC")
    assert not form.is_valid() and "limit" in form.errors
