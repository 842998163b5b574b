"""Contracts counted at the agent: each request judged by the version in force at its arrival, against its threshold."""

from __future__ import annotations

from typing import Final

from controlplane.agent.journal_entries import Mark, Verdict
from controlplane.agent.policy_state import instant_us
from controlplane.core.reasons import BY_CODE
from controlplane.wire.policy import ContractPolicy, PolicyDocument
from controlplane.wire.report import ObjectiveCount

MINUTE_US: Final = 60_000_000
GOOD: Final = "good"
NEUTRAL: Final = "neutral"
SLOW: Final = "slow"
DOWNGRADED: Final = "downgraded"
STREAM_METRICS: Final = frozenset({"ttft", "tpot"})
FAR_FUTURE_US: Final = 1 << 61


class Judge:
    """One contract version as a request meets it."""

    __slots__ = ("metric", "threshold_us", "version_id")

    def __init__(self, version_id: int, metric: str, threshold_us: int) -> None:
        self.version_id = version_id
        self.metric = metric
        self.threshold_us = threshold_us


class Measured:
    """What a request came to; None is a metric that it did not reach. `cause` is the end's name, counted if bad."""

    __slots__ = (
        "cancelled_by_client", "cause", "completed", "downgraded", "e2e_us", "queue_wait_us", "tpot_us", "ttft_us",
    )  # fmt: skip

    def __init__(
        self,
        queue_wait_us: int | None,
        ttft_us: int | None,
        tpot_us: int | None,
        e2e_us: int,
        completed: bool,
        cancelled_by_client: bool,
        cause: str,
        downgraded: bool = False,
    ) -> None:
        self.queue_wait_us = queue_wait_us
        self.ttft_us = ttft_us
        self.tpot_us = tpot_us
        self.e2e_us = e2e_us
        self.completed = completed
        self.cancelled_by_client = cancelled_by_client
        self.cause = cause
        self.downgraded = downgraded


def judge(rule: Judge, measured: Measured) -> str:
    """`good`, `neutral`, or the cause for which the request is bad.

    A client that goes away before the threshold, or after what was promised had been kept, is neutral.
    """
    if measured.downgraded:
        return DOWNGRADED
    # The metric of the contract, None while it was not reached.
    metric = rule.metric
    if metric == "ttft":
        value_us = measured.ttft_us
    elif metric == "queue_wait":
        value_us = measured.queue_wait_us
    elif metric == "tpot":
        value_us = measured.tpot_us
    else:
        value_us = measured.e2e_us if measured.completed else None
    if measured.completed:
        return GOOD if value_us is not None and value_us <= rule.threshold_us else SLOW
    if measured.cancelled_by_client:
        kept = value_us is not None and value_us <= rule.threshold_us
        return NEUTRAL if kept or measured.e2e_us <= rule.threshold_us else measured.cause
    return measured.cause


class _Count:
    __slots__ = ("admitted", "bad", "good", "neutral", "offered", "successful")

    def __init__(self) -> None:
        self.offered = self.admitted = self.successful = self.good = self.neutral = 0
        self.bad: dict[str, int] = {}


