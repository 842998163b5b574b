"""Merging what agents say of direct batch requests: nothing is lost and nothing is due later than it is."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.jobs.direct_work import ROWS_MAX, as_jobs, merged

ROWS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**9)), max_size=200)


@given(ROWS)
def test_few_rows_say_all_the_work_and_none_of_it_is_due_later(rows):
    few = merged(rows)
    assert len(few) <= ROWS_MAX
    assert sum(us for _, us in few) == sum(us for _, us in rows)
    for due in {due for due, _ in rows}:
        by_then = sum(us for at, us in rows if at <= due)
        assert sum(us for at, us in few if at <= due) >= by_then


def test_up_to_the_bound_every_row_stays_as_it_is():
    rows = [(due, 5) for due in range(ROWS_MAX)]
    assert merged(reversed(rows)) == rows
    assert [(job.deadline_us, job.remaining_gpu_us) for job in as_jobs([*rows, (99, 0)])] == rows
