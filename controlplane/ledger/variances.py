"""What of the bridge's residuals is in the book, and the lines that would bring one there, spread or left alone."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from django.core.exceptions import ValidationError

from controlplane.core.attribution import PLATFORM
from controlplane.core.money import distribute
from controlplane.core.period import Window
from controlplane.core.reconcile import MatchKey
from controlplane.ledger.bridging import STEP_TITLES, BridgeReport
from controlplane.ledger.posting import AccountKind, AccountRef, PostingLine, owner_account, posted_by_source
from controlplane.ledger.queries import LENDING, cost_rows

KIND = "variance"
SPREAD_ATTRIBUTION = "attribution"
SPREAD_PLATFORM = "platform"
SPREADS = (SPREAD_ATTRIBUTION, SPREAD_PLATFORM)

Owner = tuple[str, str]
"""(tenant, class)."""


def provider_account(step: str) -> AccountRef:
    """The other side of a booked residual; its balance is minus what was booked."""
    return AccountRef(AccountKind.PROVIDER, line=step)


def source_of(period: str, step: str) -> str:
    return f"{KIND}:{period}:{step}"


def booked_variances(period: str) -> dict[str, int]:
    """Residuals of a period that are in the book, by step, in nanos; steps without any are left out."""
    return booked_by_period([period])[period]


def booked_by_period(periods: Sequence[str]) -> dict[str, dict[str, int]]:
    """The same of several periods, by their names; one statement."""
    places = {source_of(period, step): (period, step) for period in periods for step in STEP_TITLES}
    found: dict[str, dict[str, int]] = {period: {} for period in periods}
    for source, nanos in posted_by_source({s: provider_account(step) for s, (_, step) in places.items()}).items():
        period, step = places[source]
        found[period][step] = nanos
    return found


def left_to_book(report: BridgeReport, booked: Mapping[str, int], step: str) -> int:
    """What a step still has beyond the book. Raises ValidationError for a step that there is not."""
    known = {one.name: one.nanos for one in report.steps}
    if step not in known:
        raise ValidationError({"step": f"Choose one of {', '.join(known)}."})
    return known[step] - booked.get(step, 0)


def variance_lines(
    report: BridgeReport, days: Sequence[Window], step: str, spread: str, nanos: int
) -> list[PostingLine]:
    """Transfers that book `nanos` of a step; parts add up to it exactly.

    Spread by attribution, a matched line's variance goes to who bears that pool's cost of that day; what belongs to no
    pool goes to who bears the fleet's cost of the period. Where nobody bears any, the platform does.
    """
    parts: Mapping[Owner, int] = {(PLATFORM, ""): nanos}
    if spread == SPREAD_ATTRIBUTION:
        parts = _parts(report, days, step, nanos)
    provider = provider_account(step)
    return [
        PostingLine(owner_account(tenant, class_, step), provider, part)
        for (tenant, class_), part in parts.items()
        if part
    ]


def _parts(report: BridgeReport, days: Sequence[Window], step: str, nanos: int) -> Mapping[Owner, int]:
    weights = _weights(days)
    quotas: dict[Owner, Fraction] = {}
    for key, amount in _amounts(report, step).items():
        pools = report.pools.get(key, ())
        mine = _sum(weights, {(pool, key.day) for pool in pools}) or _sum(weights, set(weights))
        whole = sum(mine.values())
        for owner, weight in mine.items():
            quotas[owner] = quotas.get(owner, Fraction(0)) + Fraction(amount * weight, whole)
    whole_nanos = sum(quotas.values(), Fraction(0))
    if not whole_nanos:
        everyone = _sum(weights, set(weights))
        quotas = {owner: Fraction(weight) for owner, weight in everyone.items()}
        whole_nanos = sum(quotas.values(), Fraction(0))
    if not whole_nanos:
        return {(PLATFORM, ""): nanos}
    # of a step that is booked in part, what is left is spread like the whole
    by_text = {"\0".join(owner): quota * nanos / whole_nanos for owner, quota in quotas.items()}
    found = distribute(nanos, by_text)
    return {(text.split("\0")[0], text.split("\0")[1]): part for text, part in found.items()}


def _amounts(report: BridgeReport, step: str) -> dict[MatchKey, int]:
    bridge = report.bridge
    if step == "price_variance":
        return {line.key: line.variance.price_nanos for line in bridge.matched if line.variance.price_nanos}
    if step == "quantity_variance":
        return {line.key: line.variance.quantity_nanos for line in bridge.matched if line.variance.quantity_nanos}
    if step == "unmatched_book":
        return {key: -nanos for key, nanos in bridge.unmatched_book_nanos.items() if nanos}
    return {}


PoolDay = tuple[str, str]


def _weights(days: Sequence[Window]) -> dict[PoolDay, dict[Owner, int]]:
    """What each tenant and class bears of a pool's day, lending left out since it moves cost between them."""
    found: dict[PoolDay, dict[Owner, int]] = {}
    for row in cost_rows(days):
        if row.line in LENDING or not row.nanos:
            continue
        mine = found.setdefault((row.pool, row.day), {})
        owner = (row.tenant, row.class_)
        mine[owner] = mine.get(owner, 0) + row.nanos
    return found


def _sum(weights: Mapping[PoolDay, Mapping[Owner, int]], days: set[PoolDay]) -> dict[Owner, int]:
    total: dict[Owner, int] = {}
    for day in sorted(days):
        for owner, nanos in weights.get(day, {}).items():
            total[owner] = total.get(owner, 0) + nanos
    return {owner: nanos for owner, nanos in total.items() if nanos}
