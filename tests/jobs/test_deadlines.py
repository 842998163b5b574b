"""Deadlines as instants and as wall clocks, over the nights when clocks change."""

from datetime import UTC, datetime

import pytest

from controlplane.jobs.deadlines import read_deadline


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("now", "text", "meant"),
    [
        ("2026-11-29T20:00:00+00:00", "06:00 Europe/Berlin", "2026-11-30T05:00:00+00:00"),
        ("2026-11-29T04:00:00+00:00", "06:00 Europe/Berlin", "2026-11-29T05:00:00+00:00"),
        ("2026-11-29T05:00:00+00:00", "06:00 Europe/Berlin", "2026-11-30T05:00:00+00:00"),
        # the night of 25 October 2026 has one hour more, that of 29 March 2026 one less
        ("2026-10-24T18:00:00+00:00", "06:00 Europe/Berlin", "2026-10-25T05:00:00+00:00"),
        ("2026-03-28T19:00:00+00:00", "06:00 Europe/Berlin", "2026-03-29T04:00:00+00:00"),
        ("2026-10-24T23:30:00+00:00", "02:30 Europe/Berlin", "2026-10-25T00:30:00+00:00"),
        ("2026-11-29T20:00:00+00:00", "06:00 Asia/Kolkata", "2026-11-30T00:30:00+00:00"),
        ("2026-11-29T20:00:00+00:00", "2026-12-01T06:00:00+01:00", "2026-12-01T05:00:00+00:00"),
    ],
)
def test_the_instant_that_is_meant(now, text, meant):
    found = read_deadline(text, at(now))
    assert found.astimezone(UTC) == at(meant)


@pytest.mark.parametrize("text", ["", "tomorrow", "2026-12-01T06:00:00", "25:00 UTC", "06:00", "06:00 ../etc/passwd"])
def test_what_cannot_be_read_says_how_to_write_it(text):
    with pytest.raises(ValueError, match="06:00 Europe/Berlin"):
        read_deadline(text, at("2026-11-29T20:00:00+00:00"))
