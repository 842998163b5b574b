"""Answers of a group: what agents are told alike is written once, and reads as if each were written by itself."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product

import msgspec

from controlplane.exchange.answers import AgentFacts, DueShares, Outlook, compose
from controlplane.exchange.composition import Result
from controlplane.exchange.messages import Incoming, ReportOfTuples
from controlplane.exchange.reports import Answers
from controlplane.jobs.item_leases import Leased
from controlplane.usage.cursors import Envelope, Verdict
from controlplane.wire.report import Exhausted, Grant, Lease, Share

NOW = datetime(2026, 9, 23, 12, tzinfo=UTC)
PLAIN, DRAINED, PUSHED, SHARED, LEASING, SPENT, LENT, AT_WORK, UNKNOWN = range(1, 10)
"""Agents, each told something that the one before it is not."""


def shares(mark: str, rate: float) -> DueShares:
    return DueShares(mark, msgspec.Raw(msgspec.json.encode([Share("class", 1, None, rate, None)])))


def outlook() -> Outlook:
    known = range(1, UNKNOWN)
    return Outlook(
        generation=3,
        live_number=7,
        signing_keys="keys",
        facts={agent: AgentFacts(drain=agent == DRAINED) for agent in known},
        desired={agent: (2, "new") if agent == PUSHED else (1, "old") for agent in known},
        grants={LENT: [Grant(slot_id=1, fence=2, action="lend", ttl_us=3, reason="spare")]},
        leases={LEASING: [Lease(1, 2, 3, 4)]},
        exhausted={SPENT: [Exhausted(tenant_id=1, budget="plan", ends_us=5)]},
        shares={agent: shares("theirs", 2.5) if agent == SHARED else shares("common", 1.5) for agent in known},
        items={AT_WORK: Leased(give_back=4)},
    )


def incoming(agent: int, live_number: int, mark: str) -> Incoming:
    report = ReportOfTuples(layout=1, epoch=1, seq=9, sent_us=0, revision=1, live_number=live_number)
    return Incoming(Envelope(agent, 1, 9, b"", 1), 1, report, 0, shares_mark=mark)


def test_answers_of_a_group_read_as_if_each_was_written_by_itself(transactional_db):
    told, seen = outlook(), set()
    answers = Answers(told, NOW)
    cases = product(
        range(1, UNKNOWN + 1), (7, 5), ("", "common", "theirs"), (Verdict.TAKEN, Verdict.REPEAT), (0, 2), (9, 10, 2**40)
    )
    for agent, live_number, mark, verdict, aside, through in cases:
        given = incoming(agent, live_number, mark), Result(verdict, through, aside)
        own = msgspec.json.encode(compose(*given, told, NOW))
        assert answers.written(*given) == own, (agent, live_number, mark, verdict, aside, through)
        seen.add(own)
    # there is something to mix up: for most of them the answer is one of its own
    assert len(seen) > 300
