"""What slots are worth together, counted in the database: as the core counts the same slots one by one."""

from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import pytest

from controlplane.core.flex_demand import available_slots
from controlplane.core.slot_states import Band, SlotState
from controlplane.fleet.models import Pool, Slot, SlotInterval
from controlplane.jobs.models import BatchEfficiency
from controlplane.jobs.queries import SlotsWorth, slots_of, slots_worth
from tests import factories

pytestmark = pytest.mark.django_db
SLOTS = [
    ("interactive", "home"), ("interactive", "lost"), ("batch", "home"), ("batch", "lost"), ("flex", "home"),
    ("flex", "home"), ("flex", "lent"), ("flex", "draining"), ("flex", "lost"),
]  # fmt: skip


@pytest.fixture
def pool(installation, now):
    row = factories.pool()
    agent = factories.agent(row)
    for number, (band, state) in enumerate(SLOTS):
        slot = Slot.objects.create(pool=row, agent=agent, name=f"s{number}", band=band)
        SlotInterval.objects.create(slot=slot, state="home", started_at=now - timedelta(days=1), ended_at=now)
        SlotInterval.objects.create(slot=slot, state=state, started_at=now)
    removed = Slot.objects.create(pool=row, agent=agent, name="gone", band="batch", removed_at=now)
    SlotInterval.objects.create(slot=removed, state="home", started_at=now)
    BatchEfficiency.objects.create(pool_id=row.pk, efficiency=0.75, work_us=3, metered_us=4, measured_at=now)
    return row


def one_by_one(pool: Pool, now) -> SlotsWorth:
    slots = slots_of([pool.pk], now)[pool.pk]
    away = sum(slot.state is SlotState.LENT for slot in slots)
    home = [slot for slot in slots if slot.band is Band.FLEX and slot.state is SlotState.HOME]
    frozen = pool.frozen_since is not None and (pool.frozen_until is None or pool.frozen_until > now)
    room = 0 if frozen else len(home) if pool.max_lent is None else max(0, pool.max_lent - away)
    lent = {slot.name for slot in home[:room]}
    every = [replace(slot, state=SlotState.LENT) if slot.name in lent else slot for slot in slots]
    return SlotsWorth(available_slots(slots), available_slots(every))


@pytest.mark.parametrize("frozen", ["", "for now", "until told", "before"])
def test_it_is_what_the_slots_one_by_one_are(pool, now, frozen):
    pool.frozen_since = now - timedelta(hours=1) if frozen else None
    pool.frozen_until = {"for now": now + timedelta(hours=1), "before": now}.get(frozen)
    for most in (None, 0, 1, 2, 3, 9):
        pool.max_lent = most
        found = slots_worth({pool.pk: pool}, now)
        assert found == {pool.pk: one_by_one(pool, now)}, most
        assert found[pool.pk].now == Fraction(3, 4) * 3, "two of the batch floor and one that is lent"
        assert (found[pool.pk].all_lent > found[pool.pk].now) == (frozen in ("", "before") and most not in (0, 1))


def test_a_pool_without_slots_is_missing(installation, now):
    empty = factories.pool("empty")
    assert slots_worth({empty.pk: empty}, now) == {}
