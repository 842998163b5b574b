"""Shares sum to the limit, follow demand, and count silent agents for three intervals."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.budgets.shares import DemandRow, Limit, Shares, Snapshot, divide, note_demand
from controlplane.core.leases import divide_limit
from controlplane.wire.report import Demand


@given(
    st.integers(0, 500),
    st.dictionaries(st.integers(1, 40), st.integers(0, 1_000), min_size=1, max_size=12),
    st.floats(0.1, 200),
)
@settings(max_examples=80)
def test_shares_sum_to_the_limit(concurrency, asked, rate):
    snapshot = Snapshot(
        [Limit("t", 7, concurrency, rate, None)], sorted(asked), {("t", 7): {a: (n, 0) for a, n in asked.items()}}
    )
    shares = [shares[0] for shares in divide(snapshot, sorted(asked)).values()]
    assert sum(share.concurrency for share in shares) == concurrency
    total = sum(share.requests_per_s for share in shares)
    assert rate - 0.0021 <= total <= rate + 1e-9
    assert all(share.tokens_per_minute is None for share in shares)
    if concurrency >= len(asked):
        assert min(share.concurrency for share in shares) >= 1


AMOUNTS = st.one_of(st.none(), st.integers(0, 60))
ASKED = st.dictionaries(st.integers(1, 40), st.tuples(st.integers(0, 9), st.integers(0, 900)), max_size=12)


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
        for amount, kind, name in ((concurrency, 0, "concurrency"), (tokens, 1, "tokens_per_minute")):
            given_out = {agent: getattr(shares[agent][at], name) for agent in agents}
            wanted = {agent: asked[agent][kind] if agent in asked else 0 for agent in agents}
            expected = dict.fromkeys(agents) if amount is None else divide_limit(amount, wanted)
            assert given_out == expected


def test_agents_divide_a_rate_below_one_each_in_thousandths():
    shares = divide(Snapshot([Limit("k", 3, None, 1.5, None)], [1, 2], {("k", 3): {2: (4, 0)}}), [1, 2, 9])
    assert [shares[agent][0].requests_per_s for agent in (1, 2, 9)] == [0.001, 1.498, 0.001]


def test_shares_follow_demand_and_silence_ends_after_three_intervals(budget, in_transaction, noon):
    tenant = budget.child
    tenant.max_concurrency = 10
    tenant.save(update_fields=["max_concurrency"])

    def note(agent, requests, at):
        in_transaction(note_demand, [DemandRow(agent, 1, [Demand("t", tenant.pk, requests, 0, 0)])], at)

    def share(agent, at):
        found = in_transaction(Shares().shares_for, [agent], at)[agent]
        return next(s.concurrency for s in found if (s.scope, s.id) == ("tenant", tenant.pk))

    note(1, 30, noon)
    note(2, 10, noon)
    assert (share(1, noon), share(2, noon)) == (7, 3)
    assert share(1, noon + timedelta(seconds=5)) == 7
    later = noon + timedelta(seconds=7)
    note(1, 30, later)
    assert share(1, later) == 10
