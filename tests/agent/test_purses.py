"""What is spent of leases is told whole, however long a request outlives the lease that pays for it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.agent.purses import CLOSED_KEEP_US, LeaseBook
from controlplane.agent.reporting import cut_report
from controlplane.core.admission_snapshot import BudgetView
from controlplane.wire.report import Lease
from tests.agent.test_reporting import reports_of

NOW = 10**9
BOUND, CHARGE = 10, 7


class Told:
    """A book with what its reports have said last of each lease, and what was really spent."""

    def __init__(self) -> None:
        self.book, self.now = LeaseBook(), NOW
        self.leases: list[Lease] = []
        self.open: list = []
        self.spent: dict[int, int] = {}
        self.reports: dict[int, int] = {}

    def lease(self, lasts_us: int = 1_000) -> None:
        self.leases.append(Lease(len(self.leases) + 1, 1, 1_000, self.now + lasts_us))
        self.answer()

    def answer(self) -> None:
        """Of a report or a question for a lease: names the leases that have not ended."""
        named = [lease for lease in self.leases if lease.expires_us > self.now]
        self.book.apply(named, [], asked_us=self.now, now_us=self.now)

    def begin(self) -> None:
        view = BudgetView(None)
        self.book.look_up(view, 1, BOUND, self.now)
        if view.purse is not None and view.purse.reserve(BOUND):
            self.open.append(view.purse)

    def end(self) -> None:
        if self.open:
            purse = self.open.pop(0)
            purse.settle(BOUND, CHARGE)
            self.spent[purse.lease_id] = self.spent.get(purse.lease_id, 0) + CHARGE

    def report(self) -> None:
        spends = self.book.spends()
        self.reports.update((spend.lease_id, spend.spent_nanos) for spend in spends if spend.spent_nanos)
        self.book.note_told(spends)

    def wait(self, us: int = CLOSED_KEEP_US + 1) -> None:
        self.now += us


def test_the_end_of_a_request_that_outlived_its_lease_is_told_before_the_lease_is_forgotten():
    told = Told()
    told.lease()
    told.begin()
    told.wait()
    told.report()
    told.answer()
    told.wait()
    told.end()
    told.answer()  # of a question between two reports
    told.report()
    assert told.reports == {1: CHARGE}
    told.answer()
    assert told.book.spends() == [], "it is told whole and was closed for long"


@given(st.lists(st.sampled_from(["lease", "begin", "begin", "end", "answer", "report", "wait"]), max_size=30))
@example(["lease", "begin", "wait", "answer", "wait", "end", "answer"])
def test_reports_tell_all_that_was_spent(steps):
    told = Told()
    for step in steps:
        getattr(told, step)()
    while told.open:
        told.end()
        told.answer()
    told.report()
    assert told.reports == told.spent


async def test_a_report_that_is_written_down_lets_its_closed_leases_go(make_agent):
    agent = await make_agent()
    leases, engine = agent.engine.leases, agent.engine
    now = engine.clock.now_us()
    leases.apply([Lease(1, 1, 1_000, now - 1)], [], asked_us=now, now_us=now)
    leases.follow_clock(0, now)
    later = now + CLOSED_KEEP_US + 1
    leases.apply([], [], asked_us=later, now_us=later)
    assert [spend.lease_id for spend in leases.spends()] == [1], "no report told of it"
    cut_report(engine, agent.spool, agent.policy, agent.live)
    assert [spend.lease_id for spend in reports_of(agent.spool)[-1].spends] == [1]
    leases.apply([], [], asked_us=later, now_us=later)
    assert leases.spends() == []
