"""What the finance page reads of a span: tenants that it names, with class and pool, and all others as one.

Of ten thousand tenants a page shows fifty. Who they are follows from one sum for each; only theirs is read in full.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from controlplane.core.period import Window
from controlplane.ledger import pages
from controlplane.ledger.attribution_input import Names, load_names
from controlplane.ledger.pages import PLATFORM
from controlplane.ledger.queries import OTHERS, Charge, CostRow, SpanCosts, TenantCost, charges, costs_of, span_costs
from controlplane.usage.queries import Scope, TenantCharge, charges_by_tenant


@dataclass(frozen=True, slots=True)
class NamedCosts:
    """`rows` and `charged` of the tenants that are named, and of OTHERS without class or pool; both add up to all.

    `idle` is all of idle time by who bears it. `hidden` tenants are in OTHERS, `hidden_used` of them with a known cost
    of use.
    """

    rows: list[CostRow]
    idle: list[CostRow]
    charged: list[Charge]
    hidden: int
    hidden_used: int


def named_costs(days: Sequence[Window], selected: str, *, with_charges: bool) -> NamedCosts:
    """Names `selected`, the tenants that cost most and those that used most; with charges nine statements."""
    costs = span_costs(days)
    names, billed = Names({}, {}), dict[int, TenantCharge]()
    if with_charges and days:
        names = load_names()
        billed = charges_by_tenant(Scope(days[0].start, days[-1].end))
    slugs = {tenant_id: names.tenant(tenant_id) for tenant_id in billed}
    named = _named(costs, slugs.values(), selected)
    rest = [one for one in costs.tenants if one.tenant not in named]
    own = [tenant_id for tenant_id, slug in slugs.items() if slug in named]
    charged = charges(days[0].start, days[-1].end, own, names) if own else []
    if len(own) < len(billed):
        charged.append(_other_charge([one for tenant_id, one in billed.items() if slugs[tenant_id] not in named]))
    return NamedCosts(
        rows=[
            *costs_of(sorted(named), days),
            *_other_rows(rest, [row for row in costs.idle if row.tenant not in named]),
        ],
        idle=costs.idle,
        charged=charged,
        hidden=len({one.tenant for one in rest}.union(slugs.values()) - named),
        hidden_used=sum(one.used_nanos is not None for one in rest),
    )


def _named(costs: SpanCosts, billed: Collection[str], selected: str) -> set[str]:
    spent = dict.fromkeys(billed, 0) | {one.tenant: one.nanos or 0 for one in costs.tenants}
    spent.pop(PLATFORM, None)
    used = {one.tenant: one.used_nanos for one in costs.tenants if one.used_nanos is not None}
    most = nsmallest(pages.TENANTS_SHOWN, spent, key=lambda slug: (-spent[slug], slug))
    return {PLATFORM, selected, *most, *nsmallest(pages.LEADING_TENANTS, used, key=lambda slug: (-used[slug], slug))}


def _other_rows(rest: Sequence[TenantCost], idle: Sequence[CostRow]) -> list[CostRow]:
    """Use, each idle line and what lending moved, of all of them together."""
    if not rest:
        return []
    lines = {row.line: [0, 0, 0] for row in idle}
    for row in idle:
        sums = lines[row.line]
        sums[0], sums[1], sums[2] = sums[0] + row.slot_us, sums[1] + (row.nanos or 0), sums[2] + (row.nanos is not None)
    used = [one.used_nanos for one in rest if one.used_nanos is not None]
    spent = sum(one.nanos or 0 for one in rest)
    idle_us, idle_nanos = sum(us for us, _, _ in lines.values()), sum(nanos for _, nanos, _ in lines.values())
    use_us = sum(one.slot_us for one in rest) - idle_us
    return [
        CostRow("", "", OTHERS, "", "direct", use_us, sum(used) if used else None),
        CostRow("", "", OTHERS, "", "lend_price", 0, spent - sum(used) - idle_nanos),
        *(
            CostRow("", "", OTHERS, "", line, us, nanos if known else None)
            for line, (us, nanos, known) in lines.items()
        ),
    ]


def _other_charge(rest: Sequence[TenantCharge]) -> Charge:
    requests, nanos = sum(one.requests for one in rest), sum(one.nanos for one in rest)
    return Charge(OTHERS, "", "", "", 0, requests, 0, 0, 0, 0, nanos, 0, 0, 0)
