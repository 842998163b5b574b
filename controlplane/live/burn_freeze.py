"""A page-level burn of an interactive contract in a pool freezes its lending and recalls what is lent."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from controlplane.audit.actors import Actor
from controlplane.contracts.queries import Standing
from controlplane.core.burn import Severity
from controlplane.fleet.models import Pool, Slot
from controlplane.flex.actions import freeze_and_recall
from controlplane.live.contracts import Evaluation, evaluate
from controlplane.live.in_force import in_force

ACTOR = Actor.system("burn-rate alert")
LOOK_EVERY = timedelta(seconds=10)
#: A freeze of our own is renewed when less than this is left and the contract burns on.
RENEW_BEFORE = timedelta(minutes=5)
#: Pools looked at in one tick; with more of them a round takes longer, never a tick.
POOLS_PER_TICK = 5


@dataclass
class BurnWatch:
    """Freezes once when a burn begins. Who unfreezes while it burns on is heeded until it ends and begins anew."""

    looked_at: dict[int, datetime] = field(default_factory=dict)
    burning: set[int] = field(default_factory=set)

    def look(self, now: datetime) -> list[str]:
        """Looks at the pools that are due; returns the slugs of those it froze or whose freeze it renewed."""
        due = [
            pool
            for pool in Pool.objects.filter(
                archived_at__isnull=True, isolation=Pool.Isolation.RESERVED, slots__band=Slot.Band.FLEX
            ).distinct()
            if pool.pk not in self.looked_at or now - self.looked_at[pool.pk] >= LOOK_EVERY
        ]
        due.sort(key=lambda pool: (self.looked_at.get(pool.pk, datetime.min.replace(tzinfo=now.tzinfo)), pool.pk))
        if not due:
            return []
        rows = [row for row in in_force(now) if row.in_force is not None and row.in_force.objective == "latency"]
        return [pool.slug for pool in due[:POOLS_PER_TICK] if self._look_at(pool, rows, now)]

    def _look_at(self, pool: Pool, rows: list[Standing], now: datetime) -> bool:
        self.looked_at[pool.pk] = now
        own = [row for row in rows if row.contract.workload_class.slug == pool.interactive_class]
        paging = [found for found in evaluate(own, now, pool_id=pool.pk).values() if is_paging(found)]
        if not paging:
            self.burning.discard(pool.pk)
            return False
        began = pool.pk not in self.burning
        self.burning.add(pool.pk)
        left = timedelta(0) if pool.frozen_until is None else pool.frozen_until - now
        ours_ends = pool.frozen_since is not None and pool.frozen_by == ACTOR.name and left < RENEW_BEFORE
        frozen = pool.frozen_since is not None and (pool.frozen_until is None or pool.frozen_until > now)
        if not (ours_ends or (began and not (frozen and pool.frozen_by == ACTOR.name))):
            return False
        # A freeze by a person that lasts longer than ours would is kept as long as it was.
        until = max(now + timedelta(hours=1), pool.frozen_until) if frozen and pool.frozen_until else None
        freeze_and_recall(pool_id=pool.pk, actor=ACTOR, now=now, reason=reason_of(paging[0]), until=until)
        return True


def is_paging(found: Evaluation) -> bool:
    """Does a page-level rule fire?"""
    return any(state.rule.severity is Severity.PAGE for state in found.firing)


def reason_of(found: Evaluation) -> str:
    """The contract and the burn that paged, in a sentence."""
    state = next(state for state in found.firing if state.rule.severity is Severity.PAGE)
    rate = "" if state.long.burn_rate is None else f" at {float(state.long.burn_rate):.1f} times the budget's rate"
    hours = state.rule.long_us // 3_600_000_000
    return f"Contract {found.contract.slug} burns its error budget{rate} over {hours} h: page."
