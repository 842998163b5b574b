"""Shares sum to the limit at every instant, follow demand, and count silent agents for three intervals."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.budgets.divisions import Shares, least_shares
from controlplane.budgets.shares import (
    SILENCE,
    Asked,
    DemandRow,
    Divided,
    Limit,
    Snapshot,
    divide,
    forget_demand,
    note_demand,
)
from controlplane.core.leases import divide_limit, divide_places
from controlplane.exchange.database import connection
from controlplane.wire.report import Demand


@given(
    st.integers(0, 500),
    st.dictionaries(st.integers(1, 40), st.integers(0, 1_000), min_size=1, max_size=12),
    st.floats(0.1, 200),
)
@settings(max_examples=80)
def test_shares_sum_to_the_limit(concurrency, asked, rate):
    snapshot = Snapshot(
        [Limit("t", 7, concurrency, rate, None)], sorted(asked), {("t", 7): {a: Asked(n, 0) for a, n in asked.items()}}
    )
    shares = [shares[0] for shares in divide(snapshot, sorted(asked)).values()]
    assert sum(share.concurrency for share in shares) == concurrency
    total = sum(share.requests_per_s for share in shares)
    assert rate - 0.0021 <= total <= rate + 1e-9
    assert all(share.tokens_per_minute is None for share in shares)
    if concurrency >= len(asked):
        assert min(share.concurrency for share in shares) >= 1


AMOUNTS = st.one_of(st.none(), st.integers(0, 60))
ASKED = st.dictionaries(
    st.integers(1, 40), st.builds(Asked, st.integers(0, 9), st.integers(0, 900), st.integers(0, 20)), max_size=12
)


@given(st.lists(st.tuples(AMOUNTS, AMOUNTS, ASKED), max_size=6), st.sets(st.integers(1, 40), min_size=1, max_size=20))
@settings(max_examples=150)
def test_every_agent_gets_what_the_core_divides(drawn, silent):
    """Also agents that ask for nothing and share what was made for another one."""
    limits = [Limit("t", at, concurrency, None, tokens) for at, (concurrency, tokens, _) in enumerate(drawn)]
    demand = {("t", at): asked for at, (*_, asked) in enumerate(drawn) if asked}
    heard = sorted({agent for _, _, asked in drawn for agent in asked})
    agents = sorted({*heard, *silent})
    shares = divide(Snapshot(limits, heard, demand), agents)
    for at, (concurrency, tokens, asked) in enumerate(drawn):
        wanted = {agent: asked[agent].tokens if agent in asked else 0 for agent in agents}
        expected = dict.fromkeys(agents) if tokens is None else divide_limit(tokens, wanted)
        assert {agent: shares[agent][at].tokens_per_minute for agent in agents} == expected
        expected = dict.fromkeys(agents) if concurrency is None else places_of(concurrency, asked, agents)
        assert {agent: shares[agent][at].concurrency for agent in agents} == expected


def places_of(limit, asked, agents):
    requests = {agent: one.requests for agent, one in asked.items()}
    division = divide_places(limit, requests, {agent: one.present for agent, one in asked.items()}, len(agents))
    others = [agent for agent in agents if agent not in division.asking]
    return {**division.asking, **{agent: division.floor + (at < division.more) for at, agent in enumerate(others)}}


def test_agents_divide_a_rate_below_one_each_in_thousandths():
    shares = divide(Snapshot([Limit("k", 3, None, 1.5, None)], [1, 2], {("k", 3): {2: Asked(4, 0)}}), [1, 2, 9])
    assert [shares[agent][0].requests_per_s for agent in (1, 2, 9)] == [0.001, 1.498, 0.001]


@given(st.lists(ASKED, min_size=2, max_size=4), st.lists(AMOUNTS, min_size=4, max_size=4))
@settings(max_examples=100)
def test_a_limit_that_did_not_move_is_not_compared(asked, amounts):
    """What `moved_since` leaves out is the same in both divisions."""
    agents = sorted({agent for one in asked for agent in one} | {1})
    limits = [Limit("t", at, amount, None, None) for at, amount in enumerate(amounts)]
    made = [Divided(Snapshot(limits, agents, {("t", 0): one, ("t", 1): asked[0]}), agents) for one in asked]
    earlier, newest = made[0], made[-1]
    moved = set(newest.moved_since(earlier))
    assert moved <= {0}
    for agent in agents:
        for at in set(range(len(limits))) - moved:
            assert newest.shares(agent)[at] == earlier.shares(agent)[at]
        least = least_shares(made, agent)
        assert [share.concurrency for share in least] == [
            None if amount is None else min(one.shares(agent)[at].concurrency for one in made)
            for at, amount in enumerate(amounts)
        ]


@pytest.fixture
def shared(budget, in_transaction):
    """A tenant's limit, and reports of agents to processes that divide it."""

    class Shared:
        tenant = budget.child

        def limit(self, amount):
            self.tenant.max_concurrency = amount
            self.tenant.save(update_fields=["max_concurrency"])

        def note(self, agent, requests, at, present=0):
            demand = [Demand("t", self.tenant.pk, requests, 0, 0, present)]
            in_transaction(note_demand, [DemandRow(agent, 1, demand)], at)

        def told(self, process, agent, at):
            found = in_transaction(process.shares_for, [agent], at)[agent]
            return next(s.concurrency for s in found if (s.scope, s.id) == ("tenant", self.tenant.pk))

        def report(self, process, agent, requests, at, *, present=0):
            self.note(agent, requests, at, present)
            return self.told(process, agent, at)

    return Shared()


