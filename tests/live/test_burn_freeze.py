"""A burn that pages freezes lending and recalls; thin traffic, tickets and other pools do not."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.contracts.models import Contract, ContractVersion, ObjectiveMinute
from controlplane.fleet.models import Pool
from controlplane.flex.actions import unfreeze
from controlplane.live.burn_freeze import BurnWatch
from tests.flex.conftest import Band, add_job, make_band


@pytest.fixture
def busy(db) -> Band:
    with connection.cursor() as cursor:
        cursor.execute("SELECT date_trunc('minute', clock_timestamp())")
        band = make_band(cursor.fetchone()[0])
    add_job(band, gpu_s=36_000, due_in=timedelta(hours=4))
    band.until_lent()
    return band


def contract(band: Band, *, effective=timedelta(days=1)) -> ContractVersion:
    row = Contract.objects.create(
        slug="chat-ttft", name="Chat", workload_class_id=band.chat_id, created_at=band.now - effective
    )
    return ContractVersion.objects.create(
        contract=row, number=1, effective_from=band.now - effective, target_ppm=990_000, threshold_ms=700,
        created_by="test", created_at=band.now - effective,
    )  # fmt: skip


def minutes(band: Band, version: ContractVersion, *, bad: int, of: int = 100, pool_id: int | None = None) -> None:
    """The last hour: `bad` of `of` requests a minute over the threshold."""
    start = band.now.replace(second=0, microsecond=0) - timedelta(hours=1)
    ObjectiveMinute.objects.bulk_create(
        ObjectiveMinute(
            contract_version_id=version.pk, pool_id=pool_id or band.pool.pk, minute=start + timedelta(minutes=at),
            offered=of, admitted=of, successful=of, good=of - bad, neutral=0, bad={"slow": bad} if bad else {},
        )
        for at in range(61)
    )  # fmt: skip


def test_a_page_freezes_and_recalls_once(busy: Band):
    minutes(busy, contract(busy), bad=40)
    watch = BurnWatch()
    assert watch.look(busy.now) == [busy.pool.slug]
    pool = Pool.objects.get()
    assert pool.frozen_by == "burn-rate alert" and "chat-ttft burns" in pool.freeze_reason
    assert pool.frozen_until == busy.now + timedelta(hours=1)
    busy.step(1)
    assert (busy.grant("f1").state, busy.grant("f1").reason) == ("draining", "manual")
    assert watch.look(busy.now) == [], "looked at a second ago"
    assert watch.look(busy.now + timedelta(seconds=20)) == [], "frozen already"
    assert AuditEntry.objects.filter(action="flex.freeze", actor_name="burn-rate alert").count() == 1


def test_its_own_freeze_is_renewed_while_it_burns(busy: Band):
    minutes(busy, contract(busy), bad=40)
    watch = BurnWatch()
    watch.look(busy.now)
    Pool.objects.update(frozen_until=busy.now + timedelta(minutes=2))
    later = busy.now + timedelta(seconds=15)
    assert watch.look(later) == [busy.pool.slug]
    assert Pool.objects.get().frozen_until > later + timedelta(minutes=59)


def test_who_unfreezes_is_heeded_while_it_burns_on(busy: Band):
    minutes(busy, contract(busy), bad=40)
    watch = BurnWatch()
    watch.look(busy.now)
    person = Actor(id=None, name="ona", role="oncall")
    unfreeze(pool_id=busy.pool.pk, actor=person, now=busy.now, reason="a client's own fault")
    assert watch.look(busy.now + timedelta(seconds=11)) == []
    assert Pool.objects.get().frozen_since is None


@pytest.mark.parametrize(("bad", "of"), [(0, 100), (5, 100), (1, 1)])
def test_less_than_a_page_freezes_nothing(busy: Band, bad: int, of: int):
    minutes(busy, contract(busy), bad=bad, of=of)
    assert BurnWatch().look(busy.now) == []


def test_another_pools_burn_is_its_own(busy: Band):
    minutes(busy, contract(busy), bad=40, pool_id=busy.pool.pk + 1)
    assert BurnWatch().look(busy.now) == []
