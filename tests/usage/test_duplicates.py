"""The hourly audit finds what no cursor can: the same attempt from two agents or two epochs, once, with its amounts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from controlplane.core.period import to_us
from controlplane.usage.duplicates import GRACE, HOUR, audit_closed_hours, audit_hour
from controlplane.usage.ingest import store_records
from controlplane.usage.models import AuditedHour, DuplicateRecord, RollupDelta, UsageRecord
from controlplane.usage.partitions import ensure_day
from controlplane.usage.records import Origin, to_columns
from tests.usage_rows import as_tuple, usage_row

# an hour that lies in one day with the two before it
TOP = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)


def store(in_transaction, world, rows, received, agent_id=1):
    records = to_columns([(Origin(agent_id, world.pool.pk), [as_tuple(row) for row in rows])])
    in_transaction(ensure_day, received)
    in_transaction(store_records, records, received)


def rows(world, n, ended, **given):
    return [usage_row(world, prices=world.prices, ended_us=to_us(ended), **given) for _ in range(n)]


def test_a_record_of_two_agents_is_found_once_with_what_it_added(world, in_transaction):
    sent = rows(world, 5, TOP)
    store(in_transaction, world, sent, TOP + timedelta(minutes=1), agent_id=1)
    store(in_transaction, world, sent[:2], TOP + timedelta(minutes=2), agent_id=2)
    for _ in range(3):
        audit = audit_hour(TOP, TOP + HOUR + GRACE)
        assert (audit.records, audit.duplicates) == (7, 2)
    found = {str(row.request_id): row for row in DuplicateRecord.objects.all()}
    assert set(found) == {sent[0].request_id, sent[1].request_id}
    one = found[sent[0].request_id]
    assert (one.copies, one.agent_ids, one.same_content) == (2, [1, 2], True)
    assert one.output_tokens == sent[0].output_tokens
    assert one.charge_output_nanos == sent[0].charge_output_nanos > 0
    assert (one.tenant_id, one.first_received_at) == (world.tenant.pk, TOP + timedelta(minutes=1))
    # a check, not a gate: nothing that was counted has moved
    assert UsageRecord.objects.count() == sum(RollupDelta.objects.values_list("requests", flat=True)) == 7


def test_a_copy_hours_later_is_found_and_a_third_one_adds_to_it(world, in_transaction):
    sent = rows(world, 1, TOP - timedelta(minutes=5))
    for later, agent_id in ((0, 1), (1, 2), (2, 3)):
        store(in_transaction, world, sent, TOP + later * HOUR + timedelta(minutes=1), agent_id=agent_id)
    assert audit_hour(TOP, TOP + HOUR).duplicates == 0
    assert audit_hour(TOP + HOUR, TOP + 2 * HOUR).duplicates == 1
    assert DuplicateRecord.objects.get().copies == 2
    audit_hour(TOP + 2 * HOUR, TOP + 3 * HOUR)
    # the hour before, looked through again, takes nothing back
    audit_hour(TOP + HOUR, TOP + 4 * HOUR)
    one = DuplicateRecord.objects.get()
    assert (one.copies, one.agent_ids, one.hour) == (3, [1, 2, 3], TOP + 2 * HOUR)
    assert one.output_tokens == 2 * sent[0].output_tokens


def test_copies_that_disagree_are_told_and_attempts_are_no_copies(world, in_transaction):
    first = rows(world, 1, TOP)[0]
    other = msgspec.structs.replace(first, output_tokens=first.output_tokens + 20)
    again = msgspec.structs.replace(first, attempt=2)
    store(in_transaction, world, [first, again], TOP + timedelta(minutes=1), agent_id=1)
    store(in_transaction, world, [other], TOP + timedelta(minutes=1, seconds=1), agent_id=2)
    audit_hour(TOP, TOP + HOUR)
    one = DuplicateRecord.objects.get()
    assert (one.attempt, one.same_content, one.output_tokens) == (1, False, other.output_tokens)


def test_every_closed_hour_is_looked_through_once_and_the_open_one_is_not(world, in_transaction):
    assert audit_closed_hours(TOP) == []
    store(in_transaction, world, rows(world, 2, TOP), TOP + timedelta(minutes=30))
    store(in_transaction, world, rows(world, 1, TOP), TOP + 2 * HOUR + timedelta(minutes=30))
    almost = TOP + 3 * HOUR + GRACE - timedelta(seconds=1)
    assert [(audit.hour, audit.records) for audit in audit_closed_hours(almost)] == [(TOP, 2), (TOP + HOUR, 0)]
    assert [audit.hour for audit in audit_closed_hours(almost + timedelta(seconds=1))] == [TOP + 2 * HOUR]
    assert audit_closed_hours(almost + timedelta(minutes=5)) == []
    assert AuditedHour.objects.count() == 3
