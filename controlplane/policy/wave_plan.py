"""The waves of a push as a person writes them, and which agent goes in which: percentages, or named pools and agents.

`agent:gpu-01 pool:canary, 25, 100` is three waves: first what is named, then up to a quarter of each pool, then all.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django.core.exceptions import ValidationError

from controlplane.policy.models import Rollout

WAVES_MOST = 10
NAMES_MOST = 200
PERCENT_CHARS_MOST = 20
HOLD_S_MOST = 86_400
TIMEOUT_S_MOST = 7 * 86_400
HOW = "Give rising percentages that end with 100, or pools and agents by name before them: agent:gpu-01, 25, 100."


@dataclass(frozen=True)
class WavePlan:
    """One wave: a cumulative percentage of each pool's agents, or what it names (`percent` None)."""

    percent: int | None = None
    pools: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        if self.percent is not None:
            return str(self.percent)
        return " ".join([*(f"pool:{name}" for name in self.pools), *(f"agent:{name}" for name in self.agents)])


@dataclass(frozen=True)
class Gates:
    """What may happen in a wave before the rollout is stopped and rolled back; see `core.wave_gates`."""

    hold_s: int = 120
    gate_timeout_s: int = 600
    refusals_most: int = 0
    refusals_most_percent: int = 0
    silent_most: int = 0
    burn_most: float | None = 6.0

    def check(self) -> None:
        """Raises ValidationError on the field that cannot be."""
        wrong = {}
        if not 0 <= self.hold_s <= HOLD_S_MOST:
            wrong["hold_s"] = f"Hold a wave for 0 to {HOLD_S_MOST} s."
        if not 0 <= self.gate_timeout_s <= TIMEOUT_S_MOST:
            wrong["gate_timeout_s"] = f"Wait for 0 to {TIMEOUT_S_MOST} s before a person is asked."
        if not 0 <= self.refusals_most_percent <= 100:
            wrong["refusals_most_percent"] = "Give a share from 0 to 100 percent."
        for name in ("refusals_most", "silent_most"):
            if not 0 <= getattr(self, name) <= 1_000_000:
                wrong[name] = "Give a number of agents, 0 or more."
        if self.burn_most is not None and not (math.isfinite(self.burn_most) and 0 < self.burn_most <= 1_000):
            wrong["burn_most"] = "Give a burn rate over 0, or none: 1 uses the budget up exactly in its period."
        if wrong:
            raise ValidationError(wrong)


REFUSALS_ONLY = Gates(hold_s=0, burn_most=None)
"""The next wave goes as soon as every agent acknowledged; a refusal or a fresh silence stops."""


def gates_of(rollout: Rollout) -> Gates | None:
    if not rollout.gated:
        return None
    return Gates(
        hold_s=rollout.hold_s,
        gate_timeout_s=rollout.gate_timeout_s,
        refusals_most=rollout.refusals_most,
        refusals_most_percent=rollout.refusals_most_percent,
        silent_most=rollout.silent_most,
        burn_most=rollout.burn_most,
    )


class Placeable(NamedTuple):
    """An active agent and its pool; the order of a sequence of them is the order in which percentages take them."""

    id: int
    pool: str
    name: str


def read_waves(text: str) -> tuple[WavePlan, ...]:
    """Raises ValidationError with what to write instead."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(_read_wave(part) for part in parts)


def _read_wave(part: str) -> WavePlan:
    if part.removesuffix("%").strip().isdecimal():
        if len(part) > PERCENT_CHARS_MOST:
            raise ValidationError(HOW)
        return WavePlan(percent=int(part.removesuffix("%")))
    pools: list[str] = []
    agents: list[str] = []
    for word in part.split():
        kind, _, name = word.partition(":")
        if kind not in ("pool", "agent") or not name:
            raise ValidationError(f"{word!r} is neither a percentage nor pool:NAME nor agent:NAME. {HOW}")
        (pools if kind == "pool" else agents).append(name)
    return WavePlan(None, tuple(pools), tuple(agents))


def plans(waves: Sequence[int | WavePlan]) -> tuple[WavePlan, ...]:
    """Raises ValidationError on `waves` unless percentages rise and the last wave is everybody."""
    plan = tuple(wave if isinstance(wave, WavePlan) else WavePlan(percent=wave) for wave in waves)
    percents = [wave.percent for wave in plan if wave.percent is not None]
    rising = all(earlier < later for earlier, later in itertools.pairwise(percents))
    named = sum(len(wave.pools) + len(wave.agents) for wave in plan)
    if not plan or len(plan) > WAVES_MOST or not rising or plan[-1].percent != 100 or percents[0] < 1:
        raise ValidationError({"waves": f"{HOW} At most {WAVES_MOST} waves."})
    if named > NAMES_MOST or any(wave.percent is None and not (wave.pools or wave.agents) for wave in plan):
        raise ValidationError({"waves": f"A wave names at least one pool or agent, all together at most {NAMES_MOST}."})
    return plan


def place(agents: Sequence[Placeable], waves: Sequence[WavePlan]) -> dict[int, int]:
    """Agent id -> number of its wave. Percentages are cumulative per pool and rounded up, so that the first one
    reaches at least one agent of each pool; what a wave names is in the first wave that names it and in no other.

    Raises ValidationError on `waves` for a name that no active agent has.
    """
    placed = _named(agents, waves)
    by_pool: dict[str, list[Placeable]] = defaultdict(list)
    for agent in agents:
        by_pool[agent.pool].append(agent)
    for members in by_pool.values():
        free = [agent.id for agent in members if agent.id not in placed]
        for number, wave in enumerate(waves, 1):
            if wave.percent is None:
                continue
            reached = sum(placed.get(agent.id, len(waves) + 1) <= number for agent in members)
            wanted = math.ceil(len(members) * wave.percent / 100) - reached
            for agent_id in free[: max(0, wanted)]:
                placed[agent_id] = number
            free = free[max(0, wanted) :]
    return placed


def _named(agents: Sequence[Placeable], waves: Sequence[WavePlan]) -> dict[int, int]:
    placed: dict[int, int] = {}
    for number, wave in enumerate(waves, 1):
        if wave.percent is not None:
            continue
        found = [agent for agent in agents if agent.pool in wave.pools or agent.name in wave.agents]
        missing = sorted(
            (set(wave.pools) - {agent.pool for agent in found}) | (set(wave.agents) - {agent.name for agent in found})
        )
        if missing:
            raise ValidationError({"waves": f"No active agent or pool is called {', '.join(missing)}."})
        for agent in found:
            placed.setdefault(agent.id, number)
    return placed
