"""Reports for property tests: records whose numbers are sound, at the edges, or wrong, with and without texts."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from controlplane.wire.packed import ROW_CODES
from controlplane.wire.report import Report, UsageRow
from tests.wire.messages import REPORT

_INTEGERS = [name for name in UsageRow.__struct_fields__ if name not in ("request_id", "job", "client_request_id")]
_BITS = {"h": 16, "i": 32, "q": 64}
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=140) | st.just("")


def _number(code: str) -> st.SearchStrategy[int]:
    half = 2 ** (_BITS[code] - 1)
    return st.integers(0, 3) | st.integers(-half, half - 1) | st.sampled_from([-1, half - 1, -half])


def rows() -> st.SearchStrategy[UsageRow]:
    """A record that a packed row can hold, its numbers anything."""
    numbers = {name: _number(code) for name, code in zip(_INTEGERS, ROW_CODES, strict=True)}
    return st.builds(UsageRow, request_id=st.uuids().map(str), job=_texts, client_request_id=_texts, **numbers)


def reports() -> st.SearchStrategy[Report]:
    """Reports of up to five records beside everything else that a report can have."""
    return st.lists(rows(), max_size=5).map(lambda records: msgspec.structs.replace(REPORT, records=records))
