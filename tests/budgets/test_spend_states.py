"""Whether a budget is used up is one rule: as a value and as SQL it says the same of every budget."""

from datetime import timedelta

from django.utils import timezone
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from controlplane.budgets.models import Budget, BudgetIncrease, BudgetWindow
from controlplane.budgets.queries import standings
from controlplane.budgets.spend_states import NEAR, OK, OVER, STOPPED, spend_state, tenants_in_state
from controlplane.tenants.models import Tenant
from tests import factories
from tests.budgets.test_budget_actions import create, window

AMOUNTS = st.integers(0, 20) | st.integers(0, 10**18)


def test_the_edges():
    def state(settled, leased, limit, hard=True):
        return spend_state(settled_nanos=settled, leased_nanos=leased, limit_nanos=limit, hard=hard)

    assert (state(10, 0, 10), state(10, 0, 10, hard=False)) == ("stopped", "over")
    assert (state(0, 8, 10), state(3, 4, 10), state(7, 1, 10)) == ("near", "ok", "near")
    assert (state(0, 0, 0), state(2, 0, 3), state(0, 10**18 * 4 // 5, 10**18)) == ("stopped", "ok", "near")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, st.booleans(), st.booleans()), min_size=1, max_size=6))
@example([(3, 1, 5, 0, True, True), (3, 1, 4, 1, True, True), (7, 0, 9, 0, False, True), (0, 0, 0, 0, True, False)])
def test_pages_and_the_database_agree(installation, given_budgets):
    now = timezone.now()
    Budget.objects.update(archived_at=now)
    rows = []
    for settled, leased, limit, raised, hard, drawn_on in given_budgets:
        row = create(factories.tenant(f"t{Budget.objects.count()}"), now=now, hard=hard)
        Budget.objects.filter(pk=row.pk).update(limit_nanos=limit)
        if drawn_on:
            window(row, at=now)
            # past the guard of a hard window: what is asked is only what both rules say of it
            BudgetWindow.objects.filter(budget=row).update(
                settled_nanos=settled, leased_nanos=leased, limit_nanos=limit + settled + leased
            )
        for start in (timedelta(), timedelta(days=400)):
            if raised:
                BudgetIncrease.objects.create(
                    budget=row, amount_nanos=raised, starts_at=now + start, ends_at=now + start + timedelta(days=1),
                    reason="x", made_at=now, made_by="fin",
                )  # fmt: skip
        rows.append(row.pk)
    budgets = Budget.objects.filter(pk__in=rows).select_related("tenant").order_by("pk")
    by_database = {
        tenant: state
        for state in (STOPPED, OVER, NEAR, OK)
        for tenant in Tenant.objects.filter(pk__in=tenants_in_state(state, now=now)).values_list("pk", flat=True)
    }
    assert by_database == {one.budget.tenant_id: one.state for one in standings(budgets, now)}
