"""Reconciliation: three independent checks, each down to the lines that differ.

Estimates against actuals, reports against meters, attributed cost against the provider's invoice. What was not seen is
unknown, never zero; every line of an invoice lands somewhere, so the bridge has no residual.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from controlplane.core.money import NANOS_PER_UNIT, round_half_even

BIAS_MIN = Fraction(1, 4)
BIAS_MAX = Fraction(4)


@dataclass(frozen=True, slots=True)
class Variance:
    """Invoice less book, split into price and quantity; the two add up to the total exactly."""

    price_nanos: int
    quantity_nanos: int

    @property
    def total_nanos(self) -> int:
        return self.price_nanos + self.quantity_nanos


def variance_of_amounts(
    book_quantity: Fraction, book_nanos: Fraction, invoice_quantity: Fraction, invoice_nanos: Fraction
) -> Variance:
    """Quantity variance = (q_invoice - q_book) x p_book; price variance = what the invoice charges beyond p_book.

    Amounts are rounded to nanos once, half-even; a book without quantity has no price, so all is price variance.
    """
    total = round_half_even(invoice_nanos) - round_half_even(book_nanos)
    price = book_nanos / book_quantity if book_quantity else Fraction(0)
    quantity = round_half_even((invoice_quantity - book_quantity) * price)
    return Variance(total - quantity, quantity)


def variance(
    book_quantity: Fraction, book_price: Fraction, invoice_quantity: Fraction, invoice_price: Fraction
) -> Variance:
    """Variance of one line from exact quantities and unit prices in currency units."""
    if not book_quantity:
        quantity = round_half_even(invoice_quantity * book_price * NANOS_PER_UNIT)
        return Variance(round_half_even(invoice_quantity * invoice_price * NANOS_PER_UNIT) - quantity, quantity)
    book_nanos = book_quantity * book_price * NANOS_PER_UNIT
    invoice_nanos = invoice_quantity * invoice_price * NANOS_PER_UNIT
    return variance_of_amounts(book_quantity, book_nanos, invoice_quantity, invoice_nanos)


class InvoiceCategory(StrEnum):
    """What a line of an invoice is; everything but usage is a category of the bridge and not spread by itself."""

    USAGE = "usage"
    TAX = "tax"
    CREDIT = "credit"
    SUPPORT = "support"
    REFUND = "refund"
    COMMITMENT = "commitment"
    OTHER = "other"


@dataclass(frozen=True, slots=True, order=True)
class MatchKey:
    """What a book line and an invoice line have in common; `day` is ISO in the billing zone."""

    provider: str
    account: str
    sku: str
    region: str
    day: str


@dataclass(frozen=True, slots=True)
class CostLine:
    """Quantity and exact amount in nanos of one book or invoice line; book lines are all usage.

    `nanos` is at the exchange rate that the book planned with; `exchange_nanos` is what the invoice's own rate adds.
    """

    key: MatchKey
    quantity: Fraction
    nanos: Fraction
    category: InvoiceCategory = InvoiceCategory.USAGE
    exchange_nanos: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True)
class MatchedLine:
    """A key found on both sides."""

    key: MatchKey
    book_quantity: Fraction
    book_nanos: int
    invoice_quantity: Fraction
    invoice_nanos: int
    variance: Variance


@dataclass(frozen=True, slots=True)
class Bridge:
    """From the book to the invoice: book + price + quantity - unmatched book + unmatched invoice + categories,
    and the exchange difference.
    """

    book_nanos: int
    invoice_nanos: int
    matched: tuple[MatchedLine, ...]
    unmatched_book_nanos: Mapping[MatchKey, int]
    unmatched_invoice_nanos: Mapping[MatchKey, int]
    category_nanos: Mapping[InvoiceCategory, int]
    exchange_nanos: int = 0

    @property
    def price_variance_nanos(self) -> int:
        return sum(line.variance.price_nanos for line in self.matched)

    @property
    def quantity_variance_nanos(self) -> int:
        return sum(line.variance.quantity_nanos for line in self.matched)

    @property
    def residual_nanos(self) -> int:
        """What no step of the bridge names; 0 by construction."""
        explained = self.book_nanos + self.price_variance_nanos + self.quantity_variance_nanos
        explained += sum(self.unmatched_invoice_nanos.values()) - sum(self.unmatched_book_nanos.values())
        return self.invoice_nanos - explained - sum(self.category_nanos.values()) - self.exchange_nanos


@dataclass(slots=True)
class _Sum:
    quantity: Fraction = Fraction(0)
    nanos: Fraction = Fraction(0)


def _by_key(lines: Iterable[CostLine]) -> dict[MatchKey, _Sum]:
    sums: dict[MatchKey, _Sum] = {}
    for line in lines:
        entry = sums.setdefault(line.key, _Sum())
        entry.quantity += line.quantity
        entry.nanos += line.nanos
    return sums


def bridge(book: Iterable[CostLine], invoice: Iterable[CostLine]) -> Bridge:
    """Match book and invoice by key and name every difference."""
    ours, invoice = _by_key(book), list(invoice)
    theirs = _by_key(line for line in invoice if line.category is InvoiceCategory.USAGE)
    categories: dict[InvoiceCategory, Fraction] = {}
    for line in invoice:
        if line.category is not InvoiceCategory.USAGE:
            categories[line.category] = categories.get(line.category, Fraction(0)) + line.nanos
    category_nanos = {category: round_half_even(nanos) for category, nanos in sorted(categories.items())}
    matched = tuple(_match(key, ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys()))
    only_ours = {key: round_half_even(ours[key].nanos) for key in sorted(ours.keys() - theirs.keys())}
    only_theirs = {key: round_half_even(theirs[key].nanos) for key in sorted(theirs.keys() - ours.keys())}
    exchange_nanos = round_half_even(sum((line.exchange_nanos for line in invoice), Fraction(0)))
    invoice_nanos = sum(round_half_even(entry.nanos) for entry in theirs.values()) + sum(category_nanos.values())
    invoice_nanos += exchange_nanos
    book_nanos = sum(round_half_even(entry.nanos) for entry in ours.values())
    return Bridge(book_nanos, invoice_nanos, matched, only_ours, only_theirs, category_nanos, exchange_nanos)


def _match(key: MatchKey, ours: _Sum, theirs: _Sum) -> MatchedLine:
    difference = variance_of_amounts(ours.quantity, ours.nanos, theirs.quantity, theirs.nanos)
    book_nanos, invoice_nanos = round_half_even(ours.nanos), round_half_even(theirs.nanos)
    return MatchedLine(key, ours.quantity, book_nanos, theirs.quantity, invoice_nanos, difference)


class MeterStatus(StrEnum):
    """Outcome of one slot-minute of reports against meters."""

    AGREE = "agree"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, order=True)
class SlotMinute:
    """One slot in one UTC minute."""

    slot: str
    minute_us: int


@dataclass(frozen=True, slots=True)
class MeterCheck:
    """Sum of requests' gpu time against the busy meter; None is what was not reported."""

    at: SlotMinute
    requests_us: int | None
    busy_us: int | None
    status: MeterStatus


