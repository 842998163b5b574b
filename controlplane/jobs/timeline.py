"""A job's progress over the flex strip of its pool: when which slots were lent, and what was done meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from controlplane.jobs.progress import Point
from controlplane.web import figures
from controlplane.web.numerals import duration, fixed

LANES_MOST: Final = 16
LOANS_SHOWN: Final = 20
LANE_PX: Final = 22
LINE_PX: Final = 190
AWAY: Final = ("lent", "draining", "cancelling", "overdue")
"""Slot states in which batch may run on a flex slot. Lost ones are unobserved, not lent."""

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A flex slot in one state; `ended_at` None: until now."""

    slot: str
    state: str
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Loan:
    """A slot's time with batch inside the job's life. `done` is what the job completed meanwhile; None: not sampled."""

    slot: str
    began_at: datetime
    ended_at: datetime | None
    length_us: int
    done: int | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The chart, what it says in a sentence, and the loans behind it, newest first."""

    figure: Figure
    text: str
    loans: list[Loan]
    left_out: int
    lanes_left_out: int


def figure_of_progress(points: Sequence[Point], items: int, deadline: datetime | None) -> Figure:
    """Completed and given-up items over time, with the job's size as a line."""
    figure = figures.line_series(
        [point.at for point in points], _series(points), unit="items", decimals=0, height_px=LINE_PX,
        threshold=items, threshold_label=f"all {fixed(items)}",
    )  # fmt: skip
    if deadline is not None:
        figure["layout"]["shapes"].append(_deadline_line(deadline))
        figure["layout"]["annotations"].append(_deadline_word(deadline))
    return figure


def _series(points: Sequence[Point]) -> list[figures.Series]:
    rows = [figures.Series("done", [point.completed for point in points])]
    for name, values in (
        ("parked", [point.parked for point in points]),
        ("cancelled", [point.cancelled for point in points]),
    ):
        if any(values):
            rows.append(figures.Series(name, values))
    return rows


