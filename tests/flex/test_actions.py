"""Recall, freeze and what comes after, with their entries in the audit log."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.fleet.models import Pool
from controlplane.flex import actions, queries
from tests.flex.conftest import Band

ONCALL = Actor(id=None, name="ona", role="oncall")


def test_a_recall_needs_a_reason_and_a_lent_slot(busy: Band):
    busy.step(1)
    slot_id = busy.slots["f1"].pk
    with pytest.raises(ValidationError, match="Say why"):
        actions.recall_slot(slot_id=slot_id, actor=ONCALL, now=busy.now, reason="  ")
    with pytest.raises(ValidationError, match="f1 is not lent"):
        actions.recall_slot(slot_id=slot_id, actor=ONCALL, now=busy.now, reason="x")
    with pytest.raises(ValidationError, match="no such slot"):
        actions.recall_slot(slot_id=10**6, actor=ONCALL, now=busy.now, reason="x")
    busy.until_lent()
    actions.recall_slot(slot_id=slot_id, actor=ONCALL, now=busy.now, reason="x")
    actions.recall_slot(slot_id=slot_id, actor=ONCALL, now=busy.now, reason="again")
    assert AuditEntry.objects.filter(action="flex.recall").count() == 1
    busy.step(1)
    grant = busy.grant("f1")
    assert (grant.state, grant.reason, grant.manual_recall) == ("draining", "manual", False), "the wish was granted"
    with pytest.raises(ValidationError, match="on its way home already"):
        actions.recall_slot(slot_id=slot_id, actor=ONCALL, now=busy.now, reason="x")
    busy.step(1)
    assert busy.grant("f1").state == "home"


def test_a_freeze_has_an_end_and_is_renewed(busy: Band):
    now, pool_id = busy.now, busy.pool.pk
    for until in (now, now + timedelta(days=8)):
        with pytest.raises(ValidationError, match="at most 7 days"):
            actions.freeze(pool_id=pool_id, actor=ONCALL, now=now, reason="x", until=until)
    first = actions.freeze(pool_id=pool_id, actor=ONCALL, now=now, reason="x")
    assert first.frozen_until == now + timedelta(hours=1)
    later = actions.freeze(pool_id=pool_id, actor=ONCALL, now=now + timedelta(minutes=30), reason="still")
    assert later.frozen_since == now
    assert later.frozen_until == now + timedelta(minutes=90)
    assert later.live_number > first.live_number
    freeze = queries.freeze_of(later, now)
    assert freeze is not None and (freeze.by, freeze.reason) == ("ona", "still")
    assert queries.freeze_of(later, later.frozen_until) is None


def test_unfreeze_and_the_end_of_time_are_audited(busy: Band):
    now, pool_id = busy.now, busy.pool.pk
    actions.freeze(pool_id=pool_id, actor=ONCALL, now=now, reason="x")
    actions.unfreeze(pool_id=pool_id, actor=ONCALL, now=now, reason="over")
    actions.unfreeze(pool_id=pool_id, actor=ONCALL, now=now, reason="over")
    actions.freeze(pool_id=pool_id, actor=ONCALL, now=now, reason="x", until=now + timedelta(minutes=1))
    assert actions.end_expired_freezes(now + timedelta(seconds=59)) == 0
    assert actions.end_expired_freezes(now + timedelta(seconds=60)) == 1
    assert actions.end_expired_freezes(now + timedelta(seconds=61)) == 0
    assert Pool.objects.get().frozen_by == ""
    assert list(AuditEntry.objects.order_by("id").values_list("action", flat=True)) == [
        "flex.freeze", "flex.unfreeze", "flex.freeze", "flex.freeze_ended",
    ]  # fmt: skip


def test_freeze_and_recall_is_one_thing(busy: Band):
    busy.until_lent(2)
    with pytest.raises(ValidationError):
        actions.freeze_and_recall(pool_id=busy.pool.pk, actor=ONCALL, now=busy.now, reason="")
    assert not busy.grant("f1").manual_recall
    actions.freeze_and_recall(pool_id=busy.pool.pk, actor=ONCALL, now=busy.now, reason="burn")
    assert busy.grant("f1").manual_recall and busy.grant("f2").manual_recall
    busy.step(20)
    assert busy.count("lent") == 0


def test_an_archived_pool_cannot_be_frozen(busy: Band):
    Pool.objects.update(archived_at=busy.now)
    with pytest.raises(ValidationError, match="archived"):
        actions.freeze(pool_id=busy.pool.pk, actor=ONCALL, now=busy.now, reason="x")