def test_who_gets_more_waits_for_who_gets_less(shared, noon):
    """Demand moves from one agent to the other, whose share grows once the first has taken its smaller one."""
    shared.limit(10)
    process = Shares()

    def at(seconds):
        return noon + timedelta(seconds=seconds)

    assert shared.report(process, 1, 30, at(0)) == 10, "alone"
    assert shared.report(process, 2, 10, at(0.5)) == 0, "the first one may still use all of them"
    assert shared.report(process, 1, 30, at(1.6)) == 7
    assert shared.report(process, 2, 10, at(1.7)) == 0
    assert shared.report(process, 1, 30, at(2.8)) == 7
    assert shared.report(process, 2, 10, at(2.9)) == 3, "the first one has reported since it was told of 7"


def test_requests_that_stay_are_counted_until_they_end(shared, noon):
    """Ten requests that go on for minutes fill the limit, also once nobody came to their agent for ten seconds."""
    shared.limit(10)
    process = Shares()
    told = []
    for second, stay in enumerate([10, 10, 10, 10, 10, 4, 4, 4, 1, 1, 1]):
        at = noon + timedelta(seconds=1.1 * second)
        shared.report(process, 1, 10 if second == 0 else 0, at, present=stay)
        told.append(shared.report(process, 2, 30, at + timedelta(seconds=0.1)))
        assert stay + told[-1] <= 10, (second, told)
    assert told[-1] == 9, "what has ended is for others"


def test_a_silent_agents_share_stays_counted_for_three_intervals(shared, noon):
    shared.limit(10)
    process = Shares()
    shared.report(process, 1, 30, noon)
    told = [shared.report(process, 2, 10, noon + timedelta(seconds=second)) for second in range(1, 12)]
    assert (told[:5], told[-1]) == ([0] * 5, 10)


def test_an_agent_that_ended_in_good_order_is_not_counted(shared, in_transaction, noon):
    shared.limit(10)
    process = Shares()
    shared.report(process, 1, 30, noon)
    in_transaction(forget_demand, [1])
    assert shared.report(process, 2, 10, noon + timedelta(seconds=1.1)) == 10


EVENTS = st.lists(
    st.tuples(
        st.integers(1, 4), st.integers(0, 40), st.integers(0, 1), st.booleans(), st.sampled_from([0.05, 0.3, 0.9, 1.3])
    ),
    min_size=5,
    max_size=40,
)


@given(events=EVENTS, limit=st.integers(0, 25))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_shares_in_force_never_sum_to_more_than_the_limit(shared, noon, events, limit):
    """Agents report when they like, to either of two processes, and some answers are lost."""
    shared.limit(limit)
    with connection() as held, held.cursor() as cursor:
        cursor.execute("DELETE FROM budgets_agentdemand")
        cursor.execute("DELETE FROM budgets_sharedivision")
    processes = [Shares(), Shares()]
    at, in_force, heard, unanswered = noon, {}, {}, set()
    for agent, requests, process, lost, wait_s in events:
        at += timedelta(seconds=wait_s)
        if agent not in unanswered:
            if agent in heard and heard[agent] <= at - SILENCE:
                in_force.pop(agent, None)  # silent for so long, it went by a share that nobody counted any more
            shared.note(agent, requests, at)
            heard[agent] = at
        share = shared.told(processes[process], agent, at)
        if lost:
            # the same report is sent again: it is a repeat, and says nothing new
            unanswered.add(agent)
        else:
            unanswered.discard(agent)
            in_force[agent] = share
        counted = {one: part for one, part in in_force.items() if heard[one] > at - SILENCE}
        assert sum(counted.values()) <= limit, counted
