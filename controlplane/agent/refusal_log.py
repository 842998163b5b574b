"""Refusals counted exactly, and explanations kept for the first of a kind in each minute."""

from __future__ import annotations

from typing import Final

from controlplane.core.admission import Check, Decision
from controlplane.core.reasons import Reason
from controlplane.wire.report import Check as CheckRow
from controlplane.wire.report import DecisionSample, RefusalCount

MINUTE_US: Final = 60_000_000
SAMPLES_PER_KIND: Final = 100
SAMPLES_PENDING_MAX: Final = 2_000
"""Explanations that wait for a report, of all kinds together: what comes beyond it is counted as dropped."""
ADMITTED_EVERY: Final = 256
"""One admitted request in so many is explained too."""


def check_row(check: Check) -> CheckRow:
    """An explained check as text."""
    name, value, limit, held = check
    return CheckRow(
        name,
        value if type(value) is str else _text(value),
        limit if type(limit) is str else _text(limit),
        held,
    )


def _text(value: int | float | str | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


class RefusalLog:
    """Counts and samples since the last report."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, int, int], int] = {}
        self._samples: list[DecisionSample] = []
        self._kept: dict[tuple[int, int, int, Reason], int] = {}
        self._minute_us = 0
        self._admitted = 0
        self.unknown_keys: dict[str, int] = {}
        """Refusals of unknown keys by visible prefix, since the start."""
        self.samples_dropped = 0
        """Explanations that no report had room for, since the start."""
        self.refused: dict[tuple[int, Reason], int] = {}
        """By class id and reason, since the start."""

    def count(self, tenant_id: int, class_id: int, reason: Reason, arrived_us: int) -> None:
        """One more refusal, in the minute of the request's arrival: the one that its id tells."""
        key = arrived_us - arrived_us % MINUTE_US, tenant_id, class_id, reason.code
        self._counts[key] = self._counts.get(key, 0) + 1
        self.refused[class_id, reason] = self.refused.get((class_id, reason), 0) + 1

    def recover(self, tenant_id: int, class_id: int, reason_code: int, at_us: int) -> None:
        """A refusal that a process before counted and did not report."""
        key = at_us - at_us % MINUTE_US, tenant_id, class_id, reason_code
        self._counts[key] = self._counts.get(key, 0) + 1

    def count_unknown_key(self, prefix: str) -> None:
        """At most 1,000 prefixes are told apart; what comes after counts as `other`."""
        if prefix not in self.unknown_keys and len(self.unknown_keys) >= 1_000:
            prefix = "other"
        self.unknown_keys[prefix] = self.unknown_keys.get(prefix, 0) + 1

    def wants_refused(self, tenant_id: int, class_id: int, reason: Reason, arrived_us: int) -> bool:
        """Whether the explanation of this refusal is kept: the first 100 of its kind in a minute of arrival are."""
        minute_us = arrived_us - arrived_us % MINUTE_US
        if minute_us > self._minute_us:
            self._minute_us = minute_us
            # Who waited for a lease may belong to the minute before.
            self._kept = {key: kept for key, kept in self._kept.items() if key[0] >= minute_us - MINUTE_US}
        key = minute_us, tenant_id, class_id, reason
        kept = self._kept.get(key, 0)
        if kept >= SAMPLES_PER_KIND:
            return False
        if len(self._samples) >= SAMPLES_PENDING_MAX:
            self.samples_dropped += 1
            return False
        self._kept[key] = kept + 1
        return True

    def wants_admitted(self) -> bool:
        """Whether this admitted request is explained: the first, and then every 256th."""
        self._admitted += 1
        return self._admitted % ADMITTED_EVERY == 1 and len(self._samples) < SAMPLES_PENDING_MAX

    def keep(self, sample: DecisionSample) -> None:
        self._samples.append(sample)

    def take_counts(self) -> list[RefusalCount]:
        counts, self._counts = self._counts, {}
        return [RefusalCount(*key, count) for key, count in counts.items()]

    def take_samples(self) -> list[DecisionSample]:
        samples, self._samples = self._samples, []
        return samples

    def put_back(self, samples: list[DecisionSample], dropped: int) -> None:
        """What a report had no room for waits for the next one; `dropped` were too many to wait."""
        self._samples = samples + self._samples
        self.samples_dropped += dropped


def decision_sample(
    request_id: str,
    *,
    at_us: int,
    tenant_id: int,
    key_id: int,
    class_id: int,
    decision: Decision,
    reason: Reason | None,
    checks: tuple[Check, ...],
) -> DecisionSample:
    """One decision with its explanation, for the wire; reason 0 is none."""
    return DecisionSample(
        request_id=request_id,
        at_us=at_us,
        tenant_id=tenant_id,
        key_id=key_id,
        class_id=class_id,
        decision=decision.value,
        reason=0 if reason is None else reason.code,
        checks=[check_row(check) for check in checks],
    )
