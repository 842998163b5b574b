"""Template tags of the house look: numbers, times, chips, bars, panels. `{% load flexband %}`."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any
from zoneinfo import ZoneInfo

from django import template
from django.middleware.csrf import get_token
from django.template.base import Node, NodeList, Parser, Token, token_kwargs
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from controlplane.web import figures, numerals
from controlplane.web.numerals import DASH

register = template.Library()

STATES = ("ok", "risk", "bad", "unknown", "neutral", "plain")
SHAPES = {
    "ok": '<circle cx="6" cy="6" r="4.5" fill="none" stroke="currentColor" stroke-width="2"/>',
    "risk": '<path fill="currentColor" d="M6 0l6 11H0z"/>',
    "bad": '<path fill="currentColor" d="M3.5 0h5L12 3.5v5L8.5 12h-5L0 8.5v-5z"/>',
    "unknown": ('<path fill="none" stroke="currentColor" stroke-width="2" stroke-dasharray="2 2" d="M1 1h10v10H1z"/>'),
    "neutral": '<path fill="none" stroke="currentColor" stroke-width="2" d="M6 1.5L10.5 6 6 10.5 1.5 6z"/>',
    "cross": '<path fill="none" stroke="currentColor" stroke-width="2" d="M2 2l8 8M10 2l-8 8"/>',
    "open": ('<path fill="none" stroke="currentColor" stroke-width="1.6" d="M2 5.5h8v5H2zM4 5V3a2 2 0 0 1 4-.6"/>'),
    "closed": '<path fill="none" stroke="currentColor" stroke-width="1.6" d="M2 5.5h8v5H2zM4 5V3a2 2 0 0 1 4 0v2"/>',
}


# ---- numbers ----


@register.filter
def dash(value: Any) -> Any:
    """None and the empty string as a dash; everything else, 0 too, as it is."""
    return DASH if value is None or value == "" else value


@register.filter
def count(value: Any, decimals: int | str = 0) -> str:
    """A grouped number; `|count:1` for one decimal."""
    return numerals.fixed(value, int(decimals))


@register.filter
def signed(value: Any, decimals: int | str = 0) -> str:
    """A change: plus or true minus in front."""
    return numerals.fixed(value, int(decimals), signed=True)


@register.filter
def money(nanos: Any, currency: str = "") -> str:
    """Nanos with two decimals; `|money:"EUR"` adds the currency."""
    return numerals.money(nanos, currency)


@register.filter
def money_signed(nanos: Any, currency: str = "") -> str:
    """Nanos as a change, two decimals."""
    return numerals.money(nanos, currency, signed=True)


@register.filter
def money_exact(nanos: Any, currency: str = "") -> str:
    """Nanos to the last digit that is not zero."""
    return numerals.money_exact(nanos, currency)


@register.filter
def us_ms(us: Any, decimals: int | str = 0) -> str:
    """Microseconds as milliseconds, no unit."""
    return numerals.milliseconds(us, int(decimals))


@register.filter
def duration(us: Any) -> str:
    """Microseconds in words: 10 min 57 s."""
    return numerals.duration(us)


@register.filter
def duration_s(seconds: Any) -> str:
    """Seconds in words."""
    return DASH if seconds is None else numerals.duration(seconds * numerals.US_PER_S)


@register.filter
def percent(ratio: Any, decimals: int | str = 2) -> str:
    """A ratio with the sign behind: 98.96 %."""
    text = numerals.percent(ratio, int(decimals))
    return text if text == DASH else f"{text}{numerals.NBSP}%"


@register.filter
def percent_value(ratio: Any, decimals: int | str = 2) -> str:
    """A ratio as per cent for a column whose header says %."""
    return numerals.percent(ratio, int(decimals))


@register.filter
def rate(value: Any, decimals: int | str = 1) -> str:
    """Per second, no unit."""
    return numerals.fixed(value, int(decimals))


@register.filter
def css_percent(ratio: Any) -> str:
    """A ratio as a CSS length between 0 % and 100 %, for `style="--v:…"`. None is 0 %."""
    try:
        share = float(ratio)
    except (TypeError, ValueError):
        return "0%"
    return f"{min(max(share, 0.0), 1.0) * 100:.3f}".rstrip("0").rstrip(".") + "%" if share == share else "0%"


# ---- times ----

TIME_FORMATS = {"time": "%H:%M:%S", "minute": "%H:%M", "datetime": "%-d %b %Y %H:%M:%S", "date": "%-d %b %Y"}


def _aware(value: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value if timezone.is_aware(value) else value.replace(tzinfo=UTC)
    return None


def _stamp(at: datetime) -> str:
    """ISO 8601 in UTC with milliseconds and Z, the form the scripts read."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@register.filter
