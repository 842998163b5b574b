"""The bridge from what was attributed to what the provider bills: every line of both lands in a step, the rest is zero.

Lines match by provider, account, SKU, region and day of the billing zone; `PoolSku` says what a pool's slots are called
on the invoice. Quantities and amounts are exact until a step's sum is rounded to nanos, once.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from fractions import Fraction
from itertools import groupby
from typing import Any

from django.db import connection
from django.db.models import Count, DecimalField, F, Q, Sum, Value
from django.db.models.functions import Coalesce

from controlplane.core.money import NANOS_PER_UNIT, US_PER_HOUR, round_half_even
from controlplane.core.period import Window, day_windows, load_zone
from controlplane.core.reconcile import Bridge, CostLine, InvoiceCategory, MatchedLine, MatchKey, bridge
from controlplane.ledger.models import Invoice, InvoiceLine, PlannedExchangeRate, PoolSku

STEP_TITLES = {
    "price_variance": "Price variance",
    "quantity_variance": "Quantity variance",
    "unmatched_book": "Attributed, not invoiced",
    "unmatched_invoice": "Invoiced, not attributed",
    "tax": "Tax",
    "credit": "Credits",
    "support": "Support",
    "refund": "Refunds",
    "commitment": "Commitments",
    "other": "Other charges",
    "exchange": "Exchange difference",
    "rounding": "Rounding",
}
"""Every step from the book to the invoice, in the order of the page."""

LINES_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Step:
    """A named residual; positive: the invoice has more than the book."""

    name: str
    nanos: int
    lines: int

    @property
    def title(self) -> str:
        return STEP_TITLES[self.name]


@dataclass(frozen=True, slots=True)
class BridgeReport:
    """`invoice_nanos` is summed by the database, apart from the steps; `unexplained_nanos` is what no step names.

    `unpriced_us` is slot time whose cost is unknown and in no sum. `keys_without_quantity`: matched keys whose invoice
    lines say no quantity, so that all their difference is price. `pools` are the pools behind each key.
    """

    bridge: Bridge
    steps: tuple[Step, ...]
    invoice_nanos: int
    invoices: tuple[Invoice, ...]
    unpriced_us: int
    keys_without_quantity: frozenset[MatchKey]
    pools: Mapping[MatchKey, tuple[str, ...]]

    @property
    def book_nanos(self) -> int:
        return self.bridge.book_nanos

    @property
    def difference_nanos(self) -> int:
        return self.invoice_nanos - self.book_nanos

    @property
    def unexplained_nanos(self) -> int:
        return self.difference_nanos - sum(step.nanos for step in self.steps)

    @property
    def closes(self) -> bool:
        return self.unexplained_nanos == 0


@dataclass(frozen=True, slots=True)
class _Rule:
    """A pool's name on the invoice; the parts that are not empty must be equal."""

    provider: str
    account: str
    sku: str
    region: str

    def fits(self, row: Mapping[str, Any]) -> bool:
        return self.sku == row["sku"] and all(
            not mine or mine == row[name]
            for name, mine in (("provider", self.provider), ("account", self.account), ("region", self.region))
        )

    @property
    def parts(self) -> int:
        return sum(map(bool, (self.provider, self.account, self.region)))

    def key(self, day: str) -> MatchKey:
        return MatchKey(self.provider, self.account, self.sku, self.region, day)


@dataclass(slots=True)
class _Book:
    """What was attributed in a period, by match key, and the pools behind each key."""

    lines: list[CostLine] = field(default_factory=list)
    pools: dict[MatchKey, tuple[str, ...]] = field(default_factory=dict)
    unpriced_us: int = 0


def bridge_report(period: str, window: Window, zone_name: str) -> BridgeReport:
    """The bridge of a period: pool hours that start in the window against its current invoices."""
    return bridge_reports({period: window}, zone_name)[period]


