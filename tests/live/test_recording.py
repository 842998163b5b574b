"""Live pages as they were: what was told is shown again exactly, to the second for two days, to the minute after."""

from datetime import UTC, timedelta

import orjson
import pytest
from django.db import ProgrammingError, connection, transaction
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.errors import UndefinedTable

from controlplane.live import readings, recording, topics
from controlplane.live.frames import Publisher, Ticker
from controlplane.live.recording import MINUTE, SECOND, Recorder, frames_between, moment
from tests import factories

pytestmark = pytest.mark.django_db


class Deaf:
    """A Redis pipeline that is not there: what is recorded does not depend on who listens."""

    def pipeline(self, **_):
        return self

    def set(self, *_, **__):
        pass

    publish = set

    def execute(self):
        pass

    def mget(self, keys):
        return [None for _ in keys]


def publisher(recorder, epoch=1):
    return Publisher(Deaf(), epoch=epoch, recorder=recorder)


def tell(publisher, state, at):
    publisher.publish([("fleet", state)], at, clock_s=at.timestamp())


def rows(grain):
    with connection.cursor() as cursor:
        cursor.execute("SELECT started_at, ended_at FROM live_recording WHERE grain = %s ORDER BY started_at", (grain,))
        return cursor.fetchall()


def test_each_second_is_shown_as_it_was_told(now):
    recorder = Recorder()
    told = publisher(recorder)
    for second in range(150):
        tell(told, {"at": second, "title": f"t{second // 7}"}, now + timedelta(seconds=second))
        recorder.flush(now + timedelta(seconds=second))
    recorder.flush(now + timedelta(seconds=150), everything=True)
    for second in (0, 1, 29, 30, 31, 60, 100, 149):
        found = moment("fleet", now + timedelta(seconds=second, milliseconds=300))
        assert found.state == {"at": second, "title": f"t{second // 7}"}
        assert (found.at, found.grain) == (now + timedelta(seconds=second), SECOND)
    assert len(rows(SECOND)) == 5
    assert [start for start, _ in rows(MINUTE)] == [now + timedelta(minutes=n) for n in range(3)]


def test_an_instant_that_nobody_told_of_is_not_made_up(now):
    recorder = Recorder()
    tell(publisher(recorder), {"at": 1}, now)
    recorder.flush(now, everything=True)
    assert moment("fleet", now - timedelta(seconds=1)) is None
    assert moment("fleet", now + timedelta(seconds=9)).grain == SECOND
    assert moment("fleet", now + timedelta(seconds=60)).grain == MINUTE
    assert moment("fleet", now + timedelta(minutes=5)) is None
    assert moment("pool:none", now) is None


def test_after_two_days_the_minutes_are_left_and_after_their_days_nothing(now, settings):
    settings.HISTORY_DAYS = 5
    recorder = Recorder()
    told = publisher(recorder)
    for second in range(120):
        tell(told, {"at": second}, now + timedelta(seconds=second))
    recorder.flush(now + timedelta(seconds=120), everything=True)
    assert recording.keep(now + timedelta(days=2)) == 0
    assert moment("fleet", now + timedelta(seconds=70)).grain == SECOND
    assert recording.keep(now + timedelta(days=3)) >= 1
    found = moment("fleet", now + timedelta(seconds=70))
    assert (found.state, found.grain) == ({"at": 60}, MINUTE)
    assert [frame["data"] for frame in frames_between("fleet", now, now + timedelta(minutes=2))] == [
        {"at": 0},
        {"at": 60},
    ]
    recording.keep(now + timedelta(days=6))
    assert moment("fleet", now + timedelta(seconds=70)) is None


