"""Outage slices: leased in advance to each agent, counted as leased, renewed while wanted and given back after."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse
from hypothesis import given
from hypothesis import strategies as st

from controlplane.budgets.lease_settling import SpendReport, settle
from controlplane.budgets.leases import Asking, acquire, open_leases, running_low
from controlplane.budgets.models import BudgetWindow, Lease
from controlplane.budgets.outage import SLICE_LIFE, Holder, keep_outage_slices, keep_slices
from controlplane.budgets.sweep import sweep
from controlplane.core.leases import BudgetWindow as CoreWindow
from controlplane.core.leases import outage_slice_nanos
from controlplane.core.period import to_us
from controlplane.fleet.models import Agent, AgentLive
from controlplane.wire.report import LeaseSpend
from tests import factories

TWO = [Holder(1, 1), Holder(2, 1)]


def window(budget_row):
    return BudgetWindow.objects.get(budget=budget_row)


def spend(lease, spent, *, agent=1, sent=0):
    return SpendReport(agent, sent, [LeaseSpend(lease.pk, spent, 0)])


class TestSize:
    @given(
        limits=st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 10**15)), min_size=1, max_size=3),
        agents=st.integers(1, 500),
        percent=st.integers(0, 100),
    )
    def test_all_agents_together_stay_within_the_percentage_and_half_of_what_is_left(self, limits, agents, percent):
        windows = [CoreWindow("acme", "day", 0, limit, used, 0) for limit, used in limits]
        size = outage_slice_nanos(windows, agents=agents, percent=percent)
        for row in windows:
            assert 0 <= size * agents <= row.limit_nanos * percent / 100
            assert 2 * size * agents <= row.remaining_nanos

    @pytest.mark.parametrize(("agents", "percent"), [(0, 5), (1, -1), (1, 101)])
    def test_what_makes_no_sense_is_refused(self, agents, percent):
        with pytest.raises(ValueError, match="a slice needs"):
            outage_slice_nanos([CoreWindow("acme", "day", 0, 1, 0, 0)], agents=agents, percent=percent)


def test_each_agent_holds_its_part_and_it_counts_as_leased_on_every_level(budget, in_transaction, noon):
    day, month = budget(limit=1_000), budget(limit=9_000, tenant=budget.parent, period="month")
    assert in_transaction(keep_slices, budget.child.pk, TWO, noon, percent=10) == 2
    assert window(day).leased_nanos == window(month).leased_nanos == 100
    told = in_transaction(open_leases, [(1, 1), (2, 1)])
    assert [(lease.amount_nanos, lease.outage) for leases in told.values() for lease in leases] == [(50, True)] * 2
    assert told[1][0].expires_us == to_us(noon + SLICE_LIFE)
    assert in_transaction(keep_slices, budget.child.pk, TWO, noon, percent=10) == 0, "nothing to do twice"


def test_a_slice_is_no_part_of_ordinary_leasing(budget, in_transaction, noon):
    budget(limit=1_000)
    in_transaction(keep_slices, budget.child.pk, TWO, noon, percent=10)
    granted = in_transaction(acquire, Asking(1, 1, budget.child.pk, 20), noon, unless_held=True)
    assert granted.lease is not None and not granted.lease.outage
    in_transaction(settle, [spend(Lease.objects.filter(outage=True, agent_id=1).get(), 40)], noon)
    assert in_transaction(running_low, [(1, 1)], noon) == [], "a spent slice asks for no ordinary lease"


def test_it_is_renewed_at_half_its_life_and_filled_up_when_half_is_gone(budget, in_transaction, noon):
    row = budget(limit=1_000)
    in_transaction(keep_slices, budget.child.pk, TWO, noon, percent=10)
    first, second = Lease.objects.order_by("agent_id")
    in_transaction(settle, [spend(first, 24)], noon)
    assert in_transaction(keep_slices, budget.child.pk, TWO, noon, percent=10) == 0
    in_transaction(settle, [spend(first, 30)], noon)
    assert in_transaction(keep_slices, budget.child.pk, TWO, noon, percent=10) == 1
    first.refresh_from_db()
    assert (first.amount_nanos - first.spent_nanos, window(row).settled_nanos, window(row).leased_nanos) == (
        50,
        30,
        100,
    )
    later = noon + SLICE_LIFE / 2 + timedelta(seconds=1)
    assert in_transaction(keep_slices, budget.child.pk, TWO, later, percent=10) == 2
    second.refresh_from_db()
    assert second.expires_at == later + SLICE_LIFE
    assert Lease.objects.count() == 2


def test_what_is_not_renewed_goes_back_unused_with_the_agents_next_report(budget, in_transaction, noon):
    row = budget(limit=1_000)
    in_transaction(keep_slices, budget.child.pk, [Holder(1, 1)], noon, percent=10)
    lease = Lease.objects.get()
    after = noon + SLICE_LIFE + timedelta(seconds=1)
    assert window(row).leased_nanos == 100, "counted until the agent says that it is over"
    in_transaction(settle, [spend(lease, 0, sent=to_us(after))], after)
    assert (window(row).leased_nanos, window(row).settled_nanos) == (0, 0)
    assert Lease.objects.get().state == "closed"


def test_it_ends_with_its_window_and_the_next_window_gives_a_new_one(budget, in_transaction, noon):
    budget(limit=1_000)
    late = noon.replace(hour=23, minute=50)
    in_transaction(keep_slices, budget.child.pk, [Holder(1, 1)], late, percent=10)
    assert Lease.objects.get().expires_at == noon.replace(hour=0) + timedelta(days=1)
    in_transaction(keep_slices, budget.child.pk, [Holder(1, 1)], late + timedelta(minutes=11), percent=10)
    assert Lease.objects.filter(outage=True).count() == 2


def test_slices_take_at_most_their_percentage_whoever_comes_and_goes(budget, in_transaction, noon):
    row = budget(limit=1_000)
    for count in range(1, 12):
        holders = [Holder(agent, 1) for agent in range(1, count + 1)]
        in_transaction(keep_slices, budget.child.pk, holders, noon, percent=10)
        assert window(row).leased_nanos <= 100


def test_a_budget_that_is_used_up_gives_none(budget, in_transaction, noon):
    row = budget(limit=1_000)
    in_transaction(acquire, Asking(9, 1, budget.child.pk, 1_000), noon)
    assert in_transaction(keep_slices, budget.child.pk, TWO, noon, percent=10) == 0
    assert window(row).leased_nanos == 1_000


def test_no_hard_budget_needs_none(budget, in_transaction, noon):
    budget(limit=1_000, hard=False)
    assert in_transaction(keep_slices, budget.child.pk, TWO, noon, percent=10) == 0


class TestWhoHoldsOne:
    @pytest.fixture
    def fleet(self, budget, noon):
        """An agent that reported, one that is silent, and a tenant whose posture is open."""
        pool = factories.pool("llama")
        budget.child.outage_posture, budget.child.classes = "open", [pool.interactive_class]
        budget.child.save()
        factories.workload_class(pool.interactive_class)
        for name, at in (("heard", noon), ("silent", noon - timedelta(minutes=5))):
            agent = factories.agent(pool, name)
            Agent.objects.filter(pk=agent.pk).update(state="active", epoch=3)
            AgentLive.objects.create(agent=agent, epoch=3, seq=1, reported_at=at)
        budget(limit=1_000)
        return pool

    def holders(self):
        names = dict(Agent.objects.values_list("pk", "name"))
        return [(names[row.agent_id], row.epoch) for row in Lease.objects.filter(outage=True)]

    def test_agents_that_report_and_serve_the_tenant(self, fleet, noon, settings):
        settings.OUTAGE_SLICE_PERCENT = 10
        assert sweep(noon).slices == 1
        assert self.holders() == [("heard", 3)]
        assert Lease.objects.get().amount_nanos == 100

    def test_the_tenants_page_names_it(self, fleet, budget, noon):
        assert sweep(noon).slices == 1
        page = factories.person("viewer").get(reverse("tenant", args=[budget.child.slug]), {"tab": "budgets"})
        assert page.content.decode().count("outage slice") == 1

    def test_none_for_a_closed_posture(self, fleet, budget, noon):
        budget.child.outage_posture = "closed"
        budget.child.save()
        assert keep_outage_slices(noon) == 0

    def test_none_for_a_pool_that_does_not_serve_the_tenant(self, fleet, budget, noon):
        budget.child.classes = ["elsewhere"]
        budget.child.save()
        assert keep_outage_slices(noon) == 0

    def test_none_where_the_setting_says_so(self, fleet, noon, settings):
        settings.OUTAGE_SLICE_PERCENT = 0
        assert keep_outage_slices(noon) == 0
