"""Plotly figures as plain dicts in the house look.

Colours are token references (`var(--series-1)`); `charts.js` resolves them per theme and adds the template
(font, grid, hover, no toolbar), so a figure here is data and labels only. `template` stays out: Plotly's default
one would add 7 kB to each figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from django.utils.safestring import SafeString, mark_safe

Figure = dict[str, Any]
Value = int | float | None

STAGES: tuple[tuple[str, str, str], ...] = (
    ("admission", "Admission", "var(--stage-admission)"),
    ("queue", "Queue", "var(--stage-queue)"),
    ("batch_wait", "Batch wait", "var(--stage-batch-wait)"),
    ("preprocess", "Preprocess", "var(--stage-preprocess)"),
    ("prefill", "Prefill", "var(--stage-prefill)"),
    ("decode", "Decode", "var(--stage-decode)"),
    ("return", "Return", "var(--stage-return)"),
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SERIES_COLOURS = tuple(f"var(--series-{n})" for n in range(1, 7))
LABEL_GAP_PX = 14
LABEL_SHARE_MIN = 0.05
PLOT_INSET_PX = 40


@dataclass(frozen=True)
class Series:
    """One series: name, one value per x (None is a gap), optionally a colour (token reference) and a bar pattern."""

    name: str
    values: Sequence[Value]
    colour: str = ""
    pattern: str = ""


@dataclass(frozen=True)
class Step:
    """One step of a bridge: `value` is added to what stands before; a total starts at zero and shows `value`."""

    label: str
    value: int | float
    total: bool = False


def to_json(figure: Figure) -> SafeString:
    """JSON that may stand inside a script element: what could end the element is escaped. NaN becomes null."""
    text = orjson.dumps(figure, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    for raw, escaped in (
        ("<", "\\u003c"),
        (">", "\\u003e"),
        ("&", "\\u0026"),
        ("\u2028", "\\u2028"),
        ("\u2029", "\\u2029"),
    ):
        text = text.replace(raw, escaped)
    return mark_safe(text)  # noqa: S308 - escaped above


def _x(values: Sequence[Any]) -> list[Any]:
    return [v.isoformat() if isinstance(v, datetime) else v for v in values]


def _hover(name: str, unit: str, decimals: int) -> str:
    tail = f" {unit}" if unit else ""
    return f"{name} %{{y:,.{decimals}f}}{tail}<extra></extra>"


def _direct_labels(points: Sequence[tuple[str, float, str]], top: float, height_px: int) -> list[dict[str, Any]]:
    """Names at the right edge, at least LABEL_GAP_PX apart: (text, y, colour), lowest first."""
    gap = LABEL_GAP_PX * top / max(height_px - PLOT_INSET_PX, 1)
    labels: list[dict[str, Any]] = []
    lowest = float("-inf")
    for text, y, colour in sorted(points, key=lambda point: point[1]):
        lowest = max(y, lowest + gap)
        labels.append(
            {
                "name": "direct",
                "text": text,
                "x": 1,
                "xref": "paper",
                "xanchor": "left",
                "xshift": 6,
                "y": lowest,
                "yref": "y",
                "yanchor": "middle",
                "showarrow": False,
                "font": {"color": colour, "size": 11},
            }
        )
    return labels


def _threshold(value: float, label: str) -> tuple[dict[str, Any], dict[str, Any]]:
    line = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "yref": "y",
        "y0": value,
        "y1": value,
        "line": {"color": "var(--text)", "width": 1.5, "dash": "dash"},
    }
    note = {
        "name": "direct",
        "text": f"<b>{label}</b>",
        "x": 1,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 6,
        "y": value,
        "yref": "y",
        "yanchor": "middle",
        "showarrow": False,
        "font": {"color": "var(--text)", "size": 11},
    }
    return line, note


def _layout(unit: str, height_px: int, **more: Any) -> dict[str, Any]:
    return {"yaxis": {"title": {"text": unit, "font": {"size": 11}} if unit else None}, "height": height_px, **more}


def _marker(colour: str, pattern: str) -> dict[str, Any]:
    marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
    if pattern:
        # The fill stays full so that the colour's contrast holds; the pattern only adds a second sign.
        marker["pattern"] = {
            "shape": pattern,
            "size": 6,
            "solidity": 0.25,
            "fgcolor": "var(--text)",
            "fgopacity": 0.35,
            "bgcolor": colour,
        }
    return marker


def _last_labels(series: Sequence[Series], decimals: int) -> list[tuple[str, float, str]]:
    """Names and values in the middle of the last bar's parts that take LABEL_SHARE_MIN of it or more."""
    last = [float(one.values[-1] or 0) if one.values else 0.0 for one in series]
    total = sum(last)
    labels = []
    below = 0.0
    for one, value in zip(series, last, strict=True):
        if total and value / total >= LABEL_SHARE_MIN:
            labels.append((f"{one.name} {value:,.{decimals}f}", below + value / 2, "var(--text)"))
        below += value
    return labels