def test_a_write_that_fails_is_tried_again_with_all_it_had(now, monkeypatch):
    recording.keep(now)
    recorder = Recorder()
    told = publisher(recorder)
    for second in range(70):
        tell(told, {"at": second}, now + timedelta(seconds=second))
    monkeypatch.setattr(recorder, "_keep", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorder.flush(now + timedelta(seconds=70), everything=True)
    monkeypatch.undo()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE live_recording RENAME TO elsewhere")
    with pytest.raises((ProgrammingError, UndefinedTable)), transaction.atomic():
        recorder.flush(now + timedelta(seconds=70), everything=True)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE elsewhere RENAME TO live_recording")
    assert recorder.flush(now + timedelta(seconds=70), everything=True) == 5
    assert moment("fleet", now + timedelta(seconds=65)).state == {"at": 65}
    assert len(rows(MINUTE)) == 2


def test_spans_that_cannot_be_written_are_bounded(now, monkeypatch):
    monkeypatch.setattr(recording, "WAITING_MOST", 3)
    recorder = Recorder()
    told = publisher(recorder)
    for second in range(0, 300, 30):
        tell(told, {"at": second}, now + timedelta(seconds=second))
    recorder.flush(now + timedelta(seconds=300), everything=True)
    assert [start for start, _ in rows(SECOND)] == [now + timedelta(seconds=s) for s in (210, 240, 270)]


def test_two_controllers_and_a_clock_set_back_leave_rows_that_can_be_read(now):
    first, second = Recorder(), Recorder()
    one, two = publisher(first), publisher(second, epoch=2)
    for step in range(5):
        tell(one, {"by": "one", "step": step}, now + timedelta(seconds=step))
    for step in range(5, 10):
        tell(two, {"by": "two", "step": step}, now + timedelta(seconds=step))
    one._told.clear()
    tell(one, {"by": "one", "step": -3}, now - timedelta(seconds=3))
    for recorder in (first, second):
        recorder.flush(now, everything=True)
    assert moment("fleet", now + timedelta(seconds=3)).state == {"by": "one", "step": 3}
    assert moment("fleet", now + timedelta(seconds=8)).state == {"by": "two", "step": 8}
    assert moment("fleet", now - timedelta(seconds=2)).state == {"by": "one", "step": -3}


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3) | st.text(max_size=4), max_size=4),
        min_size=1, max_size=100,
    ),
    ask=st.integers(0, 99),
)  # fmt: skip
def test_any_run_of_states_comes_back(parts, ask):
    """Parts that come, change and go: the state at each second is the one that was told."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM live_recording")
    recorder = Recorder()
    told = publisher(recorder)
    for second, state in enumerate(parts):
        tell(told, state, factories.NOW + timedelta(seconds=second))
    recorder.flush(factories.NOW, everything=True)
    second = min(ask, len(parts) - 1)
    assert moment("fleet", factories.NOW + timedelta(seconds=second)).state == parts[second]


def test_what_belongs_to_one_tenant_is_not_recorded(now):
    recorder = Recorder()
    told = publisher(recorder)
    told.publish([("tenant:acme", {"at": 1}), ("rollout:1", {"at": 1}), ("alerts", {"at": 1})], now, clock_s=1)
    assert recorder.flush(now, everything=True) == 0


# ---- pages ----


@pytest.fixture
def recorded(scene, moment):
    """The scene as its pages were told it ten seconds ago, and again now with another title."""
    recorder = Recorder()
    ticker = Ticker(publisher(recorder), recorder)
    ticker.tick(moment)
    ticker.finish(moment)
    return scene


def iso(at):
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def test_a_past_page_shows_what_was_told_and_offers_nothing_to_press(recorded, moment, people):
    page = people["oncall"].get("/pools/chat-70b/", {"at": iso(moment)}).content.decode()
    assert "As it was at" in page
    assert "second by second" in page
    assert "Freeze lending" not in page
    live = people["oncall"].get("/pools/chat-70b/").content.decode()
    assert "As it was at" not in live
    home = people["viewer"].get("/", {"at": iso(moment)}).content.decode()
    assert 'data-past-topic="fleet"' in home


def test_first_paint_of_the_past_is_the_state_that_was_told(recorded, moment, people):
    found = recording.moment("pool:chat-70b", moment)
    reading = readings.read(moment)
    reading.engine_points["chat-70b"] = found.state["engine_points"]
    before = topics.pool_state(reading, recorded.pool)
    assert orjson.loads(orjson.dumps(before)) == found.state


@pytest.mark.parametrize(
    "at", ["yesterday", "2999-01-01T00:00:00Z", "2026-13-01T00:00", "9999-12-31T23:59:59-23:00", "0001-01-01T00:00:00Z"]
)
def test_what_is_no_past_instant_is_refused(scene, people, at):
    assert people["oncall"].get("/", {"at": at}).status_code == 404


def test_an_instant_without_recording_says_how_far_recordings_reach(recorded, moment, people):
    page = people["oncall"].get("/", {"at": "2020-01-01 00:00"})
    assert page.status_code == 404
    assert "Recordings reach from" in page.content.decode()


def test_frames_are_for_staff_and_for_recorded_topics(recorded, moment, people):
    query = {"topic": "pool:chat-70b", "from": iso(moment - timedelta(seconds=5))}
    answer = people["viewer"].get("/live/frames/", query)
    (frame,) = [orjson.loads(line) for line in answer.content.split(b"\n")]
    assert frame["topic"] == "pool:chat-70b"
    assert people["tenant"].get("/live/frames/", query).status_code == 403
    for topic in ("tenant:acme", "alerts", ""):
        assert people["viewer"].get("/live/frames/", {**query, "topic": topic}).status_code == 404


def test_a_tenants_member_sees_its_present_page_whatever_is_asked(recorded, moment, people):
    assert "As it was at" not in people["tenant"].get("/", {"at": iso(moment)}).content.decode()
