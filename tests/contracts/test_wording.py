"""Promises as sentences, and which burn alerts can fire at a target."""

import pytest

from controlplane.contracts.wording import alert_lines, share_text, span_text


@pytest.mark.parametrize(
    ("ppm", "text"), [(990_000, "99\xa0%"), (999_500, "99.95\xa0%"), (1, "0.0001\xa0%"), (900_000, "90\xa0%")]
)
def test_shares_keep_the_decimals_they_have(ppm, text):
    assert share_text(ppm) == text


def test_spans_are_in_the_unit_a_person_would_say():
    assert [span_text(seconds) for seconds in (900, 3_600, 86_400, 30 * 86_400)] == [
        "15\xa0min", "1\xa0h", "1\xa0d", "30\xa0d",
    ]  # fmt: skip


def test_at_99_percent_every_alert_can_fire():
    assert [(line.factor, line.severity, line.reachable) for line in alert_lines(990_000)] == [
        ("14.4", "page", True), ("6", "page", True), ("3", "ticket", True), ("1", "ticket", True),
    ]  # fmt: skip


def test_at_90_percent_the_fastest_page_can_never_fire_and_the_next_is_offered():
    first, *rest = alert_lines(900_000)
    assert (first.factor, first.reachable, first.offered) == ("14.4", False, "page at burn 6")
    assert first.arithmetic == "14.4 x (1 - 0.9) = 1.44 > 1: it can never fire"
    assert all(line.reachable for line in rest)