def bridge_reports(windows: Mapping[str, Window], zone_name: str) -> dict[str, BridgeReport]:
    """The same of several periods, by their names: six statements, whatever their number."""
    rules = {row.pool_id: row for row in PoolSku.objects.all()}
    books = _book_lines(windows, zone_name, rules)
    lines = _lines_by_period(windows)
    totals, planned = _exact_totals(windows), _planned_rates()
    invoices: dict[str, list[Invoice]] = {}
    for row in Invoice.objects.filter(period__in=[*windows], state=Invoice.State.CURRENT).order_by("id"):
        invoices.setdefault(row.period, []).append(row)
    return {
        period: _report(
            books[period], lines[period], [*rules.values()], planned, totals[period], tuple(invoices.get(period, ()))
        )
        for period in windows
    }


def _report(
    book: _Book,
    rows: Sequence[Mapping[str, Any]],
    rules: Sequence[PoolSku],
    planned: Mapping[str, list[tuple[date, Decimal]]],
    exact_total: Fraction,
    invoices: tuple[Invoice, ...],
) -> BridgeReport:
    quantities = {key: sum((line.quantity for line in lines), Fraction(0)) for key, lines in _grouped(book.lines)}
    invoice, unknown = _invoice_lines(rows, rules, quantities, planned)
    found = bridge(book.lines, invoice)
    total = round_half_even(exact_total)
    rounding = total - found.invoice_nanos
    # Each part was rounded by half a nano at most; more than that is not rounding, and stays unexplained.
    parts = len(found.matched) + len(found.unmatched_invoice_nanos) + len(found.category_nanos) + 2
    steps = _steps(found, invoice, rounding if abs(rounding) <= parts else 0)
    matched = {line.key for line in found.matched}
    return BridgeReport(found, steps, total, invoices, book.unpriced_us, frozenset(unknown & matched), book.pools)


def _grouped(lines: Iterable[CostLine]) -> Iterable[tuple[MatchKey, list[CostLine]]]:
    ordered = sorted(lines, key=lambda line: line.key)
    return ((key, list(group)) for key, group in groupby(ordered, key=lambda line: line.key))


