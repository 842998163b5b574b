"""Shares kept as millionths, typed and shown as per cent; exact both ways."""

from decimal import Decimal

PPM = 1_000_000
PPM_PER_PERCENT = 10_000


def percent_of_ppm(ppm: int) -> str:
    """Millionths as per cent, with the decimals they have: 50,000 is "5", 125,000 is "12.5"."""
    whole, part = divmod(ppm, PPM_PER_PERCENT)
    return f"{whole}.{part:04d}".rstrip("0").rstrip(".") if part else str(whole)


def ppm_of_percent(percent: Decimal | None) -> int:
    """Per cent as millionths; the field lets four decimals through, so nothing is cut."""
    return int((percent or Decimal(0)) * PPM_PER_PERCENT)