def check_meters(
    expected: Iterable[SlotMinute], requests_us: Mapping[SlotMinute, int], busy_us: Mapping[SlotMinute, int]
) -> list[MeterCheck]:
    """Compare every expected slot-minute; one that either side did not report is unknown, not zero."""
    checks = []
    for at in sorted({*expected, *requests_us, *busy_us}):
        requests, busy = requests_us.get(at), busy_us.get(at)
        status = MeterStatus.AGREE if requests == busy else MeterStatus.DIFFERS
        if requests is None or busy is None:
            status = MeterStatus.UNKNOWN
        checks.append(MeterCheck(at, requests, busy, status))
    return checks


@dataclass(frozen=True, slots=True)
class SequenceGap:
    """Report numbers first to last, both included, that never arrived."""

    first: int
    last: int


def sequence_gaps(received: Iterable[int], first: int, last: int) -> list[SequenceGap]:
    """Gaps in an agent's report numbers between `first` and `last`, both included."""
    gaps, due = [], first
    for seq in sorted({seq for seq in received if first <= seq <= last}):
        if seq > due:
            gaps.append(SequenceGap(due, seq - 1))
        due = seq + 1
    if due <= last:
        gaps.append(SequenceGap(due, last))
    return gaps


def heartbeat_coverage(heard_us: Iterable[int], start_us: int, end_us: int, interval_us: int) -> Fraction:
    """Share of the intervals of [start, end) in which an agent was heard at least once."""
    if interval_us <= 0 or end_us <= start_us:
        raise ValueError("heartbeat coverage needs a span and an interval over zero")
    intervals = -(-(end_us - start_us) // interval_us)
    return Fraction(len({(at - start_us) // interval_us for at in heard_us if start_us <= at < end_us}), intervals)


@dataclass(frozen=True, slots=True)
class EstimateCheck:
    """Estimated against actual of one tenant and class. `bias` = actual / estimated gpu time, None without estimate.

    `estimated_nanos` None: nobody kept an estimate of the charge, so the difference is unknown.
    `admission_factor` is what the bias does to the next estimates: the bias within [0.25, 4].
    """

    tenant: str
    class_: str
    estimated_gpu_us: int
    actual_gpu_us: int
    estimated_nanos: int | None
    actual_nanos: int

    @property
    def bias(self) -> Fraction | None:
        return Fraction(self.actual_gpu_us, self.estimated_gpu_us) if self.estimated_gpu_us > 0 else None

    @property
    def admission_factor(self) -> Fraction:
        bias = self.bias
        return Fraction(1) if bias is None else min(max(bias, BIAS_MIN), BIAS_MAX)

    @property
    def difference_nanos(self) -> int | None:
        if self.estimated_nanos is None:
            return None
        return self.actual_nanos - self.estimated_nanos