class ObjectiveLedger:
    """Which contracts judge whom, and the counts since the last report."""

    def __init__(self) -> None:
        self._contracts: list[tuple[int, ContractPolicy]] = []
        self._cache: dict[tuple[int, int, bool], tuple[int, tuple[Judge, ...]]] = {}
        self._counts: dict[tuple[int, int], _Count] = {}

    def apply_policy(self, document: PolicyDocument) -> None:
        """Contracts of a revision; deadline objectives are judged by the control plane, from jobs."""
        dated = [(instant_us(row.effective_from), row) for row in document.contracts if row.objective == "latency"]
        self._contracts = sorted(dated, key=lambda pair: (pair[0], pair[1].version_id))
        self._cache.clear()

    def judges(self, tenant_id: int, class_id: int, *, streamed: bool, now_us: int) -> tuple[Judge, ...]:
        """The versions in force for a request that arrives now; ttft and tpot concern streamed requests only."""
        key = tenant_id, class_id, streamed
        cached = self._cache.get(key)
        if cached is not None and now_us < cached[0]:
            return cached[1]
        in_force: dict[str, ContractPolicy] = {}
        until_us = FAR_FUTURE_US
        for from_us, row in self._contracts:
            if row.class_id != class_id or row.tenant_id not in (None, tenant_id):
                continue
            if from_us > now_us:
                until_us = min(until_us, from_us)
            else:
                in_force[row.slug] = row
        judges = tuple(
            Judge(row.version_id, row.metric, row.threshold_ms * 1000)
            for row in in_force.values()
            if streamed or row.metric not in STREAM_METRICS
        )
        self._cache[key] = until_us, judges
        return judges

    def admitted(self, judges: tuple[Judge, ...], arrived_us: int) -> None:
        """A request was offered and admitted."""
        minute_us = arrived_us - arrived_us % MINUTE_US
        for rule in judges:
            count = self._counts.get((rule.version_id, minute_us)) or self._count(rule.version_id, minute_us)
            count.offered += 1
            count.admitted += 1

    def refused(self, judges: tuple[Judge, ...], arrived_us: int, cause: str) -> None:
        """A request was offered and refused: bad in the offered population."""
        minute_us = arrived_us - arrived_us % MINUTE_US
        for rule in judges:
            count = self._count(rule.version_id, minute_us)
            count.offered += 1
            count.bad[cause] = count.bad.get(cause, 0) + 1

    def closed(self, judges: tuple[Judge, ...], arrived_us: int, measured: Measured) -> list[Verdict]:
        """A request ended; returns the verdicts for the journal."""
        minute_us = arrived_us - arrived_us % MINUTE_US
        successful = measured.completed and not measured.downgraded
        verdicts = []
        for rule in judges:
            verdict = judge(rule, measured)
            verdicts.append(Verdict(rule.version_id, minute_us, successful, verdict))
            count = self._counts.get((rule.version_id, minute_us))
            if count is not None and verdict == GOOD:
                count.successful += successful
                count.good += 1
            else:
                self._take(verdicts[-1])
        return verdicts

    def _take(self, verdict: Verdict) -> None:
        count = self._count(verdict.version_id, verdict.minute_us)
        count.successful += verdict.successful
        if verdict.verdict == GOOD:
            count.good += 1
        elif verdict.verdict == NEUTRAL:
            count.neutral += 1
        else:
            count.bad[verdict.verdict] = count.bad.get(verdict.verdict, 0) + 1

    # Counts of a process that is gone, from its journal

    def recover_admitted(self, marks: list[Mark]) -> None:
        for mark in marks:
            count = self._count(mark.version_id, mark.minute_us)
            count.offered += 1
            count.admitted += 1

    def recover_closed(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            self._take(verdict)

    def recover_lost(self, marks: list[Mark], cause: str) -> None:
        for mark in marks:
            self._take(Verdict(mark.version_id, mark.minute_us, False, cause))

    def recover_refused(self, marks: list[Mark], reason: int) -> None:
        for mark in marks:
            count = self._count(mark.version_id, mark.minute_us)
            count.offered += 1
            cause = str(BY_CODE[reason])
            count.bad[cause] = count.bad.get(cause, 0) + 1

    def take(self) -> list[ObjectiveCount]:
        """The counts since the last call."""
        counts, self._counts = self._counts, {}
        return [
            ObjectiveCount(version_id, minute_us, c.offered, c.admitted, c.successful, c.good, c.neutral, c.bad)
            for (version_id, minute_us), c in counts.items()
        ]

    def _count(self, version_id: int, minute_us: int) -> _Count:
        count = self._counts.get((version_id, minute_us))
        if count is None:
            count = self._counts[version_id, minute_us] = _Count()
        return count
