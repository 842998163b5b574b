"""Reading questions: units by key, instants with a zone, and errors that name the path."""

from __future__ import annotations

from fractions import Fraction

import pytest

from controlplane.core.json_reader import ABSENT, JsonReader


@pytest.mark.parametrize(
    ("key", "value", "us"),
    [
        ("hold_s", 0.1, 100_000),
        ("hold_ms", 200, 200_000),
        ("hold_s", 1e-7, 0),
        ("hold_ms", 0.0015, 2),
        ("hold_s", 7, 7_000_000),
    ],
)
def test_a_duration_takes_its_unit_from_its_key(key, value, us):
    assert JsonReader({key: value}, "").duration_us(key, ABSENT) == us


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T01:00:01+01:00", 1_000_000),
        ("1970-01-01T00:00:00.000001Z", 1),
        ("1969-12-31T23:59:59.5Z", -500_000),
    ],
)
def test_an_instant_is_microseconds_in_any_zone(text, us):
    assert JsonReader({"at": text}, "").instant("at") == us


def test_an_absent_instant_is_not_known_unless_it_is_required():
    reader = JsonReader({"at": None}, "pool.")
    assert reader.instant("at") is None and reader.instant("since") is None
    with pytest.raises(ValueError, match=r"pool\.since: is missing"):
        reader.instant("since", required=True)


def test_errors_carry_the_whole_path():
    reader = JsonReader({"pools": [{"slots": [{"name": ""}]}]}, "")
    slot = reader.items("pools")[0].items("slots")[0]
    with pytest.raises(ValueError, match=r"pools\[0\]\.slots\[0\]\.name: must be a text"):
        slot.text("name")


def test_keys_that_were_not_read_are_listed_at_every_depth():
    reader = JsonReader({"a": 1, "b": {"c": 2, "d": 3}, "e": [{"f": 4}]}, "")
    reader.part("b").number("c", ABSENT)
    reader.items("e")
    assert sorted(reader.ignored()) == ["a", "b.d", "e[0].f"]


def test_decimals_and_seconds_are_exact() -> None:
    reader = JsonReader({"share": 0.7, "text": "0.1", "from_s": 0.000001, "span_s": [0, "1.5"]}, "a.")
    assert (reader.decimal("share"), reader.decimal("text")) == (Fraction(7, 10), Fraction(1, 10))
    assert reader.decimal("absent", 2) == 2
    assert (reader.seconds_us("from_s"), reader.seconds_us_items("span_s")) == (1, [0, 1_500_000])


@pytest.mark.parametrize(
    ("value", "message"),
    [(True, "must be a number"), ("1,000", "not a decimal"), (1e-7, "finer than a microsecond"), (None, "a number")],
)
def test_seconds_that_cannot_be_exact_are_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^a\.from_s: .*{message}"):
        JsonReader({"from_s": value}, "a.").seconds_us("from_s")


def test_a_whole_number_may_be_written_with_a_point_and_below_zero_where_that_is_meant() -> None:
    reader = JsonReader({"n": 3.0, "less": -2, "part": 1.5}, "")
    assert (reader.integer("n"), reader.integer("less", least=None)) == (3, -2)
    for key in ("less", "part"):
        with pytest.raises(ValueError, match=f"^{key}: must be a whole number of 0 or more"):
            reader.integer(key)


def test_an_object_that_is_not_there_is_empty() -> None:
    reader = JsonReader({"none": None, "some": {"a": 1}}, "")
    assert [reader.part_or_empty(key).names() for key in ("none", "absent", "some")] == [(), (), ("a",)]
