"""Figures and rows that the style guide shows its components with; invented numbers, no organisation's."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from django import forms

from controlplane.web import figures

NOON = datetime(2026, 11, 12, 12, 0, tzinfo=UTC)
NANOS = 1_000_000_000


class ExampleForm(forms.Form):
    """A contract's form with one of each kind of field."""

    name = forms.CharField(label="Name", max_length=40, help_text="Lower case letters, digits and dashes")
    threshold_ms = forms.DecimalField(label="Threshold, ms", help_text="In force: 900", min_value=1)
    target = forms.DecimalField(label="Target share, %", help_text="The percentile: 99 means p99 within the threshold")
    window = forms.ChoiceField(label="Rolling window", choices=[("15", "15 min"), ("60", "60 min")])
    loud = forms.BooleanField(label="Page on-call when it burns", required=False)
    reason = forms.CharField(
        label="Reason", widget=forms.Textarea(attrs={"rows": 2}), help_text="Kept in the audit log"
    )

    def clean_target(self) -> Any:
        target = self.cleaned_data["target"]
        if target < 93:
            raise forms.ValidationError("must be at least 93.06 %, or the page alert at burn 14.4 can never fire")
        return target


def _stage_figure() -> figures.Figure:
    bins = [NOON + timedelta(seconds=30 * n) for n in range(24)]
    growth = [0 if n < 8 else (n - 8) / 15 for n in range(24)]
    stages = {
        "admission": [2_000 for _ in bins],
        "queue": [30_000 + int(158_000 * math.sqrt(g)) for g in growth],
        "batch_wait": [4_000 for _ in bins],
        "preprocess": [6_000 for _ in bins],
        "prefill": [55_000 + (n % 3) * 1_500 for n in range(24)],
        "decode": [6_000 for _ in bins],
        "return": [1_000 for _ in bins],
    }
    return figures.stage_bars(bins, stages, objective_ms=250)


def _burn_figure() -> figures.Figure:
    minutes = [NOON + timedelta(minutes=n) for n in range(60)]
    burn = [0.8 + 0.1 * math.sin(n) if n < 45 else 0.8 + (n - 45) * 0.6 for n in range(60)]
    quiet = [None if 20 <= n < 28 else 0.5 + 0.2 * math.cos(n / 4) for n in range(60)]
    series = [figures.Series("chat", burn, "var(--bad-edge)"), figures.Series("search", quiet)]
    return figures.line_series(minutes, series, unit="×", threshold=1, threshold_label="1 = on budget", height_px=190)


def _bridge_figure() -> figures.Figure:
    return figures.waterfall(
        [
            figures.Step("Attributed", 87_276.18, total=True),
            figures.Step("Idle", 27_558.12),
            figures.Step("Credits", -1_340.20),
            figures.Step("Residual", 50.68),
            figures.Step("Invoice", 113_544.78, total=True),
        ],
        unit="EUR",
    )


def context() -> dict[str, Any]:
    """Context of `web/styleguide.html`."""
    form = ExampleForm(
        {"name": "interactive-chat", "threshold_ms": "700", "target": "90", "window": "15", "reason": "Launch week"}
    )
    form.is_valid()
    return {
        "page_state": "bad",
        "page_tally": "1 breached",
        "crumbs": [{"label": "Policy", "url": "#"}, {"label": "Contracts", "url": "#"}],
        "meta": ["Every component, every state", "Invented numbers", "Billing zone Europe/Berlin"],
        "at": NOON,
        "form": form,
        "stage_figure": _stage_figure(),
        "burn_figure": _burn_figure(),
        "bridge_figure": _bridge_figure(),
        "bars_figure": figures.bars(
            ["globex", "acme", "hooli", "tyrell"], [252, 118, 31, None], unit="requests", horizontal=True, height_px=180
        ),
        "facts": [
            {"label": "Error budget left, 7 d", "value": "−4.0 %", "bad": True},
            {"label": "Burning for", "value": "10 min 57 s"},
            {"label": "Offered", "value": "98.96 %", "note": "missed"},
            {"label": "Admitted", "value": "99.03 %", "note": "met"},
            {"label": "Out of range", "value": None},
        ],
        "sum_lines": [
            {"label": "acme", "value": "28,161.13", "swatch": "fill-1"},
            {"label": "globex", "value": "23,019.33", "swatch": "fill-2"},
            {"label": "Flex not lent", "value": "6,365.80", "swatch": "idle-not-lent"},
        ],
        "kv": [{"label": "Expected to end", "value": "14:32:11"}, {"label": "Drains, 7 d, p95", "value": None}],
        "tabs": [
            {"label": "Overview", "url": "#a", "current": False},
            {"label": "Keys", "url": "#b", "current": False, "count": 6},
            {"label": "Budgets", "url": "#c", "current": True, "count": 5},
        ],
        "money": {"large": 114_834_300_000_000, "small": 1_500_000, "minus": -1_289_520_000_000, "zero": 0},
        "budget": {
            "limit": 22_000 * NANOS,
            "settled": 12_409 * NANOS,
            "leased": 1_084 * NANOS,
            "forecast": 23_310 * NANOS,
            "calm": 9_023 * NANOS,
            "calm_forecast": 16_402 * NANOS,
        },
    }