def stamp(value: Any) -> str:
    """An instant for `data-age` and the like; empty when there is none (which the page shows as stale)."""
    at = _aware(value)
    return _stamp(at) if at else ""


@register.simple_tag
def iso(value: Any, form: str = "datetime", zone: str = "") -> SafeString | str:
    """A `<time>`: rendered in UTC and turned into the viewer's zone by times.js, with UTC on hover.

    `form` is time, minute, datetime or date. With `zone` (finance: the billing zone) it is rendered in
    that zone and left alone by the script. A plain date has no zone and stays as it is.
    """
    pattern = TIME_FORMATS[form]
    if isinstance(value, date) and not isinstance(value, datetime):
        return format_html('<time datetime="{}">{}</time>', value.isoformat(), value.strftime(TIME_FORMATS["date"]))
    at = _aware(value)
    if at is None:
        return DASH
    utc = at.astimezone(UTC)
    written = _stamp(utc)
    hover = utc.strftime("%Y-%m-%d %H:%M:%S UTC")
    if zone:
        text = at.astimezone(ZoneInfo(zone)).strftime(pattern)
        return format_html('<time datetime="{}" title="{}" data-zone="{}">{}</time>', written, hover, zone, text)
    suffix = "" if form == "date" else " UTC"
    return format_html(
        '<time datetime="{}" title="{}" data-form="{}">{}{}</time>', written, hover, form, utc.strftime(pattern), suffix
    )


@register.simple_tag(takes_context=True)
def ago(context: template.Context, value: Any) -> SafeString | str:
    """How long since an instant, kept current by times.js. A time in the future is unknown, not `0 s ago`.

    Uses the page's `now` when the view put one into the context, else the clock.
    """
    at = _aware(value)
    if at is None:
        return DASH
    age = (context.get("now") or timezone.now()) - at
    if age.total_seconds() < -2:
        return mark_safe('<span title="The time lies in the future; check the clock of the sender">—</span>')
    seconds = max(int(age.total_seconds()), 0)
    text = numerals.duration(seconds * numerals.US_PER_S) if seconds else f"0{numerals.NBSP}s"
    hover = at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return format_html('<time datetime="{}" title="{}" data-ago>{} ago</time>', _stamp(at), hover, text)


# ---- status and bars ----


@register.simple_tag(takes_context=True)
def form_token(context: template.Context) -> SafeString | str:
    """The hidden field that a form of ours needs. Unlike `csrf_token` it is also there in a part that a page
    includes with `only`; a page that is made without a request has none."""
    request = getattr(context, "request", None)
    if request is None:
        return ""
    return format_html('<input type="hidden" name="csrfmiddlewaretoken" value="{}">', get_token(request))


@register.simple_tag
def shape(name: str) -> SafeString:
    """The status shape as SVG; decoration, so always beside a word."""
    return mark_safe(f'<svg viewBox="0 0 12 12" aria-hidden="true">{SHAPES[name]}</svg>')  # noqa: S308 - constants


@register.inclusion_tag("components/chip.html")
def chip(state: str, word: str, icon: str = "", title: str = "") -> dict[str, Any]:
    """Fill, shape and word. A state that is not one of STATES shows as unknown: it must not look healthy."""
    state = state if state in STATES else "unknown"
    return {"state": state, "word": word, "icon": icon or ("" if state == "plain" else state), "title": title}


@register.inclusion_tag("components/meter.html")
def meter(ratio: Any, state: str = "ok", label: str = "", text: str = "") -> dict[str, Any]:
    """A plain bar; the number stands beside it (`text`). A ratio of None is the unknown bar."""
    known = ratio is not None
    return {"ratio": ratio, "state": state if known else "unknown", "label": label, "text": text if known else DASH}


