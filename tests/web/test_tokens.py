"""Contrast of the token pairs in both themes, computed from tokens.css: text 4.5:1, edges and graphics 3:1."""

import re
from pathlib import Path

import pytest

CSS = (Path(__file__).resolve().parents[2] / "static" / "flexband" / "tokens.css").read_text()
TOKEN = re.compile(r"--([\w-]+):\s*(?:light-dark\((#[0-9a-f]{6}),\s*(#[0-9a-f]{6})\)|(#[0-9a-f]{6}));")
COLOURS = {name: (light or both, dark or both) for name, light, dark, both in TOKEN.findall(CSS)}
THEMES = {"light": 0, "dark": 1}

SURFACES = ("page", "panel", "raised", "inset", "hover", "select", "bad-tint", "risk-tint")
TEXT_PAIRS = [
    *((text, surface) for text in ("text", "muted", "link", "bad-text") for surface in SURFACES),
    ("on-link", "link"),
    ("risk-ink", "risk-fill"),
    ("bad-ink", "bad-fill"),
    ("panel", "text"),
]
GRAPHICS = [
    "ok-edge",
    "risk-edge",
    "bad-edge",
    "unknown-edge",
    "input-edge",
    *(name for name in COLOURS if name.startswith(("slot-", "stage-", "series-", "step-"))),
]
EDGE_PAIRS = [(edge, surface) for edge in GRAPHICS for surface in ("page", "panel", "bad-tint")]


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_formula_on_known_pairs():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def test_tokens_were_read():
    assert {"page", "text", "stage-queue", "series-6", "slot-lent"} <= set(COLOURS)
    assert sum(name.startswith("stage-") for name in COLOURS) == 7


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("text", "surface"), TEXT_PAIRS)
def test_text_is_readable(text, surface, theme):
    index = THEMES[theme]
    assert contrast(COLOURS[text][index], COLOURS[surface][index]) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("edge", "surface"), EDGE_PAIRS)
def test_edges_and_graphics_stand_out(edge, surface, theme):
    index = THEMES[theme]
    assert contrast(COLOURS[edge][index], COLOURS[surface][index]) >= 3


def test_no_colour_outside_the_token_file():
    """Components take colours from tokens; only print.css may name black and white."""
    for name in ("base.css", "components.css"):
        css = (Path(__file__).resolve().parents[2] / "static" / "flexband" / name).read_text()
        assert not re.findall(r"#[0-9a-fA-F]{3,8}\b", css), name
