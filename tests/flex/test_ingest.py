"""What reports leave in rows, and the grants that answers carry."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from controlplane.core.period import from_us, to_us
from controlplane.flex.ingest import note_slots, note_trips
from controlplane.flex.models import Grant, Trip
from controlplane.flex.queries import grants_for
from controlplane.wire.report import SlotLive
from controlplane.wire.report import Trip as TripMessage
from tests.flex.conftest import Band


def said(slot_id: int, fence: int, stop_us: int | None) -> SlotLive:
    return SlotLive(slot_id, "ready", "draining", fence, 1, 1, 0, 0, 0, stop_us)


def note(function, *rows) -> None:
    with connection.cursor() as cursor:
        function(cursor, list(rows), None)


def answers(band: Band) -> dict:
    with connection.cursor() as cursor:
        return grants_for(cursor, [agent.pk for agent in band.agents])


def test_an_answer_carries_what_is_left_of_the_loan(busy: Band):
    busy.until_lent()
    slot = busy.slots["f1"]
    with connection.cursor() as cursor:
        cursor.execute("UPDATE flex_grant SET expires_at = clock_timestamp() + interval '60 s' WHERE state = 'lent'")
    (grant,) = answers(busy)[slot.agent_id]
    assert (grant.slot_id, grant.fence, grant.action) == (slot.pk, 1, "lend")
    assert 30_000_000 < grant.ttl_us <= 60_000_000


def test_a_loan_that_nobody_renews_leaves_the_answers(busy: Band):
    busy.until_lent()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE flex_grant SET expires_at = clock_timestamp() WHERE state = 'lent'")
    assert answers(busy) == {}


def test_recalls_are_in_every_answer(busy: Band):
    busy.until_lent()
    busy.waits_us = [250_000] * 20
    busy.step(3)
    (grant,) = answers(busy)[busy.slots["f1"].agent_id]
    assert (grant.fence, grant.action, grant.ttl_us, grant.reason) == (2, "recall", 0, "interactive_p95")


def test_a_slot_that_was_never_lent_has_no_grant(band: Band):
    band.step(1)
    assert answers(band) == {}


def test_the_instant_of_the_last_admission_is_kept(busy: Band):
    busy.until_lent()
    slot = busy.slots["f1"]
    at_us = to_us(busy.now) + 500_000
    note(note_slots, (slot.agent_id, [said(slot.pk, 1, at_us)]))
    assert Grant.objects.get(slot=slot).stop_admit_at == from_us(at_us)


@pytest.mark.parametrize("wrong", ["other agent", "old fence", "before the loan"])
def test_words_about_another_loan_are_left_out(busy: Band, wrong: str):
    busy.until_lent()
    slot = busy.slots["f1"]
    agent_id = next(a.pk for a in busy.agents if a.pk != slot.agent_id) if wrong == "other agent" else slot.agent_id
    fence = 7 if wrong == "old fence" else 1
    at_us = to_us(busy.now - timedelta(days=1)) if wrong == "before the loan" else to_us(busy.now) + 5
    note(note_slots, (agent_id, [said(slot.pk, fence, at_us)]))
    assert Grant.objects.get(slot=slot).stop_admit_at is None


def test_a_trip_is_kept_once_and_only_from_its_own_agent(busy: Band):
    busy.until_lent()
    slot = busy.slots["f1"]
    trip = TripMessage(slot.pk, 1, to_us(busy.now), "oldest_waiting", 250_000.0)
    stranger = next(agent.pk for agent in busy.agents if agent.pk != slot.agent_id)
    note(note_trips, (stranger, [trip]))
    assert not Trip.objects.exists()
    note(note_trips, (slot.agent_id, [trip, trip]))
    note(note_trips, (slot.agent_id, [trip]))
    assert Trip.objects.count() == 1
    busy.step(1)
    assert busy.grant("f1").reason == "tripwire"


def test_an_impossible_instant_does_not_refuse_the_report(busy: Band):
    slot = busy.slots["f1"]
    note(note_trips, (slot.agent_id, [TripMessage(slot.pk, 1, 2**62, "x\x00y", 1.0)]))
    assert Trip.objects.get().reason == "xy"
