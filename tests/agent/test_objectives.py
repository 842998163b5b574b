"""Good, neutral, bad and its cause; versions by arrival."""

import pytest

from controlplane.agent.objectives import Judge, Measured, ObjectiveLedger, judge
from controlplane.wire.policy import ContractPolicy
from tests.agent import worlds

TTFT = Judge(1, "ttft", 700_000)
MINUTE_US = 60_000_000


def measured(**changes) -> Measured:
    base = {
        "queue_wait_us": 1_000, "ttft_us": 300_000, "tpot_us": 20_000, "e2e_us": 2_000_000, "completed": True,
        "cancelled_by_client": False, "cause": "completed",
    }  # fmt: skip
    return Measured(**{**base, **changes})


CANCELLED = {"completed": False, "cancelled_by_client": True, "cause": "cancelled_by_client"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "good"),
        ({"ttft_us": 700_000}, "good"),
        ({"ttft_us": 700_001}, "slow"),
        ({"completed": False, "cause": "stage_timeout"}, "stage_timeout"),
        ({"completed": False, "cause": "upstream_error", "ttft_us": None}, "upstream_error"),
        ({**CANCELLED, "ttft_us": None, "e2e_us": 700_000}, "neutral"),
        ({**CANCELLED, "ttft_us": None, "e2e_us": 700_001}, "cancelled_by_client"),
        ({**CANCELLED, "ttft_us": 300_000, "e2e_us": 9_000_000}, "neutral"),
        ({**CANCELLED, "ttft_us": 800_000, "e2e_us": 9_000_000}, "cancelled_by_client"),
        ({"downgraded": True}, "downgraded"),
    ],
)
def test_one_request(changes, said):
    assert judge(TTFT, measured(**changes)) == said


@pytest.mark.parametrize(
    ("metric", "limit_us"), [("queue_wait", 1_000), ("ttft", 300_000), ("tpot", 20_000), ("e2e", 2_000_000)]
)
def test_each_metric_meets_its_threshold_exactly(metric, limit_us):
    assert judge(Judge(1, metric, limit_us), measured()) == "good"
    assert judge(Judge(1, metric, limit_us - 1), measured()) == "slow"


def contract(version: int, starts: str, **changes) -> ContractPolicy:
    base = {
        "version_id": version, "slug": "c", "class_id": 1, "tenant_id": None, "effective_from": starts,
        "objective": "latency", "metric": "ttft", "threshold_ms": 700,
    }  # fmt: skip
    return ContractPolicy(**{**base, **changes})


def test_the_version_in_force_at_arrival_judges():
    ledger = ObjectiveLedger()
    contracts = [
        contract(2, "2027-01-15T08:00:00+00:00"),
        contract(1, "2020-01-01T00:00:00+00:00"),
        contract(3, "2020-01-01T00:00:00+00:00", slug="own", tenant_id=1),
        contract(4, "2020-01-01T00:00:00+00:00", slug="wait", metric="queue_wait"),
        contract(5, "2020-01-01T00:00:00+00:00", slug="jobs", objective="deadline"),
        contract(6, "2020-01-01T00:00:00+00:00", slug="other", class_id=9),
    ]
    ledger.apply_policy(worlds.document(contracts=contracts))
    switch_us = 1_800_000_000_000_000

    def ids(tenant_id: int, now_us: int, *, streamed: bool = True) -> list[int]:
        judges = ledger.judges(tenant_id, 1, streamed=streamed, now_us=now_us)
        return sorted(rule.version_id for rule in judges)

    assert ids(1, switch_us - 1) == [1, 3, 4]
    assert ids(1, switch_us) == [2, 3, 4]
    assert ids(2, switch_us) == [2, 4]
    assert ids(1, switch_us, streamed=False) == [4], "ttft concerns what is streamed"


def test_counts_are_by_arrival_minute_and_taken_once():
    ledger, rules = ObjectiveLedger(), (TTFT,)
    ledger.admitted(rules, MINUTE_US + 5)
    ledger.admitted(rules, MINUTE_US + 6)
    ledger.refused(rules, 2 * MINUTE_US, "queue_full")
    ledger.closed(rules, MINUTE_US + 5, measured())
    counts = {count.minute_us: count for count in ledger.take()}
    first, second = counts[MINUTE_US], counts[2 * MINUTE_US]
    assert (first.offered, first.admitted, first.successful, first.good, first.neutral) == (2, 2, 1, 1, 0)
    assert (second.offered, second.admitted, second.bad) == (1, 0, {"queue_full": 1})
    assert ledger.take() == []
    ledger.closed(rules, MINUTE_US + 6, measured(ttft_us=800_000))
    (late,) = ledger.take()
    assert (late.offered, late.successful, late.bad) == (0, 1, {"slow": 1})
