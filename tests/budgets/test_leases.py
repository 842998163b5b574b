"""Hard budgets: settled + leased never over the limit, whoever asks how often at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from random import Random

from controlplane.budgets.lease_settling import SpendReport, close_epochs, settle
from controlplane.budgets.leases import OPEN_MAX, Asking, acquire, open_leases, running_low
from controlplane.budgets.models import BudgetWindow, Lease
from controlplane.core.period import to_us
from controlplane.wire.report import LeaseSpend


def asking(tenant, need, agent=1, epoch=1):
    return Asking(agent, epoch, tenant.pk, need)


def window(budget_row):
    return BudgetWindow.objects.get(budget=budget_row)


def spend(lease, spent, reserved=0, *, agent=1, sent=0):
    return SpendReport(agent, sent, [LeaseSpend(lease.lease_id, spent, reserved)])


def test_a_lease_is_taken_out_of_every_level_and_window(budget, in_transaction, noon):
    day = budget(limit=1_000)
    month = budget(limit=10_000, tenant=budget.parent, period="month")
    granted = in_transaction(acquire, asking(budget.child, 100), noon)
    assert granted.lease.amount_nanos == 100
    assert window(day).leased_nanos == window(month).leased_nanos == 100
    assert granted.lease.expires_us == to_us(noon + timedelta(minutes=10))


def test_a_lease_ends_with_its_window(budget, in_transaction, noon):
    budget(limit=1_000)
    late = noon.replace(hour=23, minute=58)
    lease = in_transaction(acquire, asking(budget.child, 100), late).lease
    assert lease.expires_us == to_us(noon.replace(hour=0, minute=0) + timedelta(days=1))


def test_no_hard_budget_needs_no_lease(budget, in_transaction, noon):
    budget(limit=10, hard=False)
    granted = in_transaction(acquire, asking(budget.child, 100), noon)
    assert (granted.lease, granted.exhausted) == (None, None)


def test_the_blocking_level_and_window_are_named(budget, in_transaction, noon):
    budget(limit=1_000)
    budget(limit=99, tenant=budget.parent, name="group cap")
    granted = in_transaction(acquire, asking(budget.child, 100), noon)
    assert granted.lease is None
    assert granted.exhausted.budget == "group: group cap (day from 2026-11-29T00:00:00Z)"
    assert granted.exhausted.ends_us == to_us(noon.replace(hour=0) + timedelta(days=1))


def test_spends_are_totals_and_repeats_change_nothing(budget, in_transaction, noon):
    row = budget(limit=1_000)
    lease = in_transaction(acquire, asking(budget.child, 400), noon).lease
    for total in (100, 100, 250, 100):
        in_transaction(settle, [spend(lease, total, reserved=50)], noon)
    found = window(row)
    assert (found.settled_nanos, found.leased_nanos) == (250, 150)


def test_a_spend_over_the_amount_is_cut_and_told(budget, in_transaction, noon):
    row = budget(limit=1_000)
    lease = in_transaction(acquire, asking(budget.child, 400), noon).lease
    (told,) = in_transaction(settle, [spend(lease, 500)], noon)
    assert (told.amount_nanos, told.spent_nanos) == (400, 500)
    assert (window(row).settled_nanos, window(row).leased_nanos) == (400, 0)


def test_another_agents_spend_is_not_taken(budget, in_transaction, noon):
    row = budget(limit=1_000)
    lease = in_transaction(acquire, asking(budget.child, 400), noon).lease
    in_transaction(settle, [spend(lease, 300, agent=2)], noon)
    assert window(row).settled_nanos == 0


def test_an_ended_lease_goes_back_once_nothing_is_reserved(budget, in_transaction, noon):
    row = budget(limit=1_000)
    lease = in_transaction(acquire, asking(budget.child, 400), noon).lease
    after = lease.expires_us + 1
    in_transaction(settle, [spend(lease, 100, reserved=50, sent=after)], noon)
    assert window(row).leased_nanos == 300, "a running request may still spend it"
    in_transaction(settle, [spend(lease, 140, sent=lease.expires_us - 1)], noon)
    assert window(row).leased_nanos == 260, "it was said before the end: the agent may have reserved since"
    in_transaction(settle, [spend(lease, 150, sent=after)], noon)
    assert (window(row).settled_nanos, window(row).leased_nanos) == (150, 0)
    assert Lease.objects.get().state == "closed"
    in_transaction(settle, [spend(lease, 150, sent=after)], noon)
    assert (window(row).settled_nanos, window(row).leased_nanos) == (150, 0)


def test_a_silent_agents_lease_stays_counted_until_its_epoch_is_sealed(budget, in_transaction, noon):
    row = budget(limit=1_000)
    lease = in_transaction(acquire, asking(budget.child, 400), noon).lease
    in_transaction(settle, [spend(lease, 100)], noon)
    later = noon + timedelta(hours=5)
    assert in_transaction(acquire, asking(budget.child, 700, agent=2), later).lease is None
    in_transaction(close_epochs, [(1, 1)], later)
    assert (window(row).settled_nanos, window(row).leased_nanos) == (100, 0)
    assert in_transaction(acquire, asking(budget.child, 700, agent=2), later).lease is not None


def test_a_lowered_limit_takes_what_is_free_and_never_breaks_what_is_out(budget, in_transaction, noon):
    row = budget(limit=1_000)
    in_transaction(acquire, asking(budget.child, 600), noon)
    row.limit_nanos = 100
    row.save(update_fields=["limit_nanos"])
    granted = in_transaction(acquire, asking(budget.child, 1), noon)
    assert granted.lease is None
    assert window(row).limit_nanos == 600
    row.limit_nanos = 2_000
    row.save(update_fields=["limit_nanos"])
    assert in_transaction(acquire, asking(budget.child, 1), noon).lease is not None
    assert window(row).limit_nanos == 2_000


def test_answers_carry_all_open_leases_of_the_present_epoch(budget, in_transaction, noon):
    budget(limit=1_000)
    first = in_transaction(acquire, asking(budget.child, 100), noon).lease
    second = in_transaction(acquire, asking(budget.child, 100), noon).lease
    in_transaction(acquire, asking(budget.child, 100, epoch=2), noon)
    assert in_transaction(open_leases, [(1, 1)])[1] == [first, second]


def test_beyond_four_leases_the_newest_is_raised(budget, in_transaction, noon):
    row = budget(limit=10_000)
    made = [in_transaction(acquire, asking(budget.child, 100), noon).lease for _ in range(OPEN_MAX)]
    raised = in_transaction(acquire, asking(budget.child, 300), noon + timedelta(minutes=1)).lease
    assert (raised.lease_id, raised.amount_nanos) == (made[-1].lease_id, 400)
    assert raised.expires_us == made[-1].expires_us
    assert window(row).leased_nanos == 700
    assert in_transaction(open_leases, [(1, 1)])[1] == [*made[:-1], raised]
    # of all four nothing can be used soon: a new one, out of the budgets that hold now
    later = in_transaction(acquire, asking(budget.child, 100), noon + timedelta(minutes=9)).lease
    assert later.lease_id > raised.lease_id
    # another agent and another epoch have their own
    for other in (asking(budget.child, 100, agent=2), asking(budget.child, 100, epoch=2)):
        assert in_transaction(acquire, other, noon).lease.amount_nanos == 100


def test_a_raised_lease_keeps_what_was_spent_and_goes_back_once(budget, in_transaction, noon):
    row = budget(limit=10_000)
    lease = [in_transaction(acquire, asking(budget.child, 100), noon).lease for _ in range(OPEN_MAX)][-1]
    in_transaction(settle, [spend(lease, 80, reserved=20)], noon)
    raised = in_transaction(acquire, asking(budget.child, 500), noon).lease
    assert raised.lease_id == lease.lease_id
    in_transaction(settle, [spend(raised, 450)], noon)
    in_transaction(close_epochs, [(1, 1)], noon)
    assert (window(row).settled_nanos, window(row).leased_nanos) == (450, 0)


def test_a_lease_of_other_windows_is_not_raised(budget, in_transaction, noon):
    budget(limit=10_000)
    first = [in_transaction(acquire, asking(budget.child, 100), noon).lease for _ in range(OPEN_MAX)]
    week = budget(limit=10_000, tenant=budget.parent, period="week", name="week")
    lease = in_transaction(acquire, asking(budget.child, 100), noon).lease
    assert lease.lease_id not in {one.lease_id for one in first}
    assert window(week).leased_nanos == 100


def test_an_agent_with_enough_in_hand_gets_no_more(budget, in_transaction, noon):
    row = budget(limit=10_000)
    lease = in_transaction(acquire, asking(budget.child, 400), noon).lease
    assert in_transaction(acquire, asking(budget.child, 100), noon, unless_held=True).lease == lease
    assert window(row).leased_nanos == 400
    in_transaction(settle, [spend(lease, 0, reserved=10)], noon)
    assert in_transaction(acquire, asking(budget.child, 100), noon, unless_held=True).lease.lease_id > lease.lease_id


def test_a_lease_that_runs_low_is_topped_up_only_when_it_is_used(budget, in_transaction, noon):
    budget(limit=10_000)
    lease = in_transaction(acquire, asking(budget.child, 100), noon).lease
    assert in_transaction(running_low, [(1, 1)], noon) == []
    in_transaction(settle, [spend(lease, 30, reserved=10)], noon)
    assert in_transaction(running_low, [(1, 1)], noon) == []
    in_transaction(settle, [spend(lease, 40, reserved=10)], noon)
    (low,) = in_transaction(running_low, [(1, 1)], noon)
    assert (low.tenant_id, low.need_nanos) == (budget.child.pk, 100)


def test_fifty_parallel_askings_for_ten_tenths(budget, in_transaction, noon):
    row = budget(limit=1_000)
    with ThreadPoolExecutor(20) as threads:
        granted = list(
            threads.map(lambda at: in_transaction(acquire, asking(budget.child, 100, agent=at), noon), range(50))
        )
    assert sum(one.lease is not None for one in granted) == 10
    assert sum(one.exhausted is not None for one in granted) == 40
    assert window(row).leased_nanos == 1_000


def test_twenty_threads_of_everything_keep_the_invariant_and_end_even(budget, in_transaction, noon):
    """Random leases, spends and seals of several agents on nested budgets; the CHECK would break the transaction."""
    child, parent = budget(limit=40_000), budget(limit=50_000, tenant=budget.parent)
    sibling_budget = budget(limit=40_000, tenant=budget.parent, period="week", name="week")

    def agent(number):
        random = Random(number)
        spent, leases = {}, {}
        for _ in range(12):
            granted = in_transaction(acquire, asking(budget.child, random.randrange(1, 900), agent=number), noon)
            if granted.lease:
                leases[granted.lease.lease_id] = granted.lease
                spent.setdefault(granted.lease.lease_id, 0)
            for lease in leases.values():
                spent[lease.lease_id] = min(lease.amount_nanos, spent[lease.lease_id] + random.randrange(300))
            said = [LeaseSpend(lease_id, total, 0) for lease_id, total in spent.items()]
            for _ in range(random.randrange(1, 3)):
                in_transaction(settle, [SpendReport(number, 0, said)], noon)
        in_transaction(close_epochs, [(number, 1)], noon)
        return sum(spent.values())

    with ThreadPoolExecutor(20) as threads:
        spent = sum(threads.map(agent, range(20)))
    for row in (child, parent, sibling_budget):
        found = window(row)
        assert (found.settled_nanos, found.leased_nanos) == (spent, 0)
        assert found.settled_nanos <= found.limit_nanos
