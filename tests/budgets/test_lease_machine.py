"""Any order of asking, spending, ending, sealing, rolling over, changing and increasing limits for a time, and of jobs
that reserve, run and end, keeps settled + leased <= limit: three windows of two levels hold at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from controlplane.audit.actors import Actor
from controlplane.budgets.increase_queries import in_force, not_over
from controlplane.budgets.increases import AT_ONCE_MAX, add_increase, end_increase
from controlplane.budgets.job_reservations import JobNeed, fund, release, reserve
from controlplane.budgets.lease_settling import SpendReport, Waiver, close_epochs, settle
from controlplane.budgets.leases import OPEN_MAX, RENEW_BEFORE, Asking, acquire, open_leases
from controlplane.budgets.models import Budget, BudgetIncrease, BudgetNotice, BudgetWindow, Lease, LeaseWindow
from controlplane.budgets.outage import Holder, keep_slices
from controlplane.budgets.sweep import sweep
from controlplane.core.period import to_us
from controlplane.exchange.database import connection
from controlplane.wire.report import LeaseSpend

ADA = Actor(id=None, name="ada", role="finance")


def in_transaction(function, *arguments):
    with connection() as held, held.transaction(), held.cursor() as cursor:
        return function(cursor, *arguments)


def limit_at(budget, now):
    """Reckoned from limit and increases alone, beside what windows keep for themselves."""
    raised = BudgetIncrease.objects.filter(budget=budget, starts_at__lte=now)
    return budget.limit_nanos + sum(row.amount_nanos for row in raised if (row.ended_at or row.ends_at) > now)


class LeaseMachine(RuleBasedStateMachine):
    """Agents are honest: they spend at most what a lease holds and stop at its end. Everything else is arbitrary."""

    budget = None

    def __init__(self) -> None:
        super().__init__()
        LeaseWindow.objects.all().delete()
        Lease.objects.all().delete()
        BudgetNotice.objects.all().delete()
        BudgetIncrease.objects.all().delete()
        BudgetWindow.objects.all().delete()
        Budget.objects.all().delete()
        self.child = self.budget(limit=1_000)
        self.month = self.budget(limit=1_800, name="anchored", period="month", anchor_day=25, zone="Asia/Kolkata")
        self.parent = self.budget(limit=1_500, tenant=self.budget.parent, period="week")
        self.now = datetime(2026, 10, 24, 12, tzinfo=UTC)
        self.held: dict[int, dict] = {}
        self.spent = self.waived = 0
        self.jobs: dict[UUID, dict] = {}
        self.submitted = 0
        self.used: dict[int, int] = {}

    @rule(
        agent=st.integers(1, 3),
        need=st.one_of(st.integers(1, 700), st.integers(1, 20)),
        waiting=st.sampled_from([0, 0, 90, 2_000]),
        again=st.booleans(),
    )
    def ask(self, agent, need, waiting, again):
        asking = Asking(agent, 1, self.budget.child.pk, need, waiting)
        known = set(self.held)
        with connection() as held, held.transaction(), held.cursor() as cursor:
            granted = acquire(cursor, asking, self.now, unless_held=again)
        assert (granted.lease is None) != (granted.exhausted is None)
        if granted.lease:
            assert granted.lease.amount_nanos >= need
            # a lease that was raised goes on with what was spent of it
            one = self.held.setdefault(granted.lease.lease_id, {"agent": agent, "spent": 0})
            one["lease"] = granted.lease
            if granted.lease.lease_id not in known:
                ends = [row.ended_at or row.ends_at for row in BudgetIncrease.objects.filter(in_force(self.now))]
                assert granted.lease.expires_us <= min(map(to_us, ends), default=2**62), "it ends with what allowed it"

    @rule(agents=st.lists(st.integers(1, 3), min_size=1, unique=True), percent=st.sampled_from([0, 5, 60, 100]))
    def keep_slices_for_outages(self, agents, percent):
        holders = [Holder(agent, 1) for agent in agents]
        with connection() as held, held.transaction(), held.cursor() as cursor:
            keep_slices(cursor, self.budget.child.pk, holders, self.now, percent=percent)
            for agent, leases in open_leases(cursor, [(agent, 1) for agent in agents]).items():
                for lease in leases:
                    if lease.outage:
                        self.held.setdefault(lease.lease_id, {"agent": agent, "spent": 0})["lease"] = lease
        for row in BudgetWindow.objects.filter(starts_at__lte=self.now, ends_at__gt=self.now):
            out = Lease.objects.filter(windows__window=row, outage=True, state="open")
            assert sum(lease.amount_nanos - lease.spent_nanos for lease in out) <= row.limit_nanos

    @rule(amount=st.one_of(st.integers(1, 900), st.integers(1, 60)))
    def submit_job(self, amount):
        self.submitted += 1
        job = UUID(int=self.submitted)
        with connection() as held, held.transaction(), held.cursor() as cursor:
            found = reserve(cursor, tenant_id=self.budget.child.pk, job=job, amount_nanos=amount, now=self.now)
        assert (found.amount_nanos == amount) != (found.blocked_by is not None)
        if found.amount_nanos:
            self.jobs[job] = {"reserved": amount, "ended": False}
        else:
            assert found.blocked_by.remaining_nanos < amount

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), agent=st.integers(1, 3), needs=st.integers(1, 200))
    def run_items(self, data, agent, needs):
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        with connection() as held, held.transaction(), held.cursor() as cursor:
            told_free = fund(cursor, agent, 1, [JobNeed(job, needs)], self.now).get(job)
            told = open_leases(cursor, [(agent, 1)]).get(agent, [])
        mine = [lease for lease in told if lease.job == str(job)]
        for lease in mine:
            self.held.setdefault(lease.lease_id, {"agent": agent, "spent": 0})["lease"] = lease
        usable = Lease.objects.filter(job=job, agent_id=agent, state="open", expires_at__gte=self.now + RENEW_BEFORE)
        free = sum(row.amount_nanos - row.spent_nanos - row.reserved_nanos for row in usable)
        rest = sum(Lease.objects.filter(job=job, agent_id=None, state="open").values_list("amount_nanos", flat=True))
        assert told_free in (None, free)
        assert free >= needs or rest == 0, "while the reservation has money, no item is without"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def end_job(self, data):
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        in_transaction(release, [job], self.now)
        self.jobs[job]["ended"] = True

    @precondition(lambda self: self.held)
    @rule(data=st.data(), share=st.floats(0, 1), reserved=st.sampled_from([0, 0, 5]), repeats=st.integers(1, 2))
    def spend(self, data, share, reserved, repeats):
        one = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        lease = one["lease"]
        more = int((lease.amount_nanos - one["spent"]) * share)
        one["spent"] += more
        self.spent += more
        said = SpendReport(one["agent"], to_us(self.now), [LeaseSpend(lease.lease_id, one["spent"], reserved)])
        for _ in range(repeats):
            assert in_transaction(settle, [said], self.now) == []
        if to_us(self.now) > lease.expires_us and not reserved:
            del self.held[lease.lease_id]

    @rule(data=st.data(), share=st.floats(0, 1), stranger=st.booleans())
    def waive(self, data, share, stranger):
        """A charge among what was spent is taken back, of a lease that may be closed; a stranger's word counts not."""
        spent = {row.pk: row for row in Lease.objects.filter(spent_nanos__gt=0, agent_id__isnull=False)}
        if not spent:
            return
        row = spent[data.draw(st.sampled_from(sorted(spent)))]
        left = row.spent_nanos - row.waived_nanos
        waiver = Waiver(9 if stranger else row.agent_id, row.pk, int(left * share))
        assert in_transaction(settle, [], self.now, [], [waiver]) == []
        self.waived += 0 if stranger else waiver.nanos

    @rule(agent=st.integers(1, 3))
    def seal(self, agent):
        in_transaction(close_epochs, [(agent, 1)], self.now)
        told = [lease_id for lease_id, one in self.held.items() if one["agent"] == agent]
        for lease_id in told:
            del self.held[lease_id]

    @rule(minutes=st.sampled_from([1, 11, 600, 1_500]))
    def wait(self, minutes):
        over = list(BudgetIncrease.objects.filter(not_over(self.now)).order_by("id"))
        self.now += timedelta(minutes=minutes)
        for row in over:
            if row.ends_at <= self.now:
                self.ask_for_more_than_is_left(row.budget)

    @rule(limit=st.integers(0, 3_000))
    def change_limit(self, limit):
        self.child.limit_nanos = limit
        self.child.save(update_fields=["limit_nanos"])

    @rule(
        level=st.sampled_from(["child", "month", "parent"]),
        amount=st.integers(1, 900),
        delay=st.sampled_from([0, 0, 5]),
        minutes=st.sampled_from([1, 8, 700]),
    )
    def increase_for_a_time(self, level, amount, delay, minutes):
        starts = self.now + timedelta(minutes=delay)
        if BudgetIncrease.objects.filter(not_over(self.now), budget=getattr(self, level)).count() < AT_ONCE_MAX:
            add_increase(
                budget_id=getattr(self, level).pk, amount_nanos=amount, starts_at=starts,
                ends_at=starts + timedelta(minutes=minutes), reason="launch", actor=ADA, now=self.now,
            )  # fmt: skip

    @precondition(lambda self: BudgetIncrease.objects.filter(not_over(self.now)).exists())
    @rule(data=st.data())
    def end_an_increase(self, data):
        rows = BudgetIncrease.objects.filter(not_over(self.now)).order_by("id").values_list("pk", flat=True)
        row = end_increase(increase_id=data.draw(st.sampled_from(list(rows))), reason="over", actor=ADA, now=self.now)
        self.ask_for_more_than_is_left(row.budget)

    def ask_for_more_than_is_left(self, budget):
        left = max(0, limit_at(budget, self.now) - self.used_now(budget))
        with connection() as held, held.transaction(), held.cursor() as cursor:
            granted = acquire(cursor, Asking(1, 1, self.budget.child.pk, left + 1), self.now)
        assert granted.lease is None, "an increase that is over allows nothing"

    def used_now(self, budget):
        window = BudgetWindow.objects.filter(budget=budget, starts_at__lte=self.now, ends_at__gt=self.now).first()
        return window.settled_nanos + window.leased_nanos if window else 0

    @rule()
    def look_at_the_windows(self):
        sweep(self.now)

    @invariant()
    def nothing_grows_beyond_the_limit_of_this_instant(self):
        for window in BudgetWindow.objects.select_related("budget"):
            used = window.settled_nanos + window.leased_nanos
            if used > self.used.get(window.pk, 0):
                limit = limit_at(window.budget, self.now)
                assert used <= limit, f"{used} of {limit} in {window.budget.name}"
            self.used[window.pk] = used

    @invariant()
    def nothing_is_overspent(self):
        for window in BudgetWindow.objects.all():
            assert window.settled_nanos + window.leased_nanos <= window.limit_nanos
            assert window.leased_nanos >= 0

    @invariant()
    def nobody_has_more_leases_than_it_can_use(self):
        lasting = Lease.objects.filter(state="open", outage=False, job=None, expires_at__gt=self.now + RENEW_BEFORE)
        for agent in (1, 2, 3):
            assert lasting.filter(agent_id=agent).count() <= OPEN_MAX

    @invariant()
    def a_job_holds_no_more_than_it_reserved(self):
        for job, told in self.jobs.items():
            rows = Lease.objects.filter(job=job)
            out = sum(row.amount_nanos for row in rows.filter(state="open"))
            gone = sum(row.spent_nanos for row in rows.filter(state="closed"))
            gone -= sum(rows.values_list("waived_nanos", flat=True))
            assert out + gone <= told["reserved"]
            if not told["ended"]:
                assert out + gone == told["reserved"], "what a lease did not spend went back to its job"
            else:
                assert not rows.filter(agent_id=None, state="open").exists()

    @invariant()
    def counters_are_what_leases_say(self):
        for window in BudgetWindow.objects.all():
            leases = Lease.objects.filter(windows__window=window)
            assert window.settled_nanos == sum(lease.spent_nanos - lease.waived_nanos for lease in leases)
            assert window.leased_nanos == sum(
                lease.amount_nanos - lease.spent_nanos for lease in leases if lease.state == "open"
            )

    @invariant()
    def every_reported_nano_is_settled_once_per_level(self):
        for row in (self.child, self.month, self.parent):
            settled = sum(BudgetWindow.objects.filter(budget=row).values_list("settled_nanos", flat=True))
            assert settled == self.spent - self.waived


@pytest.mark.slow
def test_the_lease_invariant_holds_whatever_happens(budget):
    LeaseMachine.budget = staticmethod(budget)
    run_state_machine_as_test(
        LeaseMachine,
        settings=settings(
            max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
