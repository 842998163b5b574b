"""Figures: token colours only, stages that add up, labels apart, JSON that cannot leave its element."""

import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from controlplane.web import figures
from controlplane.web.figures import LABEL_GAP_PX, PLOT_INSET_PX, Series, Step

X = [datetime(2026, 11, 12, 12, tzinfo=UTC) + timedelta(minutes=n) for n in range(3)]


def colours(value):
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("color", "fillcolor", "bgcolor", "fgcolor"):
                yield from item if isinstance(item, list) else [item]
            else:
                yield from colours(item)
    elif isinstance(value, list):
        for item in value:
            yield from colours(item)


ALL = [
    figures.stage_bars(X, {"queue": [1_000, 2_000, None], "prefill": [5_000, 5_000, 5_000]}, objective_ms=6),
    figures.line_series(X, [Series("a", [1, None, 3]), Series("b", [3, 2, 1])], unit="×", threshold=2, fill=True),
    figures.bars(["a", "b"], [1, None], unit="requests", horizontal=True),
    figures.bars(["a", "b"], [1, -2], unit="EUR"),
    figures.waterfall([Step("a", 5, total=True), Step("b", -2), Step("c", 3, total=True)], unit="EUR"),
]


@pytest.mark.parametrize("figure", ALL)
def test_colours_are_tokens_so_that_both_themes_work(figure):
    found = list(colours(figure))
    assert found
    assert all("var(--" in colour for colour in found)
    assert "template" not in figure["layout"]


def test_stages_keep_the_paths_order_and_turn_into_ms():
    figure = figures.stage_bars(X, {"prefill": [5_000] * 3, "queue": [1_500, 2_000, 188_000]})
    assert [trace["name"] for trace in figure["data"]] == ["Queue", "Prefill"]
    assert figure["data"][0]["y"] == [1.5, 2.0, 188.0]
    assert figure["data"][0]["marker"]["pattern"]["shape"] == "/"


def test_an_unknown_stage_is_refused():
    with pytest.raises(KeyError, match="no such stage"):
        figures.stage_bars(X, {"magic": [1, 2, 3]})


def test_gaps_stay_gaps():
    trace = figures.line_series(X, [Series("a", [1, None, 3])], unit="ms")["data"][0]
    assert trace["y"] == [1, None, 3]
    assert trace["connectgaps"] is False


def test_lines_differ_in_dash_too():
    figure = figures.line_series(X, [Series(str(n), [1, 2, 3]) for n in range(6)], unit="ms")
    assert len({trace["line"]["dash"] for trace in figure["data"]}) == 6


def test_labels_keep_their_distance():
    series = [Series(str(n), [0, 0, 1 + n / 1_000]) for n in range(5)]
    figure = figures.line_series(X, series, unit="ms", threshold=1.002, height_px=220)
    heights = sorted(note["y"] for note in figure["layout"]["annotations"])
    gap = LABEL_GAP_PX * 1.004 / (220 - PLOT_INSET_PX)
    assert len(heights) == 6
    assert all(b - a >= gap * 0.999 for a, b in pairwise(heights))


def test_waterfall_steps_start_where_the_last_ended():
    trace = figures.waterfall([Step("a", 10, total=True), Step("b", -4), Step("c", 1)], unit="EUR")["data"][0]
    assert trace["base"] == [0.0, 10.0, 6.0]
    assert trace["text"] == ["10.00", "▼ −4.00", "▲ +1.00"]


def test_json_cannot_end_its_script_element():
    text = figures.to_json(figures.bars(["</script><b>&\u2028"], [1], unit="x"))
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text)["data"][0]["x"] == ["</script><b>&\u2028"]


def test_no_number_becomes_null():
    assert json.loads(figures.to_json({"data": [{"y": [float("nan"), 1.0]}]}))["data"][0]["y"] == [None, 1.0]
