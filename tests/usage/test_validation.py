"""Column checks agree with the core's rules record by record, and COPY stores what was reported."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.money import round_ratio
from controlplane.core.pricing import RateCard, charge
from controlplane.core.reasons import Outcome
from controlplane.usage.cursors import Envelope, Position, Verdict, judge
from controlplane.usage.ingest import store_records
from controlplane.usage.models import UsageRecord
from controlplane.usage.partitions import ensure_day
from controlplane.usage.records import Origin, UnreadableRows, as_rows, to_columns
from controlplane.usage.rollup_keys import group_by, sum_groups
from controlplane.usage.validation import Bounds, Card, ClassFacts, Fault, Known, Members, _rounded, find_faults
from controlplane.wire.report import FLAG_CAPPED, UsageRow
from tests.usage_rows import as_tuple

NOW_US = time.time_ns() // 1000
BOUNDS = Bounds.at(NOW_US, spool_age_us=14 * 86_400_000_000)
CHAT, BULK = 1, 2


def row(**given) -> UsageRow:
    values = dict.fromkeys(UsageRow.__struct_fields__, 0)
    values |= {
        "request_id": "0193f000-0000-7000-8000-000000000001", "job": "", "client_request_id": "",
        "arrived_us": NOW_US - 10, "ended_us": NOW_US, "attempt": 1, "slot_id": 1, "tenant_id": 1, "class_id": CHAT,
        "asked_class_id": CHAT, "model_id": 1, "outcome": Outcome.COMPLETED.code, "status": 200,
    }  # fmt: skip
    return UsageRow(**{**values, **given})


def columns(*rows):
    return to_columns([(Origin(1, 1), [as_tuple(one) for one in rows])])


def known(**given) -> Known:
    facts = {CHAT: ClassFacts("chat", False), BULK: ClassFacts("bulk", True)}
    return Known(slot_pools={1: 1, 2: 2}, tenants=frozenset({1, 2}), classes=facts, models=frozenset({1}), **given)


def fault_of(one: UsageRow, **given) -> Fault:
    return Fault(int(find_faults(columns(one), known(**given), BOUNDS)[0]))


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({}, Fault.NONE),
        ({"ended_us": NOW_US + 299_000_000}, Fault.NONE),
        ({"ended_us": NOW_US + 301_000_000}, Fault.IN_THE_FUTURE),
        ({"arrived_us": NOW_US + 1}, Fault.IMPOSSIBLE_TIMES),
        ({"arrived_us": 0}, Fault.IMPOSSIBLE_TIMES),
        ({"arrived_us": 1, "ended_us": NOW_US - 14 * 86_400_000_000 + 1}, Fault.NONE),
        ({"arrived_us": 1, "ended_us": NOW_US - 14 * 86_400_000_000 - 1}, Fault.TOO_OLD),
        ({"ttft_us": -1, "slot_id": -1}, Fault.NONE),
        ({"queue_us": -2}, Fault.NEGATIVE_NUMBER),
        ({"cached_tokens": 1}, Fault.ABSURD_NUMBER),
        ({"gpu_us": 2**62}, Fault.ABSURD_NUMBER),
        ({"outcome": 45}, Fault.ABSURD_NUMBER),
        ({"flags": 31}, Fault.NONE),
        ({"flags": 64}, Fault.ABSURD_NUMBER),
        ({"status": 1_000}, Fault.ABSURD_NUMBER),
        ({"tenant_id": 3}, Fault.UNKNOWN_TENANT),
        ({"class_id": 9}, Fault.UNKNOWN_CLASS),
        ({"asked_class_id": 9}, Fault.UNKNOWN_CLASS),
        ({"model_id": 9}, Fault.UNKNOWN_MODEL),
        ({"slot_id": 2}, Fault.UNKNOWN_SLOT),
        ({"rate_version": 9}, Fault.UNKNOWN_RATE),
        ({"charge_gpu_nanos": 1}, Fault.WRONG_CHARGE),
        ({"tenant_id": 3, "charge_gpu_nanos": 1, "queue_us": -2}, Fault.NEGATIVE_NUMBER),
    ],
)
def test_the_first_fault_is_named(given, fault):
    assert fault_of(row(**given)) is fault


def test_a_clock_is_judged_by_when_a_record_ended_and_never_by_how_long_it_ran():
    """A job of 27 hours that ends now is no clock that is wrong, nor is one that an agent kept while it was cut off."""
    day_us, hour_us = 86_400_000_000, 3_600_000_000
    assert fault_of(row(arrived_us=NOW_US - 27 * hour_us)) is Fault.NONE
    assert fault_of(row(arrived_us=NOW_US - 15 * day_us)) is Fault.NONE
    assert fault_of(row(arrived_us=NOW_US - 28 * hour_us, ended_us=NOW_US - 27 * hour_us)) is Fault.NONE
    assert fault_of(row(arrived_us=NOW_US - 16 * day_us, ended_us=NOW_US - 15 * day_us)) is Fault.TOO_OLD
    assert fault_of(row(arrived_us=NOW_US - 27 * hour_us, ended_us=NOW_US + hour_us)) is Fault.IN_THE_FUTURE


def test_one_bad_record_leaves_the_others_alone():
    faults = find_faults(columns(row(), row(tenant_id=9), row(attempt=2)), known(), BOUNDS)
    assert faults.tolist() == [0, Fault.UNKNOWN_TENANT, 0]


def test_an_attempt_counts_once_in_a_report():
    one, second_try = row(), row(attempt=2)
    of_one_report = find_faults(columns(row(tenant_id=9), one, second_try, one, one), known(), BOUNDS)
    twice = Fault.DUPLICATE_IN_REPORT
    assert of_one_report.tolist() == [Fault.UNKNOWN_TENANT, 0, 0, twice, twice]
    of_two = to_columns([(Origin(1, 1), [as_tuple(one)]), (Origin(1, 1), [as_tuple(one)])])
    assert not find_faults(of_two, known(), BOUNDS).any(), "what a later report repeats is for the audit"


def test_a_revision_knows_its_own_tenants_and_classes():
    members = {(1, 7): Members(frozenset({2}), frozenset({BULK}))}
    given = {"members": lambda pool_id, revision: members.get((pool_id, revision))}
    assert fault_of(row(revision=7), **given) is Fault.UNKNOWN_TENANT
    assert fault_of(row(revision=7, tenant_id=2), **given) is Fault.UNKNOWN_CLASS
    assert fault_of(row(revision=7, tenant_id=2, class_id=BULK), **given) is Fault.NONE


PRICE = st.integers(0, 50_000_000_000)


TOKENS = st.integers(0, 2**31 - 1)
DISCOUNT_PPM = st.sampled_from([0, 1, 333_333, 500_000, 1_000_000])


@given(PRICE, PRICE, PRICE, PRICE, DISCOUNT_PPM, TOKENS, TOKENS, st.integers(0, 10**12), st.booleans(), st.data())
@settings(max_examples=150)
def test_charges_are_what_the_core_charges(
    prompt_price, cached_price, output_price, gpu_price, ppm, prompt, output, gpu_us, batch, data
):
    cached = data.draw(st.integers(0, prompt))
    prices = RateCard(prompt_price, cached_price, output_price, gpu_price, ppm, 5)
    lines = charge(prices, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output, gpu_us=gpu_us, batch=batch)
    class_id = BULK if batch else CHAT
    card = Card("bulk" if batch else "chat", 1, prompt_price, cached_price, output_price, gpu_price, ppm)
    due = row(
        class_id=class_id, asked_class_id=class_id, rate_version=5, prompt_tokens=prompt, cached_tokens=cached,
        output_tokens=output, gpu_us=gpu_us, charge_prompt_nanos=lines.prompt_nanos,
        charge_cached_nanos=lines.cached_nanos, charge_output_nanos=lines.output_nanos,
        charge_gpu_nanos=lines.gpu_nanos,
    )  # fmt: skip
    too_high = max(lines.prompt_nanos, lines.cached_nanos, lines.output_nanos, lines.gpu_nanos) > 2**53
    want = Fault.ABSURD_NUMBER if too_high else Fault.NONE
    assert fault_of(due, cards={5: card}) is want
    if not too_high:
        more = msgspec.structs.replace(due, charge_output_nanos=lines.output_nanos + 1)
        broken = msgspec.structs.replace(due, outcome=Outcome.UPSTREAM_ERROR.code, charge_prompt_nanos=0)
        assert fault_of(more, cards={5: card}) is Fault.WRONG_CHARGE
        capped = msgspec.structs.replace(
            due, flags=due.flags | FLAG_CAPPED, charge_output_nanos=lines.output_nanos // 2
        )
        dearer = msgspec.structs.replace(more, flags=due.flags | FLAG_CAPPED)
        assert fault_of(capped, cards={5: card}) is Fault.NONE, "the platform bears what is over a reservation"
        assert fault_of(dearer, cards={5: card}) is Fault.WRONG_CHARGE
        assert fault_of(broken, cards={5: card}) is Fault.NONE, "only what was delivered is paid for"


@given(st.lists(st.integers(0, 2**45), min_size=1, max_size=20), st.integers(0, 2**60), st.integers(1, 2**61))
@settings(max_examples=100)
def test_rounding_a_column_is_rounding_each(quantities, numerator, denominator):
    want = [min(round_ratio(value * numerator, denominator), 2**62) for value in quantities]
    assert _rounded(np.array(quantities, dtype=np.int64), numerator, denominator).tolist() == want


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-(2**62), 2**62), st.integers(0, 2**40)), max_size=60))
@settings(max_examples=80)
def test_groups_and_sums_are_exact_whatever_the_span(rows):
    left, wide, value = (np.array([one[at] for one in rows], dtype=np.int64) for at in range(3))
    groups = group_by([left, wide])
    want: dict[tuple[int, int], int] = {}
    for one in rows:
        want[one[:2]] = want.get(one[:2], 0) + one[2]
    sums = sum_groups(groups, value[None, :])[0].tolist()
    assert list(zip(map(tuple, groups.keys.T.tolist()), sums, strict=True)) == sorted(want.items())


def test_unreadable_rows_are_found_one_by_one():
    good = as_tuple(row())
    bad_id = ("0193f0000000-7000-8000-0000-00000000001", *good[1:])
    spaced = ("0193f000-0000-7000-8000-00000000000 ", *good[1:])
    huge = (*good[:-2], 2**63, good[-1])
    with pytest.raises(UnreadableRows) as found:
        to_columns([(Origin(1, 1), [good, bad_id, huge]), (Origin(2, 1), [spaced, good])])
    assert found.value.rows == [1, 2, 3]


def test_rows_come_back_as_they_were_sent():
    sent = [row(job="j", client_request_id="c", gpu_us=5), row(tenant_id=2)]
    assert as_rows(columns(*sent), [0, 1]) == [list(as_tuple(one)) for one in sent]


def test_copy_stores_client_ids_of_any_length(world, in_transaction):
    texts = ["", "a", "order-17", "é" * 100, "x" * 200, "nul\x00", "", "日本"]
    now = datetime.now(UTC)
    rows = [
        row(request_id=f"0193f000-0000-7000-8000-{at:012d}", client_request_id=text) for at, text in enumerate(texts)
    ]
    in_transaction(ensure_day, now)
    in_transaction(store_records, columns(*rows), now)
    found = {record.request_id.int & 0xFFFF: record.client_request_id for record in UsageRecord.objects.all()}
    assert [found[at] for at in sorted(found)] == ["", "a", "order-17", "é" * 64, "x" * 128, "nul", "", "日本"]


POSITIONS = {
    "at 4": Position(4, b"d4", False, 7),
    "sealed": Position(4, b"d4", True, 7),
}


@pytest.mark.parametrize(
    ("position", "epoch", "sender", "seq", "digest", "verdict"),
    [
        ("at 4", 7, 7, 5, b"x", Verdict.TAKEN),
        ("at 4", 7, 7, 4, b"d4", Verdict.REPEAT),
        ("at 4", 7, 7, 4, b"x", Verdict.CONFLICT),
        ("at 4", 7, 7, 3, b"x", Verdict.REPEAT),
        ("at 4", 7, 7, 6, b"x", Verdict.EXPECTED),
        ("at 4", 6, 6, 5, b"x", Verdict.SUPERSEDED),
        ("at 4", 6, 7, 5, b"x", Verdict.TAKEN),
        ("at 4", 8, 8, 5, b"x", Verdict.UNKNOWN),
        ("at 4", 7, 8, 5, b"x", Verdict.UNKNOWN),
        ("at 4", 6, 6, 4, b"d4", Verdict.SUPERSEDED),
        ("sealed", 6, 7, 5, b"x", Verdict.SEALED),
        ("sealed", 6, 7, 4, b"d4", Verdict.REPEAT),
        ("sealed", 6, 7, 4, b"x", Verdict.CONFLICT),
        ("sealed", 6, 6, 4, b"d4", Verdict.SUPERSEDED),
    ],
)
def test_what_becomes_of_a_report(position, epoch, sender, seq, digest, verdict):
    assert judge(POSITIONS[position], Envelope(1, epoch, seq, digest, sender)) is verdict


@pytest.mark.parametrize(
    ("seq", "lost_from", "verdict"),
    [
        (9, 5, Verdict.TAKEN),
        (9, 6, Verdict.EXPECTED),
        (9, 4, Verdict.EXPECTED),
        (9, 0, Verdict.EXPECTED),
        (5, 5, Verdict.TAKEN),
        (3, 2, Verdict.REPEAT),
    ],
)
def test_a_report_may_follow_a_gap_that_it_names_from_the_number_that_is_expected(seq, lost_from, verdict):
    assert judge(POSITIONS["at 4"], Envelope(1, 7, seq, b"x", 7, lost_from)) is verdict


def test_an_epoch_without_a_cursor_was_never_issued():
    assert judge(None, Envelope(1, 1, 1, b"", 1)) is Verdict.UNKNOWN
