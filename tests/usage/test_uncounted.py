"""How much of a day's usage is in no total: from what agents sent to the share of records and of spend."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction

import msgspec
import pytest

from controlplane.usage.duplicates import GRACE, HOUR, audit_hour
from controlplane.usage.ingest import SetAside, quarantine
from controlplane.usage.models import DuplicateRecord, Quarantine
from controlplane.usage.uncounted import Uncounted, uncounted
from controlplane.usage.validation import charged_nanos
from tests.usage.test_duplicates import rows, store
from tests.usage_rows import as_tuple

NOW = datetime.now(UTC).replace(minute=30, second=0, microsecond=0)


def aside(in_transaction, sent, reason="unknown_tenant", *, at=NOW, agent_id=1, **given):
    records = [list(as_tuple(row)) for row in sent]
    row = SetAside(agent_id, 1, 1, reason, **{"payload": {"records": records}, "records": len(records), **given})
    in_transaction(quarantine, [row], at)


def charge_of(row) -> int:
    return row.charge_prompt_nanos + row.charge_cached_nanos + row.charge_output_nanos + row.charge_gpu_nanos


def test_nothing_set_aside_is_nothing_and_reads_no_totals(world, in_transaction, django_assert_num_queries):
    store(in_transaction, world, rows(world, 3, NOW), NOW)
    with django_assert_num_queries(2):
        assert uncounted(NOW) == Uncounted()
    assert Uncounted().worst == 0


def test_usage_of_nobody_is_a_share_of_records_and_of_spend(world, in_transaction):
    good, ownerless = rows(world, 9, NOW - timedelta(hours=3)), rows(world, 1, NOW)
    store(in_transaction, world, good, NOW)
    aside(in_transaction, ownerless)
    found = uncounted(NOW)
    assert (found.counted, found.aside, found.share) == (9, 1, Fraction(1, 10))
    lost, kept = charge_of(ownerless[0]), sum(charge_of(row) for row in good)
    assert lost > 0 and (found.aside_nanos, found.counted_nanos) == (lost, kept)
    assert found.spend_share == Fraction(lost, lost + kept)
    (group,) = found.groups
    assert (group.reason, group.agent_id, group.records, group.unpriced) == ("unknown_tenant", 1, 1, 0)


@pytest.mark.parametrize("charge", [-1, 2**53 + 1, "12", None, 1.5, True])
def test_a_charge_that_cannot_be_true_is_unknown_and_never_zero(world, in_transaction, charge):
    sent = rows(world, 2, NOW)
    records = [list(as_tuple(row)) for row in sent]
    assert charged_nanos({"records": records}) == sum(charge_of(row) for row in sent)
    records[1][30] = charge
    assert charged_nanos({"records": records}) is None
    aside(in_transaction, sent, "wrong_charge", payload={"records": records})
    found = uncounted(NOW)
    assert (found.aside, found.unpriced, found.aside_nanos) == (2, 2, 0)
    assert found.share == 1 and found.spend_share == 0


def test_charges_that_pass_what_a_column_holds_are_unknown(world):
    row = list(as_tuple(rows(world, 1, NOW)[0]))
    row[29:33] = [2**53] * 4
    assert charged_nanos({"records": [row] * 255}) == 255 * 2**55
    assert charged_nanos({"records": [row] * 256}) is None
    assert charged_nanos({"records": 3}) is None and charged_nanos([]) is None and charged_nanos({}) is None


def test_what_is_decided_old_or_only_a_copy_in_its_report_is_not_missing(world, in_transaction):
    sent = rows(world, 2, NOW)
    aside(in_transaction, sent, "duplicate_in_report")
    aside(in_transaction, sent, at=NOW - timedelta(hours=25))
    aside(in_transaction, [], "unsound_refusal")
    aside(in_transaction, sent, "wrong_charge")
    assert uncounted(NOW).aside == 2
    Quarantine.objects.filter(reason="wrong_charge").update(resolved_at=NOW)
    assert uncounted(NOW) == Uncounted()


def test_lost_reports_count_with_what_they_held_or_as_unknown(world, in_transaction):
    gone = {"first_seq": 3, "last_seq": 4}
    aside(in_transaction, [], "reports_lost", payload={**gone, "records": 40}, records=40)
    found = uncounted(NOW)
    assert (found.aside, found.unpriced, found.unknown_reports) == (40, 40, 0)
    aside(in_transaction, [], "reports_lost", payload={**gone, "records": None}, agent_id=2)
    found = uncounted(NOW)
    assert (found.aside, found.unknown_reports) == (40, 1)
    assert [(group.agent_id, group.unknown_reports) for group in found.groups] == [(1, 0), (2, 1)]


def test_what_was_counted_twice_counts_as_wrong(world, in_transaction):
    ended = NOW.replace(minute=0) - 3 * HOUR
    sent = rows(world, 4, ended)
    store(in_transaction, world, sent, ended + timedelta(minutes=1), agent_id=1)
    store(in_transaction, world, [msgspec.structs.replace(sent[0])], ended + timedelta(minutes=2), agent_id=2)
    store(in_transaction, world, [msgspec.structs.replace(sent[0])], ended + timedelta(minutes=3), agent_id=3)
    audit_hour(ended, ended + HOUR + GRACE)
    assert DuplicateRecord.objects.get().copies == 3
    found = uncounted(NOW)
    assert (found.counted, found.copies, found.share) == (6, 2, Fraction(2, 6))
    assert found.copies_nanos == 2 * charge_of(sent[0]) and found.spend_share == Fraction(2, 6)
    assert uncounted(NOW + timedelta(days=2)) == Uncounted()
