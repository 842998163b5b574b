import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.histogram import bucket_index
from controlplane.core.stage_stack import STACK_STAGES, STAGES, StageStack

REQUEST = st.tuples(st.lists(st.integers(0, 10**7), min_size=7, max_size=7), st.booleans())
REQUESTS = st.lists(REQUEST, max_size=30)


def stack_of(requests: list[tuple[list[int], bool]]) -> StageStack:
    stack = StageStack()
    for stages_us, streamed in requests:
        stack.record(stages_us, streamed=streamed)
    return stack


@settings(max_examples=80)
@given(st.lists(REQUEST, min_size=1, max_size=30), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_stages_of_a_tail_add_up_to_its_mean_exactly(requests: list[tuple[list[int], bool]], percentile: float) -> None:
    tail = stack_of(requests).tail(percentile)
    assert tail is not None
    assert sum(tail.stage_means_us.values()) == tail.mean_us
    edge = sorted(sum(stages) for stages, _ in requests)[
        -(len(requests) - -(-int(percentile * 100) * len(requests) // 100)) - 1
    ]
    chosen = [sum(stages) for stages, _ in requests if bucket_index(sum(stages)) >= bucket_index(edge)]
    assert (tail.count, tail.sum_us) == (len(chosen), sum(chosen))
    assert list(tail.stage_means_us) == list(STACK_STAGES)


@settings(max_examples=80)
@given(REQUESTS, REQUESTS)
def test_stacks_merge_by_addition_in_every_form(
    a: list[tuple[list[int], bool]], b: list[tuple[list[int], bool]]
) -> None:
    merged = stack_of(a)
    merged.merge(stack_of(b))
    assert merged == stack_of(b + a)
    assert StageStack.from_bytes(stack_of(a).to_bytes() + stack_of(b).to_bytes()) == merged
    assert merged.count == merged.histogram().count == len(a) + len(b)


def test_the_tail_shows_where_the_slow_requests_waited() -> None:
    stack = StageStack()
    for _ in range(95):
        stack.record([1_000, 0, 0, 1_000, 100_000, 400_000, 1_000])
    for _ in range(5):
        stack.record([1_000, 5_000_000, 0, 1_000, 100_000, 400_000, 1_000])
    tail = stack.tail(0.96)
    assert tail is not None
    assert tail.count == 5
    assert tail.stage_means_us["queue"] == 5_000_000
    assert tail.mean_us == 5_503_000


def test_prefill_and_decode_of_an_unstreamed_request_are_one_stage() -> None:
    stack = StageStack()
    stack.record([1, 2, 3, 4, 50, 60, 7], streamed=False)
    tail = stack.tail(0.5)
    assert tail is not None
    assert (tail.stage_sums_us["prefill"], tail.stage_sums_us["decode"], tail.stage_sums_us["upstream"]) == (0, 0, 110)


def test_unusable_input_is_refused() -> None:
    assert StageStack().tail(0.95) is None
    with pytest.raises(ValueError, match="7 stage times"):
        StageStack().record([1] * (len(STAGES) - 1))
    with pytest.raises(ValueError, match="zero or more"):
        StageStack().record([1, 1, 1, -1, 1, 1, 1])
    with pytest.raises(ValueError, match="bytes per bucket"):
        StageStack.from_bytes(b"123")
