"""What an operator sets for a flex band: the policy and the table of tested safe rates.

Durations are integer microseconds (``_us``), loads and slacks are ratios, rates are requests per second.
Comparisons against a limit are made on exact rationals (``exact``), so that 16.8 of 24 is 0.70 and not a hair off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US

#: An exact ratio, or plus or minus infinity as a float. The two compare and order correctly with each other.
Ratio = Fraction | float


@lru_cache(maxsize=65_536)
def exact(number: float) -> Fraction:
    """The rational that a finite number's shortest decimal form names: 0.7 is 7/10, not its binary neighbour."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


class SpilloverAction(StrEnum):
    """What happens to a new loan when the week's loans are used up."""

    WARN = "warn"
    BLOCK = "block"


@dataclass(frozen=True, kw_only=True)
class FlexPolicy:
    """Limits, hold times and hysteresis of one pool's flex band.

    Raises ``ValueError`` naming every problem at once when the numbers contradict each other.
    """

    lend_p95_us: int = 200_000
    lend_hold_us: int = 10 * MINUTE_US
    load_limit: float = 0.70
    lend_slack: float = 0.25
    return_slack: float = 0.35
    return_hold_us: int = MINUTE_US
    min_hold_us: int = MINUTE_US
    drain_bound_us: int = 30 * SECOND_US
    #: How long a cancellation may take before the slot is reported overdue.
    cancel_bound_us: int = 10 * SECOND_US
    grant_ttl_us: int = 15 * SECOND_US
    cooldown_us: int = 5 * MINUTE_US
    decision_interval_us: int = 30 * SECOND_US
    telemetry_stale_us: int = 5 * SECOND_US
    missed_grace_us: int = 30 * MINUTE_US
    #: Most slots that may be away from home at once; ``None`` means every flex slot.
    max_lent: int | None = None
    #: Loans per week; ``None`` means that they are not limited.
    spillover_per_week: int | None = None
    spillover_action: SpilloverAction = SpilloverAction.WARN

    def __post_init__(self) -> None:
        problems = policy_problems(self)
        if problems:
            raise ValueError("; ".join(problems))


_MUST_BE_POSITIVE = ("lend_p95_us", "drain_bound_us", "cancel_bound_us", "grant_ttl_us", "telemetry_stale_us")
_MUST_NOT_BE_NEGATIVE = (
    "lend_hold_us",
    "return_hold_us",
    "min_hold_us",
    "cooldown_us",
    "decision_interval_us",
    "missed_grace_us",
)


def policy_problems(policy: FlexPolicy) -> tuple[str, ...]:
    """Every reason why a policy cannot be saved, each with what to do; empty when it is sound."""
    problems = [f"{name} must be above 0" for name in _MUST_BE_POSITIVE if getattr(policy, name) <= 0]
    problems += [f"{name} must be 0 or more" for name in _MUST_NOT_BE_NEGATIVE if getattr(policy, name) < 0]
    ratios = ("load_limit", "lend_slack", "return_slack")
    unusable = [name for name in ratios if not math.isfinite(getattr(policy, name))]
    problems += [f"{name} must be a finite number" for name in unusable]
    if not unusable:
        problems += _ratio_problems(policy)
    for name in ("max_lent", "spillover_per_week"):
        limit = getattr(policy, name)
        if limit is not None and limit < 0:
            problems.append(f"{name} must be 0 or more, or absent for no limit")
    return tuple(problems)


def _ratio_problems(policy: FlexPolicy) -> list[str]:
    problems = []
    if not 0 < policy.load_limit <= 1:
        problems.append(f"load_limit must be above 0 and at most 1, not {policy.load_limit}")
    for name in ("lend_slack", "return_slack"):
        if getattr(policy, name) >= 1:
            problems.append(f"{name} must be under 1: a slack of 1 means that there is no backlog at all")
    if policy.return_slack <= policy.lend_slack:
        problems.append(
            f"return_slack ({policy.return_slack}) must be above lend_slack ({policy.lend_slack}), "
            "or giving a slot back would by itself justify lending it again"
        )
    return problems


def leaves_contract_no_room(*, lend_p95_us: int, rest_of_ttft_us: int, threshold_us: int) -> bool:
    """True when a contract on TTFT can be missed while lending stays lawful; the policy form warns of it."""
    return lend_p95_us + rest_of_ttft_us >= threshold_us


@dataclass(frozen=True, kw_only=True)
class SafeRate:
    """Tested admitted rates: slots serving interactive -> requests per second that meet the contract.

    Raises ``ValueError`` when it is empty, or a slot count or rate makes no sense.
    """

    #: (slots, requests per second); kept in ascending order of slots.
    entries: tuple[tuple[int, float], ...]
    #: From this instant on the test is too old to lend by; ``None`` never expires.
    valid_until_us: int | None = None

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("a safe rate table needs at least one entry: slots -> requests per second")
        ordered = tuple(sorted(self.entries))
        if len({slots for slots, _ in ordered}) != len(ordered):
            raise ValueError("a safe rate table may name each number of slots once")
        for slots, rate in ordered:
            if slots < 1:
                raise ValueError(f"a safe rate is for 1 slot or more, not {slots}")
            if not math.isfinite(rate) or rate <= 0:
                raise ValueError(f"the safe rate for {slots} slots must be a finite number above 0, not {rate}")
        object.__setattr__(self, "entries", ordered)

    def expired(self, now_us: int) -> bool:
        """True from the instant ``valid_until_us`` on."""
        return self.valid_until_us is not None and now_us >= self.valid_until_us

    def at(self, slots: int) -> Fraction:
        """Exact safe rate for a number of slots: proportional below the table, linear inside, constant above."""
        rate = self._rates.get(slots)
        if rate is None:
            rate = self._rates[slots] = self._rate_of(slots)
        return rate

    @cached_property
    def _rates(self) -> dict[int, Fraction]:
        """What was asked for: a tick asks a few times for the same numbers of slots."""
        return {}

    def _rate_of(self, slots: int) -> Fraction:
        first_slots, first_rate = self.entries[0]
        if slots <= first_slots:
            return exact(first_rate) * max(slots, 0) / first_slots
        for (low, low_rate), (high, high_rate) in zip(self.entries, self.entries[1:], strict=False):
            if slots <= high:
                step = (exact(high_rate) - exact(low_rate)) / (high - low)
                return exact(low_rate) + step * (slots - low)
        return exact(self.entries[-1][1])


def safe_rate_share(table: SafeRate, *, pool_slots: int, own_slots: int) -> float:
    """One agent's part of its pool's safe rate: in proportion to its slots that serve interactive now."""
    if pool_slots <= 0 or own_slots <= 0:
        return 0.0
    return float(table.at(pool_slots) * own_slots / pool_slots)
