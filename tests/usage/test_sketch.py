"""The vectorised sketches are the core's, bucket for bucket."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.histogram import ZERO_INDEX, Histogram, bucket_index
from controlplane.core.stage_stack import STAGES, StageStack
from controlplane.usage.sketch import HISTOGRAMS, Sketch, bucket_codes, merge_groups, sketch_groups

DURATION = st.one_of(st.integers(-1, 3), st.integers(0, 2**40), st.sampled_from([2**n for n in range(48)]))


@given(st.lists(st.integers(0, 2**47), min_size=1, max_size=200))
@settings(max_examples=60)
def test_buckets_are_the_cores(durations):
    codes = bucket_codes(np.array(durations, dtype=np.int64)).tolist()
    assert [ZERO_INDEX if code == 0 else code - 2 for code in codes] == [bucket_index(us) for us in durations]


def test_powers_of_two_lie_on_their_edge():
    powers = [2**n for n in range(48)]
    around = sorted({us + step for us in powers for step in (-1, 0, 1) if us + step >= 0})
    codes = bucket_codes(np.array(around, dtype=np.int64)).tolist()
    assert [ZERO_INDEX if code == 0 else code - 2 for code in codes] == [bucket_index(us) for us in around]


RECORDS = st.lists(
    st.tuples(
        st.integers(0, 3), st.lists(DURATION, min_size=len(STAGES), max_size=len(STAGES)), DURATION, st.booleans()
    ),
    min_size=1,
    max_size=40,
)


def by_hand(records, group):
    """The same sketch through the core, one record after the other."""
    sketch = Sketch()
    for of, stages, ttft, streamed in records:
        if of != group:
            continue
        known = [max(0, us) for us in stages]
        sketch.stack.record(known, streamed=streamed)
        times = dict(zip(STAGES, stages, strict=True)) | {"ttft": ttft, "upstream": -1}
        if not streamed:
            times |= {
                "upstream": known[STAGES.index("prefill")] + known[STAGES.index("decode")],
                "prefill": -1,
                "decode": -1,
            }
        for name in HISTOGRAMS:
            if times[name] >= 0:
                sketch.histograms[name].record(times[name])
    return sketch


def vectorised(records):
    return sketch_groups(
        np.array([r[0] for r in records]),
        4,
        np.array([r[1] for r in records], dtype=np.int64).T.copy(),
        np.array([r[2] for r in records], dtype=np.int64),
        np.array([r[3] for r in records]),
    )


@given(RECORDS)
@settings(max_examples=80)
def test_sketches_are_the_cores(records):
    for group, blob in enumerate(vectorised(records)):
        want = by_hand(records, group)
        found = Sketch.from_bytes(blob)
        assert found.histograms == want.histograms
        assert found.stack == want.stack
        assert blob == want.to_bytes()


@given(RECORDS, RECORDS)
@settings(max_examples=60)
def test_merging_is_adding(left, right):
    merged = merge_groups(np.array([0, 1, 2, 3, 0, 1, 2, 3]), 4, [*vectorised(left), *vectorised(right)])
    assert merged == [blob if blob else b"" for blob in vectorised([*left, *right])]


def test_a_blob_of_another_version_or_length_is_refused():
    blob = vectorised([(0, [1] * 7, 5, True)])[0]
    with pytest.raises(ValueError, match="version 9"):
        Sketch.from_bytes(b"\x09" + blob[1:])
    with pytest.raises(ValueError, match="header"):
        Sketch.from_bytes(blob + b"\0")
    assert Sketch.from_bytes(b"").stack == StageStack()
    assert Sketch.from_bytes(b"").histograms["queue"] == Histogram()
