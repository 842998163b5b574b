"""Live values in templates: written by the server at first, found again by the page's script for what frames bring.

`{% v row "depth" "count" %}` is a span with the value and the names that `static/live/bind.js` needs to write the next
one. With None as the row the span is empty: the form of a row that comes later.
"""

from __future__ import annotations

from datetime import datetime
from html import escape
from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from controlplane.web import numerals
from controlplane.web.templatetags import flexband

register = template.Library()

US_PER_S = 1_000_000


def pick(scope: Any, path: str) -> Any:
    """The value at a dotted path of nested dicts; None where something is missing."""
    for name in path.split("."):
        scope = scope.get(name) if isinstance(scope, dict) else None
    return scope


def text_of(value: Any, form: str) -> str:
    """The value as people read it; the same forms as in `bind.js`."""
    name, _, decimals = form.partition(":")
    places = int(decimals or 0)
    if value is None or value == "":
        return numerals.DASH if form else ""
    if name == "count":
        return numerals.fixed(value, places)
    if name == "ms":
        return numerals.milliseconds(value, places)
    if name == "s":
        return numerals.fixed(value / US_PER_S, places)
    if name == "pct":
        return numerals.percent(value, places)
    return str(value)


@register.simple_tag
def v(scope: Any, path: str, form: str = "", css: str = "") -> SafeString:
    """A live value. Without a form it is plain text and empty when there is none."""
    value = pick(scope, path)
    return format_html(
        '<span data-value data-t="{}"{}{}>{}</span>',
        path,
        format_html(' data-f="{}"', form) if form else "",
        format_html(' class="{}"', css) if css else "",
        text_of(value, form),
    )


@register.simple_tag
def live_name(scope: Any, path: str) -> SafeString:
    """What a row is of: it does not age, so it stays where the row's values became dashes."""
    return format_html('<span data-t="{}">{}</span>', path, text_of(pick(scope, path), ""))


@register.simple_tag
def live_chip(scope: Any, state: str = "grade", word: str = "word") -> SafeString:
    """A status chip whose fill, shape and word follow the frames."""
    name = pick(scope, state) or "unknown"
    shape = flexband.SHAPES.get(name)
    svg = mark_safe(f'<svg viewBox="0 0 12 12" aria-hidden="true">{shape}</svg>') if shape else ""  # noqa: S308
    return format_html(
        '<span class="chip {}" data-chip="{}" data-word="{}">{}{}</span>',
        name,
        state,
        word,
        svg,
        pick(scope, word) or "",
    )


@register.simple_tag
def slot_cells(cells: list[dict[str, Any]]) -> SafeString:
    """The slots of a band. A fleet shows thousands, so they are written here and not included one by one."""
    return mark_safe("".join(map(_slot_cell, cells)))  # noqa: S308 - each escapes what it shows


@register.simple_tag
def slot_form() -> SafeString:
    """The form of a slot that comes later."""
    return mark_safe(_slot_cell({}))  # noqa: S308 - constants


def _slot_cell(cell: dict[str, Any]) -> str:
    kind, clock = escape(cell.get("kind") or ""), escape(cell.get("clock") or "")
    return (
        f'<span data-key="{escape(cell.get("key", ""))}" class="slot {kind}{" clock" if clock else ""}" data-c="kind"'
        f' data-base="slot" data-clock-of="recalled_at" style="--v:{share(cell.get("share"))}" data-v="share">'
        f'<b><span data-t="name">{escape(cell.get("name") or "")}</span></b>'
        f'<span data-if="clock"{"" if clock else " hidden"}><span data-value data-t="clock">{clock}</span></span>'
        f'<span class="visually-hidden"> <span data-value data-t="word">{escape(cell.get("word") or "")}</span></span>'
        "</span>"
    )


@register.simple_tag
def live_time(scope: Any, path: str, form: str = "time") -> SafeString | str:
    """An instant of a frame in the viewer's zone; a dash without one."""
    at = pick(scope, path)
    shown = flexband.iso(datetime.fromisoformat(at), form) if at else numerals.DASH
    return format_html('<span data-time="{}" data-time-form="{}">{}</span>', path, form, shown)


@register.simple_tag
def live_ago(scope: Any, path: str) -> SafeString:
    """How long ago an instant of a frame was, ticking."""
    at = pick(scope, path)
    shown: Any = numerals.DASH
    if at:
        shown = format_html('<time datetime="{}" data-ago>{}</time>', at, at[11:19] + " UTC")
    return format_html('<span data-ago-of="{}">{}</span>', path, shown)


@register.filter
def at(scope: Any, path: str) -> Any:
    """`{{ row|at:"url" }}`: a value by path, empty without one."""
    value = pick(scope, path)
    return "" if value is None else value


@register.filter
def shown_if(value: Any) -> SafeString:
    """`hidden` for what is empty: the server's half of `data-if`."""
    return mark_safe("" if value else " hidden")  # noqa: S308 - constants


@register.filter
def share(value: Any) -> str:
    """A ratio as a CSS length."""
    return flexband.css_percent(value)


@register.simple_tag
def span_style(span: dict[str, Any] | None, now: Any) -> SafeString:
    """Where a span of the strip lies in the last hour, in per cent; the page's clock moves it on."""
    if span is None:
        return mark_safe("")
    begins, ends = datetime.fromisoformat(span["from"]), span["to"]
    until = datetime.fromisoformat(ends) if ends else now
    left = max(0.0, 1 - (now - begins).total_seconds() / 3_600)
    right = 1 - (now - until).total_seconds() / 3_600
    return format_html("--from:{}%;--v:{}%", f"{left * 100:.3f}", f"{max(0.0, right - left) * 100:.3f}")


@register.simple_tag
def mark_style(mark: dict[str, Any] | None, now: Any) -> SafeString:
    """Where a mark of the strip stands in the last hour."""
    if mark is None:
        return mark_safe("")
    left = 1 - (now - datetime.fromisoformat(mark["at"])).total_seconds() / 3_600
    return format_html("--from:{}%", f"{min(1.0, max(0.0, left)) * 100:.3f}")
