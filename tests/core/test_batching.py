"""Dynamic batches: when they close, who is in them, and whose output is whose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.batching import (
    Batcher,
    BatchPolicy,
    Closing,
    Member,
    OutputCountError,
    ServiceTime,
    length_bucket,
    share_tokens,
    split,
)
from tests.core.batching_worlds import World, policies, stories

SMALL = BatchPolicy(max_batch_size=4, max_wait_us=10_000)


def ids(batches) -> list[list[int]]:
    return [[member.id for member in batch.members] for batch in batches]


def test_a_batch_closes_when_it_is_full() -> None:
    batcher = Batcher(SMALL)
    for number in (1, 2, 3):
        assert batcher.offer(Member(number, "s", number), number) == []
    (batch,) = batcher.offer(Member(4, "s", 4), 4)
    assert (ids([batch]), batch.closing, batch.closed_us, batch.inputs) == ([[1, 2, 3, 4]], Closing.FULL, 4, 4)
    assert batcher.waiting == 0 and batcher.next_due_us() is None


def test_a_batch_closes_when_its_oldest_member_has_waited_to_the_microsecond() -> None:
    batcher = Batcher(SMALL)
    batcher.offer(Member(1, "s", 100), 100)
    batcher.offer(Member(2, "s", 9_000), 9_000)
    assert batcher.next_due_us() == 10_100
    assert batcher.due(10_099) == []
    (batch,) = batcher.due(10_100)
    assert (ids([batch]), batch.closing) == ([[1, 2]], Closing.WAITED)


def test_a_request_that_comes_after_the_wait_does_not_join_the_batch_before_it() -> None:
    batcher = Batcher(SMALL)
    batcher.offer(Member(1, "s", 0), 0)
    assert ids(batcher.offer(Member(2, "s", 10_500), 10_500)) == [[1]]
    assert batcher.next_due_us() == 20_500


def test_shapes_do_not_mix() -> None:
    batcher = Batcher(BatchPolicy(2, 1_000))
    batcher.offer(Member(1, "short", 0), 0)
    batcher.offer(Member(2, "long", 1), 1)
    assert ids(batcher.offer(Member(3, "long", 2), 2)) == [[2, 3]]
    assert ids(batcher.due(1_000)) == [[1]]


def test_when_the_oldest_leaves_the_next_decides() -> None:
    batcher = Batcher(SMALL)
    batcher.offer(Member(1, "s", 0), 0)
    batcher.offer(Member(2, "s", 4_000), 4_000)
    assert batcher.cancel(1)
    assert batcher.next_due_us() == 14_000
    assert batcher.due(13_999) == []
    assert ids(batcher.due(14_000)) == [[2]]
    assert not batcher.cancel(2), "it left with its batch"


def test_the_last_that_leaves_takes_the_batch_with_it() -> None:
    batcher = Batcher(SMALL)
    batcher.offer(Member(1, "s", 0), 0)
    assert batcher.cancel(1)
    assert batcher.next_due_us() is None and batcher.due(1_000_000) == []


def test_who_leaves_makes_room() -> None:
    batcher = Batcher(SMALL)
    for number in (1, 2, 3):
        batcher.offer(Member(number, "s", 0), 0)
    batcher.cancel(2)
    assert batcher.offer(Member(4, "s", 0), 0) == []
    assert ids(batcher.offer(Member(5, "s", 0), 0)) == [[1, 3, 4, 5]]


def test_a_late_joiner_that_is_older_brings_its_own_deadline() -> None:
    batcher = Batcher(SMALL)
    batcher.offer(Member(1, "s", 5_000), 5_000)
    batcher.offer(Member(2, "s", 1_000), 6_000)
    assert batcher.next_due_us() == 11_000
    batcher.cancel(2)
    assert batcher.next_due_us() == 15_000


def test_several_inputs_count_as_many() -> None:
    batcher = Batcher(SMALL)
    batcher.offer(Member(1, "s", 0, inputs=3), 0)
    closed = batcher.offer(Member(2, "s", 1, inputs=2), 1)
    assert (ids(closed), closed[0].closing) == ([[1]], Closing.NO_ROOM)
    closed = batcher.offer(Member(3, "s", 2, inputs=9), 2)
    assert ids(closed) == [[2], [3]]
    assert [batch.closing for batch in closed] == [Closing.NO_ROOM, Closing.FULL]


@pytest.mark.parametrize("policy", [BatchPolicy(), BatchPolicy(1, 50_000), BatchPolicy(8, 0)])
def test_without_room_or_without_wait_each_goes_at_once(policy: BatchPolicy) -> None:
    batcher = Batcher(policy)
    for number in range(3):
        assert ids(batcher.offer(Member(number, "s", number), number)) == [[number]]


def test_other_limits_close_what_is_full_or_late_by_them() -> None:
    batcher = Batcher(SMALL)
    for number in (1, 2, 3):
        batcher.offer(Member(number, "s", 0), 0)
    batcher.offer(Member(4, "t", 0), 0)
    closed = batcher.set_policy(BatchPolicy(3, 10_000), 5)
    assert (ids(closed), closed[0].closing) == ([[1, 2, 3]], Closing.POLICY_CHANGED)
    assert ids(batcher.set_policy(BatchPolicy(3, 0), 6)) == [[4]]


def test_a_member_waits_once() -> None:
    batcher = Batcher(SMALL)
    batcher.offer(Member(1, "s", 0), 0)
    with pytest.raises(ValueError, match="member 1 waits already"):
        batcher.offer(Member(1, "s", 1), 1)


@pytest.mark.parametrize(("size", "wait_us"), [(0, 1), (-1, 1), (1, -1)])
def test_limits_that_cannot_be(size: int, wait_us: int) -> None:
    with pytest.raises(ValueError, match=r"max_(batch_size|wait_us) must be"):
        BatchPolicy(size, wait_us)
    with pytest.raises(ValueError, match="at least one input"):
        Member(1, "s", 0, 0)


# What comes back


def test_each_gets_its_own_rows() -> None:
    members = [Member(7, "s", 0, 2), Member(8, "s", 0), Member(9, "s", 0, 3)]
    rows = split(members, "abcdef")
    assert [(row.member.id, row.outputs) for row in rows] == [(7, "ab"), (8, "c"), (9, "def")]


@pytest.mark.parametrize("outputs", ["", "ab", "abcd"])
def test_another_number_of_outputs_is_nobodys(outputs: str) -> None:
    with pytest.raises(OutputCountError, match=f"3 inputs and came back with {len(outputs)} outputs") as raised:
        split([Member(1, "s", 0, 2), Member(2, "s", 0)], outputs)
    assert (raised.value.expected, raised.value.got) == (3, len(outputs))


def test_tokens_are_shared_in_proportion() -> None:
    assert share_tokens(100, [30, 10, 10]) == [60, 20, 20]
    assert share_tokens(7, [1, 1, 1]) == [3, 2, 2]
    assert share_tokens(5, [0, 0]) == [3, 2]
    assert share_tokens(0, [4, 5]) == [0, 0]


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
def test_shared_tokens_add_up(total: int, expected: list[int]) -> None:
    parts = share_tokens(total, expected)
    assert sum(parts) == total and min(parts) >= 0


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 64), (1, 64), (64, 64), (65, 128), (512, 512), (513, 1024)])
def test_length_buckets(tokens: int, bucket: int) -> None:
    assert length_bucket(tokens) == bucket


def test_service_time() -> None:
    assert ServiceTime(4_000, 500).service_us(16) == 12_000
    with pytest.raises(ValueError, match="0 or more"):
        ServiceTime(-1, 0)


# Whatever happens


@given(policies, stories)
def test_every_request_runs_once_or_left(policy, steps) -> None:
    world = World(policy).run(steps)
    ran = [member.id for batch in world.closed for member in batch.members]
    assert len(ran) == len(set(ran))
    assert set(ran) | world.left == set(world.members)
    assert not set(ran) & world.left


@given(policies, stories)
def test_no_batch_mixes_shapes_or_is_overfull(policy, steps) -> None:
    for batch in World(policy).run(steps).closed:
        assert {member.shape for member in batch.members} == {batch.shape}
        assert batch.inputs <= policy.max_batch_size or len(batch.members) == 1


@given(policies, stories)
def test_nobody_waits_longer_than_the_policy_and_only_a_full_batch_closes_before(policy, steps) -> None:
    world = World(policy).run(steps)
    for batch in world.closed:
        waited_us = batch.closed_us - min(member.arrived_us for member in batch.members)
        assert waited_us <= policy.max_wait_us
        if batch.closing is Closing.WAITED:
            assert waited_us == policy.max_wait_us
        elif batch.closing is Closing.FULL:
            assert batch.inputs >= policy.max_batch_size


@given(policies, stories)
def test_requests_of_a_shape_run_in_order_of_arrival(policy, steps) -> None:
    world = World(policy).run(steps)
    for shape in "abc":
        ran = [member.id for batch in world.closed if batch.shape == shape for member in batch.members]
        assert ran == sorted(ran)


@given(policies, stories)
def test_how_often_one_looks_changes_nothing(policy, steps) -> None:
    seldom, often = World(policy).run(steps), World(policy, extra_looks=True).run(steps)
    assert seldom.closed == often.closed
