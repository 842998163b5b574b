"""The band acts by revision: what is saved and not pushed changes no decision."""

from __future__ import annotations

import json

import pytest

from controlplane.audit.actors import Actor
from controlplane.contracts.models import WorkloadClass
from controlplane.fleet.models import Pool, Slot, SlotTenure
from controlplane.flex import telemetry
from controlplane.flex.leadership import Shard
from controlplane.flex.models import PoolSample
from controlplane.flex.terms import terms_in_force
from controlplane.ledger.models import RateCard
from controlplane.policy import actions, rollouts
from tests import factories
from tests.flex.conftest import Band

ADMIN = Actor(id=None, name="ada", role="admin")


@pytest.fixture(autouse=True)
def signing_keys(settings, tmp_path):
    settings.SIGNING_KEY_DIR = tmp_path / "keys"


def push(band: Band, waves: tuple[int, ...] = (100,)) -> int:
    """A revision of what is saved, its first wave signed and sent; its number."""
    for slug in ("chat", "bulk"):
        RateCard.objects.get_or_create(
            class_slug=slug, model=band.pool.model, effective_from=factories.NOW.replace(month=1),
            defaults={"prompt_nanos_per_mtok": 500_000_000, "cached_nanos_per_mtok": 250_000_000,
                      "output_nanos_per_mtok": 1_500_000_000, "created_at": factories.NOW, "created_by": "test"},
        )  # fmt: skip
    revision = actions.push(actor=ADMIN, reason="test", now=band.now, waves=waves)
    rollouts.run(revision.rollout.pk, band.now)
    return revision.number


def pool_reading(band: Band):
    return telemetry.read(Shard(), band.now).pools[band.pool.pk]


def seen(band: Band) -> str:
    """What the last tick saw of the pool, as text."""
    return json.dumps(PoolSample.objects.filter(pool=band.pool).latest("at").figures["seen"])


def save(band: Band, **values) -> None:
    Pool.objects.filter(pk=band.pool.pk).update(**values)


@pytest.mark.parametrize(
    "saved",
    [
        {"lend_p95_ms": 1},
        {"safe_rate": {}},
        {"max_lent": 0},
        {"isolation": "shared"},
        {"spillover_per_week": 1, "spillover_action": "block"},
        {"lend_hold_s": 3_600},
    ],
    ids=lambda saved: next(iter(saved)),
)
def test_a_saved_limit_changes_nothing_until_it_is_pushed(busy: Band, saved: dict):
    push(busy)
    before = pool_reading(busy).pool
    save(busy, **saved)
    assert pool_reading(busy).pool == before
    busy.until_lent(2)
    push(busy)
    assert pool_reading(busy).pool != before


def test_a_saved_band_recalls_only_once_it_is_pushed(busy: Band):
    push(busy)
    busy.until_lent()
    Slot.objects.filter(pk=busy.slots["f1"].pk).update(band="interactive")
    busy.step(3)
    assert busy.grant("f1").state == "lent"
    push(busy)
    busy.step()
    assert (busy.grant("f1").state, busy.grant("f1").reason) == ("draining", "manual")


def test_a_slot_that_no_revision_names_is_neither_counted_nor_lent(busy: Band):
    push(busy)
    slot = Slot.objects.create(pool=busy.pool, name="f3", band="flex", agent=busy.agents[0])
    SlotTenure.objects.create(slot=slot, started_at=busy.now)
    busy.slots["f3"] = slot
    busy.until_lent(2)
    assert "f3" not in busy.states()
    assert "f3" not in seen(busy)
    push(busy)
    busy.step()
    assert "f3" in busy.states()
    assert "f3" in seen(busy)


def test_a_revision_counts_when_its_last_wave_was_sent(busy: Band):
    push(busy)
    save(busy, lend_p95_ms=1)
    push(busy, waves=(50, 100))
    assert pool_reading(busy).pool.policy.lend_p95_us != 1_000


def test_whether_batch_may_be_cancelled_is_by_revision_too(busy: Band):
    push(busy)
    WorkloadClass.objects.filter(slug="bulk").update(cancellable=False)
    assert pool_reading(busy).cancellable
    push(busy)
    assert not pool_reading(busy).cancellable


def test_a_pool_that_was_never_pushed_runs_as_saved(busy: Band):
    assert terms_in_force([busy.pool.pk]) == {}
    save(busy, lend_p95_ms=1)
    assert pool_reading(busy).pool.policy.lend_p95_us == 1_000