def stacked_bars(
    x: Sequence[Any],
    series: Sequence[Series],
    *,
    unit: str,
    decimals: int = 0,
    height_px: int = 260,
    threshold: float | None = None,
    threshold_label: str = "",
) -> Figure:
    """Bars stacked in the order given, lowest first, larger parts named beside the last bar. No negative values."""
    xs = _x(x)
    data = []
    totals = [0.0] * len(xs)
    for index, one in enumerate(series):
        colour = one.colour or SERIES_COLOURS[index % len(SERIES_COLOURS)]
        data.append(
            {
                "type": "bar",
                "name": one.name,
                "x": xs,
                "y": list(one.values),
                "marker": _marker(colour, one.pattern),
                "hovertemplate": _hover(one.name, unit, decimals),
            }
        )
        totals = [total + (value or 0) for total, value in zip(totals, one.values, strict=True)]
    top = max([*totals, threshold or 0.0], default=0.0) or 1.0
    notes = _direct_labels(_last_labels(series, decimals), top, height_px)
    shapes = []
    if threshold is not None:
        line, note = _threshold(threshold, threshold_label or f"limit {threshold:,g}")
        shapes.append(line)
        notes = _spread_against(notes, note, top, height_px)
    return {"data": data, "layout": _layout(unit, height_px, barmode="stack", annotations=notes, shapes=shapes)}


def _spread_against(
    notes: list[dict[str, Any]], fixed: dict[str, Any], top: float, height_px: int
) -> list[dict[str, Any]]:
    """Move labels that touch the threshold's label to its free side."""
    gap = LABEL_GAP_PX * top / max(height_px - PLOT_INSET_PX, 1)
    at = fixed["y"]
    below = at
    for note in sorted((n for n in notes if n["y"] <= at), key=lambda n: -n["y"]):
        note["y"] = below = min(note["y"], below - gap)
    above = at
    for note in sorted((n for n in notes if n["y"] > at), key=lambda n: n["y"]):
        note["y"] = above = max(note["y"], above + gap)
    return [*notes, fixed]


def stage_bars(
    x: Sequence[Any],
    stages_us: Mapping[str, Sequence[Value]],
    *,
    height_px: int = 260,
    objective_ms: float | None = None,
) -> Figure:
    """The breakdown by stage over time in ms, from microseconds per stage.

    Keys are those of STAGES; the stack keeps their order. Means over the same requests, so that they add up.
    Raises KeyError for a stage that is none.
    """
    unknown = set(stages_us) - {key for key, _, _ in STAGES}
    if unknown:
        raise KeyError(f"no such stage: {sorted(unknown)}")
    series = [
        Series(
            name,
            [None if v is None else v / 1_000 for v in stages_us[key]],
            token,
            "/" if key == "queue" else "",
        )
        for key, name, token in STAGES
        if key in stages_us
    ]
    label = "" if objective_ms is None else f"objective {objective_ms:,g}"
    return stacked_bars(
        x, series, unit="ms", decimals=1, height_px=height_px, threshold=objective_ms, threshold_label=label
    )


