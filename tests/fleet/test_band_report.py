"""What is packed of a report says of the flex band what the report as JSON says."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import msgspec.structs as structs
import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.histogram import INDEX_MAX, INDEX_MIN, ZERO_INDEX, quantile_index
from controlplane.fleet import band_report
from controlplane.fleet.ingest import LiveRow, note_live
from controlplane.fleet.models import AgentLive
from controlplane.flex import telemetry
from controlplane.flex.leadership import Shard
from controlplane.wire.report import ClassLive, DirectWork, LiveFigures, SlotLive
from tests import factories

counts = st.integers(0, 2**62)
instants = st.none() | st.integers(-(2**40), 2**62)
slots = st.builds(
    SlotLive, slot_id=st.integers(1, 9), state=st.just("ready"), flex=st.sampled_from(["home", "lent", "\x00", "ü"]),
    fence=counts, running=counts, running_batch=counts, running_batch_gpu_us=st.integers(-5, 5) | counts,
    free_kv_tokens=counts, total_kv_tokens=counts, stop_admit_us=instants, last_token_us=instants, home_us=instants,
)  # fmt: skip
classes = st.builds(
    ClassLive, class_id=counts, depth=counts, oldest_age_us=instants, running=counts, head_request_id=st.just(""),
    head_reason=st.just(""), arrivals_per_s=st.just(0.0), departures_per_s=st.just(0.0),
    admitted_per_s_60s=st.floats(0, 1e9) | st.just(7.1), residence_mean_us=instants, present_mean=st.just(0.0),
    departures=counts, refused_60s=st.just({}), ttft_60s=st.just([]),
    wait_60s=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2**60)), max_size=3),
    direct=st.lists(st.builds(DirectWork, st.sampled_from(["", "a job"]), counts, counts), max_size=2),
)  # fmt: skip
reports = st.builds(
    LiveFigures, at_us=counts, slots=st.lists(slots, max_size=4, unique_by=lambda slot: slot.slot_id),
    classes=st.lists(classes, max_size=3), tenants=st.just([]),
)  # fmt: skip


def as_json(part: object) -> str:
    return msgspec.json.encode(part).decode()


@given(reports)
def test_packed_reads_as_json_does(figures: LiveFigures):
    packed = band_report.pack(figures)
    assert packed is not None
    said = band_report.unpack(packed)
    by_id = band_report.slots_of(as_json(figures.slots))
    assert dict(band_report.PackedSlots(said.slots)) == by_id
    assert said.work == band_report.work_of(by_id.values())
    rows = band_report.classes_of(as_json(figures.classes))
    assert rows is not None
    assert said.classes == [structs.replace(row, p95_bucket=band_report.p95_bucket_of(row.wait_60s)) for row in rows]


@given(st.dictionaries(st.just(ZERO_INDEX) | st.integers(-3, INDEX_MAX + 2), st.integers(0, 5), max_size=4))
def test_the_packed_p95_is_that_of_the_counts(counts: dict[int, int]):
    known = band_report.p95_bucket_of(counts)
    if not any(counts.values()) and known != band_report.NOT_PACKED:
        assert known == band_report.NO_WAITS
    elif all(index == ZERO_INDEX or INDEX_MIN <= index <= INDEX_MAX for index in counts):
        assert known == quantile_index(counts, 0.95)
    else:
        assert known == band_report.NOT_PACKED, "a bucket that there is not: nobody goes looking for it"


def test_a_number_that_only_json_can_say_is_not_packed():
    slot = SlotLive(1, "ready", "home", 2**70, 0, 0, 0, 0, 0)
    assert band_report.pack(LiveFigures(0, [slot], [], [])) is None


def row(agent_id: int, seq: int, gpu_us: int | None) -> LiveRow:
    figures = None
    if gpu_us is not None:
        figures = LiveFigures(0, [SlotLive(7, "ready", "home", 1, 1, 1, gpu_us, 0, 0)], [], [])
    return LiveRow(agent_id, 1, seq, 0, 0, None, "", 0, figures)


@pytest.fixture
def agent(db):
    return factories.agent(factories.pool("chat-70b"), "gpu-1", enrolled_at=factories.NOW)


def told(now) -> tuple[bool, int]:
    """Whether the controller was given the packed form, and the work that it reads in what it was given."""
    ((_, _, _, _, packed, said, _),) = telemetry.news(Shard(), now - timedelta(seconds=1))
    if packed is not None:
        assert said is None
        return True, band_report.unpack(packed).work[7]
    return False, band_report.slots_of(said)[7].running_batch_gpu_us


def test_the_packed_form_is_read_as_long_as_it_is_the_rows(agent):
    now = factories.NOW

    def take(seq: int, gpu_us: int | None) -> None:
        with connection.cursor() as cursor:
            note_live(cursor.cursor, [row(agent.pk, seq, gpu_us)], now)

    take(1, 500)
    assert told(now) == (True, 500)
    take(2, None)
    assert told(now) == (True, 500), "without figures those of the report before are left"
    AgentLive.objects.update(seq=3, figures={"slots": [{"slot_id": 7, "flex": "home", "fence": 1, "running_batch": 1,
                                                        "running_batch_gpu_us": 600}], "classes": []})  # fmt: skip
    assert told(now) == (False, 600), "a release before wrote it"
    take(4, None)
    assert told(now) == (False, 600), "what is packed is still of an older report"
    take(5, 700)
    assert told(now) == (True, 700)