def _book_lines(windows: Mapping[str, Window], zone_name: str, rules: Mapping[int, PoolSku]) -> dict[str, _Book]:
    zone = load_zone(zone_name)
    days = [(name, day) for name, window in windows.items() for day in day_windows(zone, window.start, window.end)]
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT d.period, d.label, i.pool_id, p.slug, sum(i.owned_us - i.unpriced_us)::bigint,
                   coalesce(sum(i.cost_nanos), 0)::bigint, sum(i.unpriced_us)::bigint
            FROM unnest(%s::text[], %s::text[], %s::timestamptz[], %s::timestamptz[]) AS d (period, label, starts, ends)
            JOIN ledger_attributioninterval i ON i.starts_at >= d.starts AND i.starts_at < d.ends
            JOIN fleet_pool p ON p.id = i.pool_id
            GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 4
            """,
            [[name for name, _ in days], *([getattr(day, of) for _, day in days] for of in ("label", "start", "end"))],
        )
        rows = cursor.fetchall()
    found = {name: _Book() for name in windows}
    for period, label, pool_id, slug, priced_us, nanos, unpriced_us in rows:
        book, rule = found[period], rules.get(pool_id)
        units = Fraction(rule.units_per_slot_hour) if rule else Fraction(1)
        key = _rule(rule).key(label) if rule else MatchKey("", "", f"pool {slug}", "", label)
        book.lines.append(CostLine(key, Fraction(priced_us, US_PER_HOUR) * units, Fraction(nanos)))
        book.pools[key] = tuple(sorted({*book.pools.get(key, ()), slug}))
        book.unpriced_us += unpriced_us
    return found


def _rule(row: PoolSku) -> _Rule:
    return _Rule(row.provider, row.account, row.sku, row.region)


def _current(*periods: str) -> Any:
    return InvoiceLine.objects.filter(invoice__period__in=periods, invoice__state=Invoice.State.CURRENT)


def _lines_by_period(periods: Iterable[str]) -> dict[str, list[Mapping[str, Any]]]:
    columns = ("provider", "account", "sku", "region", "day", "category")
    rows = (
        _current(*periods)
        .values(*columns, "invoice__period", "invoice__currency", "invoice__exchange_rate", "invoice__exchange_date")
        .annotate(billed=Sum("billed"), amount=Sum("quantity"), silent=Count("id", filter=Q(quantity__isnull=True)))
        .order_by(*columns, "invoice__currency", "invoice__exchange_rate", "invoice__exchange_date")
    )
    found: dict[str, list[Mapping[str, Any]]] = {period: [] for period in periods}
    for row in rows:
        found[row["invoice__period"]].append(row)
    return found


def _invoice_lines(
    rows: Sequence[Mapping[str, Any]],
    rules: Sequence[PoolSku],
    book_quantities: Mapping[MatchKey, Fraction],
    planned: Mapping[str, list[tuple[date, Decimal]]],
) -> tuple[list[CostLine], set[MatchKey]]:
    # the most particular rule first, so that it takes a line before a general one does
    ordered = sorted({_rule(row) for row in rules}, key=lambda rule: (-rule.parts, rule.key("")))
    keyed = [(_key_of(row, ordered), row) for row in rows]
    unknown = {key for key, row in keyed if row["silent"] and row["category"] == InvoiceCategory.USAGE}
    lines = []
    seen: set[MatchKey] = set()
    for key, row in keyed:
        quantity = Fraction(row["amount"] or 0)
        if key in unknown:
            # Without a quantity nothing can be said of it: the book's stands in, and all the difference is price.
            quantity = Fraction(0) if key in seen else book_quantities.get(key, Fraction(0))
        seen.add(key)
        lines.append(_cost_line(key, quantity, row, planned))
    return lines, unknown


def _key_of(row: Mapping[str, Any], rules: Sequence[_Rule]) -> MatchKey:
    day = row["day"].isoformat()
    rule = next((rule for rule in rules if rule.fits(row)), None)
    if rule is not None and row["category"] == InvoiceCategory.USAGE:
        return rule.key(day)
    return MatchKey(row["provider"], row["account"], row["sku"], row["region"], day)


def _cost_line(
    key: MatchKey, quantity: Fraction, row: Mapping[str, Any], planned: Mapping[str, list[tuple[date, Decimal]]]
) -> CostLine:
    rate = Fraction(row["invoice__exchange_rate"] or 1)
    in_force = rate
    if row["invoice__exchange_rate"] is not None:
        before = [plan for day, plan in planned.get(row["invoice__currency"], ()) if day <= row["day"]]
        in_force = Fraction(before[-1]) if before else rate
    billed = Fraction(row["billed"]) * NANOS_PER_UNIT
    return CostLine(key, quantity, billed * in_force, InvoiceCategory(row["category"]), billed * (rate - in_force))


def _planned_rates() -> dict[str, list[tuple[date, Decimal]]]:
    found: dict[str, list[tuple[date, Decimal]]] = {}
    for row in PlannedExchangeRate.objects.order_by("effective_from"):
        found.setdefault(row.currency, []).append((row.effective_from, row.rate))
    return found


def _exact_totals(periods: Iterable[str]) -> dict[str, Fraction]:
    """All lines at their invoices' own rates, in nanos: the database's sums, not those of the steps."""
    one = Value(Decimal(1), output_field=DecimalField(max_digits=30, decimal_places=15))
    sums = (
        _current(*periods)
        .values_list("invoice__period", "invoice_id")
        .annotate(billed=Sum("billed"), rate=Coalesce(F("invoice__exchange_rate"), one))
    )
    found = dict.fromkeys(periods, Fraction(0))
    for period, _, billed, rate in sums:
        found[period] += Fraction(billed) * Fraction(rate) * NANOS_PER_UNIT
    return found


def _steps(found: Bridge, invoice: Sequence[CostLine], rounding: int) -> tuple[Step, ...]:
    nanos = {
        "price_variance": found.price_variance_nanos,
        "quantity_variance": found.quantity_variance_nanos,
        "unmatched_book": -sum(found.unmatched_book_nanos.values()),
        "unmatched_invoice": sum(found.unmatched_invoice_nanos.values()),
        **{str(category): found.category_nanos.get(category, 0) for category in InvoiceCategory if category != "usage"},
        "exchange": found.exchange_nanos,
        "rounding": rounding,
    }
    lines = {
        "price_variance": sum(bool(line.variance.price_nanos) for line in found.matched),
        "quantity_variance": sum(bool(line.variance.quantity_nanos) for line in found.matched),
        "unmatched_book": len(found.unmatched_book_nanos),
        "unmatched_invoice": len(found.unmatched_invoice_nanos),
        "exchange": sum(bool(line.exchange_nanos) for line in invoice),
    }
    for line in invoice:
        if line.category is not InvoiceCategory.USAGE:
            lines[str(line.category)] = lines.get(str(line.category), 0) + 1
    return tuple(Step(name, nanos[name], lines.get(name, 0)) for name in STEP_TITLES)


@dataclass(frozen=True, slots=True)
class SkuRow:
    """Matched lines of one SKU over all days of the period; prices are amounts over quantities, None without one."""

    key: MatchKey
    pools: tuple[str, ...]
    book_quantity: Fraction
    book_nanos: int
    invoice_quantity: Fraction
    invoice_nanos: int
    price_nanos: int
    quantity_nanos: int
    days: tuple[MatchedLine, ...]

    @property
    def total_nanos(self) -> int:
        return self.price_nanos + self.quantity_nanos

    @property
    def book_price_nanos(self) -> int | None:
        return round_half_even(self.book_nanos / self.book_quantity) if self.book_quantity else None

    @property
    def invoice_price_nanos(self) -> int | None:
        return round_half_even(self.invoice_nanos / self.invoice_quantity) if self.invoice_quantity else None


def sku_rows(report: BridgeReport) -> list[SkuRow]:
    """Matched keys without their days, the largest difference first."""
    groups: dict[MatchKey, list[MatchedLine]] = {}
    for line in report.bridge.matched:
        whole = MatchKey(line.key.provider, line.key.account, line.key.sku, line.key.region, "")
        groups.setdefault(whole, []).append(line)
    rows = [
        SkuRow(
            key,
            tuple(sorted({slug for line in lines for slug in report.pools.get(line.key, ())})),
            sum((line.book_quantity for line in lines), Fraction(0)),
            sum(line.book_nanos for line in lines),
            sum((line.invoice_quantity for line in lines), Fraction(0)),
            sum(line.invoice_nanos for line in lines),
            sum(line.variance.price_nanos for line in lines),
            sum(line.variance.quantity_nanos for line in lines),
            tuple(lines),
        )
        for key, lines in groups.items()
    ]
    return sorted(rows, key=lambda row: (-abs(row.total_nanos), row.key))


def lines_of_step(period: str, report: BridgeReport, step: str) -> list[InvoiceLine]:
    """The invoice's lines behind a step, the largest first, at most LINES_SHOWN; none for steps of the book alone."""
    lines = _current(period).select_related("invoice")
    if step in {str(category) for category in InvoiceCategory} - {"usage"}:
        return list(lines.filter(category=step).order_by("-billed", "id")[:LINES_SHOWN])
    if step == "exchange":
        return list(lines.filter(invoice__exchange_rate__isnull=False).order_by("-billed", "id")[:LINES_SHOWN])
    if step == "unmatched_invoice":
        return _usage_lines(lines, report.bridge.unmatched_invoice_nanos)
    return []


def lines_of_sku(period: str, report: BridgeReport, sku: str, day: str = "") -> list[InvoiceLine]:
    """The invoice's lines behind a matched SKU, of one day or all, the largest first, at most LINES_SHOWN."""
    keys = {line.key for line in report.bridge.matched if line.key.sku == sku and day in ("", line.key.day)}
    if not keys:
        return []
    lines = _current(period).select_related("invoice").filter(sku=sku, day__in={key.day for key in keys})
    return _usage_lines(lines, keys)


def _usage_lines(lines: Any, keys: Container[MatchKey]) -> list[InvoiceLine]:
    rules = sorted({_rule(row) for row in PoolSku.objects.all()}, key=lambda rule: (-rule.parts, rule.key("")))
    usage = lines.filter(category=InvoiceCategory.USAGE).order_by("-billed", "id")
    found: list[InvoiceLine] = []
    for line in usage.iterator(chunk_size=2_000):
        row = {name: getattr(line, name) for name in ("provider", "account", "sku", "region", "day", "category")}
        if _key_of(row, rules) in keys:
            found.append(line)
        if len(found) == LINES_SHOWN:
            break
    return found
