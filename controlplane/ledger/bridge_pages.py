"""What the page of the invoice bridge shows: steps in cents that add up as printed, the waterfall, lines by SKU."""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.money import NANOS_PER_UNIT, cents_of, share_cents
from controlplane.core.reconcile import MatchedLine
from controlplane.ledger.bridging import BridgeReport, SkuRow, sku_rows
from controlplane.ledger.pages import cents_text
from controlplane.ledger.reconciliation import Reconciliation
from controlplane.web.figures import Figure, waterfall
from controlplane.web.figures import Step as Bar

EXPLANATIONS = {
    "price_variance": "(invoice price − book price) × invoice quantity",
    "quantity_variance": "(invoice quantity − book quantity) × book price",
    "unmatched_book": "On no invoice line of that day",
    "unmatched_invoice": "Usage that no pool’s SKU and day matches",
    "exchange": "Invoice rate beyond the planned one",
    "rounding": "Sums are rounded to a billionth, once a step",
}
ALWAYS_SHOWN = ("price_variance", "quantity_variance")


@dataclass(frozen=True)
class StepRow:
    """A step as a row: amount and running total in cents that add up, what of it is booked and what is not."""

    name: str
    title: str
    text: str
    cents: int
    running_cents: int
    booked_cents: int
    left_nanos: int
    lines: int
    has_lines: bool

    @property
    def amount(self) -> str:
        return cents_text(self.cents, signed=True)

    @property
    def running(self) -> str:
        return cents_text(self.running_cents)

    @property
    def booked(self) -> str:
        return cents_text(self.booked_cents, signed=True)


def step_rows(found: Reconciliation) -> list[StepRow]:
    """Steps that have an amount or lines, and the two variances always."""
    bridge = found.bridge
    shown = [step for step in bridge.steps if step.nanos or step.lines or step.name in ALWAYS_SHOWN]
    running = cents_of(bridge.book_nanos)
    left = bridge.difference_nanos - bridge.unexplained_nanos
    cents = share_cents(cents_of(bridge.invoice_nanos - bridge.unexplained_nanos) - running, _nanos(shown, left))
    rows = []
    for step in shown:
        running += cents[step.name]
        booked = found.booked.get(step.name, 0)
        rows.append(
            StepRow(
                step.name,
                step.title,
                EXPLANATIONS.get(step.name, ""),
                cents[step.name],
                running,
                cents_of(booked),
                step.nanos - booked,
                step.lines,
                step.name not in (*ALWAYS_SHOWN, "unmatched_book", "rounding"),
            )
        )
    return rows


def _nanos(shown: Sequence[object], left: int) -> dict[str, int]:
    amounts = {step.name: step.nanos for step in shown}  # type: ignore[attr-defined]
    assert sum(amounts.values()) == left
    return amounts


def figure(found: Reconciliation, rows: Sequence[StepRow]) -> tuple[Figure, str]:
    """The waterfall and its text."""
    bridge = found.bridge
    bars = [Bar("Attributed<br>cost", cents_of(bridge.book_nanos) / 100, total=True)]
    bars += [Bar(row.title.replace(" ", "<br>", 1), row.cents / 100) for row in rows if row.cents]
    bars.append(Bar("Invoice", cents_of(bridge.invoice_nanos) / 100, total=True))
    parts = ", ".join(f"{row.title} {row.amount}" for row in rows if row.cents) or "no difference"
    text = (
        f"From attributed cost {cents_text(cents_of(bridge.book_nanos))} to the invoice "
        f"{cents_text(cents_of(bridge.invoice_nanos))} {found.currency}: {parts}."
    )
    chart = waterfall(bars, unit=found.currency, height_px=300)
    chart["layout"]["xaxis"] |= {"tickangle": 0, "automargin": True}
    floor = axis_floor(found, rows)
    if floor:
        top = (
            max(bridge.book_nanos, bridge.invoice_nanos, *(row.running_cents * 10**7 for row in rows)) / NANOS_PER_UNIT
        )
        chart["layout"].setdefault("yaxis", {})["range"] = [floor, top + (top - floor) * 0.15]
        text += f" The axis starts at {floor:,}."
    return chart, text


def axis_floor(found: Reconciliation, rows: Sequence[StepRow]) -> int:
    """Where the chart's axis starts, in currency units: under the lowest step where steps are small beside totals."""
    lowest = min(found.bridge.book_nanos, found.bridge.invoice_nanos, *(row.running_cents * 10**7 for row in rows))
    highest = max(found.bridge.book_nanos, found.bridge.invoice_nanos, *(row.running_cents * 10**7 for row in rows))
    spread = highest - lowest
    if lowest <= 0 or not spread or spread * 3 > highest:
        return 0
    unit = 10 ** max(len(str(spread // NANOS_PER_UNIT)) - 1, 0)
    return max((lowest - spread // 2) // NANOS_PER_UNIT // unit * unit, 0)


@dataclass(frozen=True)
class DayLine:
    """A matched line of a SKU: its variances in cents that add up to the SKU's as printed."""

    line: MatchedLine
    price_cents: int
    quantity_cents: int

    @property
    def price(self) -> str:
        return cents_text(self.price_cents, signed=True)

    @property
    def quantity(self) -> str:
        return cents_text(self.quantity_cents, signed=True)

    @property
    def total(self) -> str:
        return cents_text(self.price_cents + self.quantity_cents, signed=True)


@dataclass(frozen=True)
class SkuLine:
    """A SKU with its variances as text that adds up; days are its matched lines when it is opened."""

    row: SkuRow
    price: str
    quantity: str
    total: str
    days: tuple[DayLine, ...]

    @property
    def name(self) -> str:
        return self.row.key.sku

    @property
    def where(self) -> str:
        key = self.row.key
        return " · ".join(part for part in (key.provider, key.account, key.region) if part)

    @property
    def pools(self) -> str:
        return ", ".join(self.row.pools)


def sku_lines(report: BridgeReport, price_cents: int, quantity_cents: int) -> list[SkuLine]:
    """One line a SKU; the columns of variances add up to the steps as printed."""
    rows = sku_rows(report)
    keys = {str(number): row for number, row in enumerate(rows)}
    price = share_cents(price_cents, {key: row.price_nanos for key, row in keys.items()}) if rows else {}
    quantity = share_cents(quantity_cents, {key: row.quantity_nanos for key, row in keys.items()}) if rows else {}
    return [
        SkuLine(
            row,
            cents_text(price[key], signed=True),
            cents_text(quantity[key], signed=True),
            cents_text(price[key] + quantity[key], signed=True),
            _day_lines(row, price[key], quantity[key]),
        )
        for key, row in keys.items()
    ]


def _day_lines(row: SkuRow, price_cents: int, quantity_cents: int) -> tuple[DayLine, ...]:
    lines = {str(number): line for number, line in enumerate(row.days)}
    price = share_cents(price_cents, {key: line.variance.price_nanos for key, line in lines.items()})
    quantity = share_cents(quantity_cents, {key: line.variance.quantity_nanos for key, line in lines.items()})
    return tuple(DayLine(line, price[key], quantity[key]) for key, line in lines.items())