def line_series(
    x: Sequence[Any],
    series: Sequence[Series],
    *,
    unit: str,
    decimals: int = 1,
    height_px: int = 220,
    threshold: float | None = None,
    threshold_label: str = "",
    fill: bool = False,
) -> Figure:
    """Lines that differ in dash too, named at their last value. A None leaves a gap: unknown is no line."""
    xs = _x(x)
    data = []
    ends: list[tuple[str, float, str]] = []
    top = threshold or 0.0
    for index, one in enumerate(series):
        colour = one.colour or SERIES_COLOURS[index % len(SERIES_COLOURS)]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines",
            "name": one.name,
            "x": xs,
            "y": list(one.values),
            "connectgaps": False,
            "line": {"color": colour, "width": 2, "dash": DASHES[index % len(DASHES)]},
            "hovertemplate": _hover(one.name, unit, decimals),
        }
        if fill:
            trace |= {"fill": "tozeroy", "fillcolor": f"color-mix(in srgb, {colour} 16%, transparent)"}
        data.append(trace)
        known = [v for v in one.values if v is not None]
        top = max([top, *known])
        if known and one.values[-1] is not None:
            ends.append((f"{one.name} {known[-1]:,.{decimals}f}", float(known[-1]), "var(--text)"))
    notes = _direct_labels(ends, top or 1.0, height_px)
    shapes = []
    if threshold is not None:
        line, note = _threshold(threshold, threshold_label or f"limit {threshold:,g}")
        shapes.append(line)
        notes = _spread_against(notes, note, top or 1.0, height_px)
    return {"data": data, "layout": _layout(unit, height_px, annotations=notes, shapes=shapes)}


def bars(
    categories: Sequence[str],
    values: Sequence[Value],
    *,
    unit: str,
    decimals: int = 0,
    height_px: int = 220,
    colour: str = "var(--series-1)",
    horizontal: bool = False,
) -> Figure:
    """One bar per category with its value written beside it."""
    labels = ["—" if v is None else f"{v:,.{decimals}f}".replace("-", "−") for v in values]
    names = [name if value is not None else f"{name} —" for name, value in zip(categories, values, strict=True)]
    amounts = list(values)
    tail = f" {unit}" if unit else ""
    axis = "x" if horizontal else "y"
    trace = {
        "type": "bar",
        "orientation": "h" if horizontal else "v",
        "x": amounts if horizontal else names,
        "y": names if horizontal else amounts,
        "text": labels,
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": colour},
        "hovertemplate": f"%{{{'y' if horizontal else 'x'}}}: %{{{axis}:,.{decimals}f}}{tail}<extra></extra>",
    }
    layout = _layout("" if horizontal else unit, height_px, hovermode="closest", margin={"r": 56})
    if horizontal:
        layout["yaxis"] = {"autorange": "reversed", "type": "category", "showgrid": False}
        layout["xaxis"] = {"title": {"text": unit, "font": {"size": 11}}, "rangemode": "tozero", "showgrid": True}
    else:
        layout["xaxis"] = {"type": "category"}
    return {"data": [trace], "layout": layout}


def waterfall(steps: Sequence[Step], *, unit: str, decimals: int = 2, height_px: int = 280) -> Figure:
    """A bridge: totals from zero, steps from where the last one ended; ▲ adds, ▼ takes away, never colour alone."""
    running = 0.0
    bases, lengths, tokens, texts, patterns = [], [], [], [], []
    for step in steps:
        if step.total:
            running = float(step.value)
            bases.append(0.0)
            lengths.append(running)
            tokens.append("var(--step-total)")
            patterns.append("")
            texts.append(f"{running:,.{decimals}f}".replace("-", "−"))
            continue
        bases.append(running)
        lengths.append(step.value)
        running += step.value
        up = step.value >= 0
        tokens.append("var(--step-up)" if up else "var(--step-down)")
        patterns.append("" if up else "\\")
        texts.append(f"{'▲ +' if up else '▼ −'}{abs(step.value):,.{decimals}f}")
    trace = {
        "type": "bar",
        "x": [step.label for step in steps],
        "base": bases,
        "y": lengths,
        "text": texts,
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": tokens, "pattern": {"shape": patterns, "size": 6, "solidity": 0.3}},
        "hovertemplate": f"%{{x}}: %{{text}} {unit}<extra></extra>",
    }
    layout = _layout(unit, height_px, hovermode="closest", xaxis={"type": "category"}, margin={"r": 24})
    return {"data": [trace], "layout": layout}
