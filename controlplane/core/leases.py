"""Leases of hard budgets and shares of installation-wide limits.

A lease is money that one agent may spend without asking; it is taken out of every hard budget window that must hold,
so agents together cannot overspend, cut off or not. Limits on concurrency and rates are divided among agents the same
way: the shares sum to the limit and follow demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from controlplane.core.money import Key, split_by_counts
from controlplane.core.reasons import Reason


@dataclass(frozen=True, slots=True)
class BudgetWindow:
    """One window of one hard budget: a level (tenant or ancestor) and a period, half-open in instants."""

    level: str
    window: str
    ends_at_us: int
    limit_nanos: int
    settled_nanos: int
    outstanding_nanos: int

    @property
    def remaining_nanos(self) -> int:
        """What may still be leased; never negative, even while a lowered limit is over-leased."""
        return max(0, self.limit_nanos - self.settled_nanos - self.outstanding_nanos)


@dataclass(frozen=True, slots=True)
class LeaseSize:
    """The amount granted, or 0 with the reason and the window that blocked."""

    amount_nanos: int
    reason: Reason | None = None
    blocked_by: BudgetWindow | None = None


def lease_size(
    windows: Sequence[BudgetWindow],
    *,
    active_agents: int,
    recent_spend_nanos: int,
    max_request_nanos: int,
    waiting_nanos: int = 0,
) -> LeaseSize:
    """How much to lease to one agent for one tenant.

    The least over the windows of remaining / (2 x active agents), brought down to `recent_spend_nanos` (what this
    agent spent for the tenant in the last 60 s) or, where that is more, to `waiting_nanos` (the bounds of the requests
    that wait for this lease), then up to one `max_request_nanos`, then down to what is left. Under one max request
    nothing is granted and the blocking window is named: the one with the least left, the first of those. Raises
    ValueError without windows: a tenant without a hard budget needs no lease.
    """
    if not windows:
        raise ValueError("no hard budget window: a tenant without one needs no lease")
    if max_request_nanos < 0 or recent_spend_nanos < 0 or waiting_nanos < 0:
        raise ValueError("amounts cannot be negative")
    tightest = min(windows, key=lambda window: window.remaining_nanos)
    left = tightest.remaining_nanos
    if left < max_request_nanos or left == 0:
        return LeaseSize(0, Reason.BUDGET_EXHAUSTED, tightest)
    amount = min(left // (2 * max(1, active_agents)), max(recent_spend_nanos, waiting_nanos))
    return LeaseSize(min(max(amount, max_request_nanos), left))


def outage_slice_nanos(windows: Sequence[BudgetWindow], *, agents: int, percent: int) -> int:
    """What one agent holds in advance for a tenant that goes on while the control plane is away.

    All agents together hold at most `percent` of the tightest limit: each gets an equal part of it, never more than an
    equal part of half of what is left, so that slices do not keep requests from ordinary leases. 0 is no slice.
    Raises ValueError without windows, for no agent, or a percentage outside 0 to 100.
    """
    if not windows or agents < 1 or not 0 <= percent <= 100:
        raise ValueError("a slice needs a window, an agent and a percentage from 0 to 100")
    return min(
        min(window.limit_nanos * percent // (100 * agents), window.remaining_nanos // (2 * agents))
        for window in windows
    )


@dataclass(frozen=True, slots=True)
class Division(Generic[Key]):
    """A limit divided among agents: most of them ask for nothing, and of those only two shares exist.

    `asking` has the share of each agent with demand. Of the others, in key order, the first `more` have `floor` + 1,
    the rest `floor`.
    """

    asking: Mapping[Key, int]
    floor: int
    more: int


def divide_among(free: int, asking: Mapping[Key, int], others: int) -> Division[Key]:
    """Divide `free` among agents with positive demand and a number of others without, as `divide_limit` does.

    Raises ValueError for a negative limit, or a demand that is not positive.
    """
    if free < 0 or any(value <= 0 for value in asking.values()):
        raise ValueError("a limit cannot be negative, and agents that ask have a positive demand")
    agents = len(asking) + others
    if free < agents:
        first = set(sorted(asking, key=lambda agent: (-asking[agent], agent))[:free])
        return Division({agent: int(agent in first) for agent in asking}, 0, max(0, free - len(asking)))
    if not asking:
        return Division({}, *(divmod(free, others) if others else (0, 0)))
    spread = split_by_counts(free - agents, asking)
    return Division({agent: 1 + part for agent, part in spread.items()}, 1, 0)


def divide_places(free: int, asked: Mapping[Key, int], present: Mapping[Key, int], agents: int) -> Division[Key]:
    """Divide places of a limit on concurrency among a number of agents, as `divide_among` does a limit.

    Demand is what an agent was asked for or, where that is more, the requests that are `present` there: they may have
    come long ago. Requests beyond an agent's part stay until they end, so the others have that much less until then:
    no part is taken by two. Raises ValueError for a negative limit or number.
    """
    if any(number < 0 for numbers in (asked, present) for number in numbers.values()):
        raise ValueError("demand and presence cannot be negative")
    wanted = {agent: max(asked.get(agent, 0), present.get(agent, 0)) for agent in asked.keys() | present.keys()}
    asking = {agent: number for agent, number in wanted.items() if number}
    others = agents - len(asking)
    division = divide_among(free, asking, others)
    held = {agent: min(part, present.get(agent, 0)) for agent, part in division.asking.items()}
    beyond = sum(present.get(agent, 0) - part for agent, part in held.items())
    rooms = [division.asking[agent] - part for agent, part in held.items()]
    rooms.append(division.floor * others + division.more)
    if not beyond or not sum(rooms):
        return division
    left = split_by_counts(max(0, sum(rooms) - beyond), dict(enumerate(rooms)))
    parts = {agent: part + left[at] for at, (agent, part) in enumerate(held.items())}
    return Division(parts, *(divmod(left[len(held)], others) if others else (0, 0)))


def divide_limit(limit: int, demand: Mapping[Key, int], held: Mapping[Key, int] | None = None) -> dict[Key, int]:
    """Divide an installation-wide limit among agents: whole shares that sum to the limit exactly.

    `demand` is each present agent's demand of the last 10 s; shares follow it, with a floor of 1 where the limit
    allows one each (else the agents with the most demand, then the first names, get 1). Without any demand the limit
    is divided evenly. `held` are shares of silent agents that stay counted; they are taken off the limit first.
    Raises ValueError for a negative limit or demand.
    """
    if limit < 0 or any(value < 0 for value in demand.values()):
        raise ValueError("a limit and the demand for it cannot be negative")
    free = max(0, limit - sum((held or {}).values()))
    others = sorted(agent for agent, asked in demand.items() if not asked)
    division = divide_among(free, {agent: asked for agent, asked in demand.items() if asked}, len(others))
    shares = {agent: division.floor + int(at < division.more) for at, agent in enumerate(others)}
    shares |= division.asking
    return {agent: shares[agent] for agent in sorted(shares)}