def _deadline_line(deadline: datetime) -> Figure:
    at = deadline.isoformat()
    line = {"color": "var(--bad-edge)", "width": 1.5, "dash": "dot"}
    return {"type": "line", "xref": "x", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _deadline_word(deadline: datetime) -> Figure:
    return {
        "text": "deadline", "x": deadline.isoformat(), "xref": "x", "xanchor": "right", "y": 0.55, "yref": "paper",
        "yanchor": "top", "showarrow": False, "font": {"color": "var(--text)", "size": 11}, "xshift": -4,
    }  # fmt: skip


def text_of_progress(points: Sequence[Point], items: int) -> str:
    """The line in words."""
    last, first = points[-1], points[0]
    ran = duration((last.at - first.at) // timedelta(microseconds=1))
    parts = [f"{fixed(last.completed)} of {fixed(items)} items are done {ran} after submission"]
    if last.parked:
        parts.append(f"{fixed(last.parked)} are parked")
    if last.cancelled:
        parts.append(f"{fixed(last.cancelled)} were cancelled")
    return ", ".join(parts) + "."


def timeline(
    points: Sequence[Point], items: int, spans: Iterable[Span], deadline: datetime | None, now: datetime
) -> Timeline:
    """The progress line over one lane a flex slot. Spans are cut to the time between the first and the last point."""
    begin, end = points[0].at, points[-1].at
    inside = [span for span in spans if span.started_at < end and (span.ended_at is None or span.ended_at > begin)]
    names = sorted({span.slot for span in inside})
    shown = names[:LANES_MOST]
    loans = _loans(inside, points, begin, end)
    figure = figure_of_progress(points, items, deadline)
    _add_lanes(figure, [span for span in inside if span.slot in shown], shown, begin, end)
    return Timeline(
        figure=figure,
        text=f"{text_of_progress(points, items)} {_lent_text(loans, names)}",
        loans=loans[:LOANS_SHOWN],
        left_out=max(0, len(loans) - LOANS_SHOWN),
        lanes_left_out=len(names) - len(shown),
    )


def _loans(spans: Iterable[Span], points: Sequence[Point], begin: datetime, end: datetime) -> list[Loan]:
    """States that follow one another without a gap are one loan."""
    joined: list[tuple[str, datetime, datetime | None]] = []
    for span in sorted(spans, key=lambda span: (span.slot, span.started_at)):
        if span.state not in AWAY:
            continue
        if joined and joined[-1][0] == span.slot and joined[-1][2] == span.started_at:
            joined[-1] = (span.slot, joined[-1][1], span.ended_at)
        else:
            joined.append((span.slot, span.started_at, span.ended_at))
    rows = []
    for slot, began, ended in joined:
        since, until = max(began, begin), min(ended or end, end)
        before, after = _done_at(points, since), _done_at(points, until)
        done = None if before is None or after is None else after - before
        rows.append(Loan(slot, since, ended, (until - since) // timedelta(microseconds=1), done))
    return sorted(rows, key=lambda loan: (loan.began_at, loan.slot), reverse=True)


def _done_at(points: Sequence[Point], at: datetime) -> int | None:
    """Completed items at an instant, on the line between the samples beside it; None outside of them."""
    for before, after in pairwise(points):
        if before.at <= at <= after.at:
            whole = (after.at - before.at) / timedelta(microseconds=1)
            share = (at - before.at) / timedelta(microseconds=1) / whole if whole else 0.0
            return before.completed + round((after.completed - before.completed) * share)
    return None


def _lent_text(loans: Sequence[Loan], names: Sequence[str]) -> str:
    if not names:
        return "Its pool has no flex slots."
    if not loans:
        return f"None of the {len(names)} flex slots was lent meanwhile."
    total = duration(sum(loan.length_us for loan in loans))
    return f"Slots were lent {len(loans)} time{'s' if len(loans) != 1 else ''} meanwhile, {total} in all."


_LOOKS: Final = {
    "lent": ("var(--series-2)", 10, "solid"),
    "draining": ("var(--risk-edge)", 10, "dot"),
    "cancelling": ("var(--risk-edge)", 10, "dot"),
    "overdue": ("var(--bad-edge)", 10, "dot"),
    "lost": ("var(--muted)", 4, "dashdot"),
}
"""Slot state -> colour, width in px and dash of its line."""


def _add_lanes(figure: Figure, spans: Sequence[Span], names: Sequence[str], begin: datetime, end: datetime) -> None:
    if not names:
        return
    strip_px = LANE_PX * len(names) + 12
    height_px = LINE_PX + 40 + strip_px
    share = strip_px / height_px
    by_state: dict[str, list[Span]] = {}
    for span in spans:
        by_state.setdefault(span.state, []).append(span)
    for state in sorted(by_state, key=lambda state: state != "home"):
        figure["data"].append(_lane_trace(state, by_state[state], begin, end))
    layout = figure["layout"]
    layout["height"] = height_px
    layout["yaxis"] = {**(layout.get("yaxis") or {}), "domain": [share + 0.1, 1]}
    layout["yaxis2"] = {
        "domain": [0, share], "type": "category", "categoryorder": "array", "categoryarray": list(reversed(names)),
        "range": [-0.6, len(names) - 0.4], "fixedrange": True, "showgrid": False, "zeroline": False,
        "tickfont": {"color": "var(--text)", "size": 11}, "automargin": True,
    }  # fmt: skip
    layout["xaxis"] = {"anchor": "y2"}


def _lane_trace(state: str, spans: Sequence[Span], begin: datetime, end: datetime) -> Figure:
    xs: list[str | None] = []
    ys: list[str | None] = []
    for span in spans:
        since, until = max(span.started_at, begin), min(span.ended_at or end, end)
        xs += [since.isoformat(), until.isoformat(), None]
        ys += [span.slot, span.slot, None]
    colour, width, dash = _LOOKS.get(state, ("var(--line-strong)", 2, "solid"))
    return {
        "type": "scatter", "mode": "lines", "name": "at home" if state == "home" else state, "x": xs, "y": ys,
        "yaxis": "y2", "connectgaps": False,
        "line": {"color": colour, "width": width, "dash": dash},
        "hovertemplate": f"%{{y}} {state}<extra></extra>",
    }  # fmt: skip