@register.inclusion_tag("components/bar.html")
def budget_bar(
    settled: Any,
    limit: Any,
    leased: Any = 0,
    forecast: Any = None,
    state: str = "",
    label: str = "",
) -> dict[str, Any]:
    """Settled solid, leased striped, ticks at 50 and 80 %, forecast mark, limit mark when the forecast is over it.

    All amounts in one unit (nanos). The scale is the larger of limit and forecast. None for settled is unknown.
    """
    if settled is None or not limit or limit <= 0:
        return {"state": "unknown", "label": label, "known": False}
    scale = max(limit, forecast or 0)
    used, held = settled / scale, min((leased or 0) / scale, max(1 - settled / scale, 0))
    grade = state or ("bad" if settled >= limit else "risk" if forecast and forecast > limit else "ok")
    return {
        "known": True,
        "state": grade,
        "label": label,
        "used": used,
        "leased": held,
        "ticks": [0.5 * limit / scale, 0.8 * limit / scale],
        "forecast": None if forecast is None else forecast / scale,
        "limit": limit / scale if forecast and forecast > limit else None,
    }


@register.inclusion_tag("components/chart.html")
def chart(
    id: str,
    figure: figures.Figure,
    text: str,
    title: str = "",
    csv_url: str = "",
    hide_text: bool = False,
    fixed_zone: bool = False,
) -> dict[str, Any]:
    """A figure of `controlplane.web.figures` with its text alternative; the figure says its height.

    `fixed_zone` (finance) leaves instants on the axis as they are instead of turning them into the viewer's zone.
    """
    return {
        "id": id,
        "json": figures.to_json(figure),
        "height": figure.get("layout", {}).get("height", 240),
        "text": text,
        "title": title,
        "csv_url": csv_url,
        "hide_text": hide_text,
        "fixed_zone": fixed_zone,
    }


# ---- panel with slots ----


class PanelNode(Node):
    """`{% panel title=… %} … {% actions %}…{% endactions %} … {% foot %}…{% endfoot %} {% endpanel %}`."""

    child_nodelists = ("body",)

    def __init__(self, body: NodeList, options: dict[str, Any]) -> None:
        self.body = body
        self.options = options

    def render(self, context: template.Context) -> str:
        slots: dict[str, str] = {}
        options = {name: value.resolve(context) for name, value in self.options.items()}
        with context.push(panel_slots=slots):
            body = self.body.render(context)
        return render_to_string("components/panel.html", {**options, "body": body, "slots": slots})


class SlotNode(Node):
    """Keeps its content for the panel around it; renders nothing in place."""

    child_nodelists = ("body",)

    def __init__(self, name: str, body: NodeList) -> None:
        self.name = name
        self.body = body

    def render(self, context: template.Context) -> str:
        context["panel_slots"][self.name] = self.body.render(context)
        return ""


PANEL_OPTIONS = frozenset(
    {"title", "id", "meta", "lead", "state", "flush", "hot", "css", "age", "stale_after", "topic"}
)


@register.tag
def panel(parser: Parser, token: Token) -> PanelNode:
    """See PANEL_OPTIONS; `state` is empty, loading, error or stale."""
    bits = token.split_contents()[1:]
    options = token_kwargs(bits, parser)
    if bits or set(options) - PANEL_OPTIONS:
        raise template.TemplateSyntaxError(f"panel takes name=value of {sorted(PANEL_OPTIONS)}, got {token.contents!r}")
    body = parser.parse(("endpanel",))
    parser.delete_first_token()
    return PanelNode(body, options)


def _slot(parser: Parser, token: Token) -> SlotNode:
    name = token.contents.split()[0]
    body = parser.parse((f"end{name}",))
    parser.delete_first_token()
    return SlotNode(name, body)


register.tag("actions", _slot)
register.tag("foot", _slot)


# ---- page ----


@register.simple_tag
def server_time() -> str:
    """The instant of rendering, so that the page can tell its own clock's error."""
    return _stamp(timezone.now())


@register.simple_tag(takes_context=True)
def nonce(context: template.Context) -> str:
    """The request's CSP nonce; for the one style element Plotly needs."""
    request = context.get("request")
    return str(getattr(request, "csp_nonce", "")) if request is not None else ""


@register.simple_tag(takes_context=True)
def primary_nav(context: template.Context, section: str = "") -> list[Any]:
    """Links of the primary row; `{% primary_nav section as links %}`."""
    frame = context.get("shell")
    return frame.primary(section or None) if frame else []


@register.simple_tag(takes_context=True)
def sub_nav(context: template.Context, section: str = "") -> list[Any]:
    """Links of the sub row of the page's section."""
    frame = context.get("shell")
    return frame.sub(section or None) if frame else []


@register.filter
def favicon(state: Any) -> str:
    """The favicon's path for the page's worst state; without a state the house mark."""
    return f"flexband/favicon-{state}.svg" if state in ("ok", "risk", "bad", "unknown") else "flexband/favicon.svg"
