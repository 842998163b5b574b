"""Instants of a billing period from a case in JSON form."""

from typing import Any

from controlplane.core.json_reader import JsonReader
from controlplane.core.period import cut_hours, day_windows, format_utc, load_zone, parse_period


def explain(case: object) -> dict[str, Any]:
    """Answer of one case: `zone` and `period` (2026-10, 2026-W44, 2026-10-31), optional `anchor_day`.

    Raises ValueError for unusable input.
    """
    reader = JsonReader(case, "")
    zone = load_zone(reader.text("zone"))
    window = parse_period(zone, reader.text("period"), anchor_day=reader.integer("anchor_day", 1))
    return {
        "start": format_utc(window.start),
        "end": format_utc(window.end),
        "hours": window.hours,
        "days": len(day_windows(zone, window.start, window.end)),
        "attribution_intervals": len(cut_hours(window.start, window.end, zone)),
    }
