"""What the finance pages show, computed from rows: sums, cents that add up, the pivot, the chart."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from controlplane.core.money import NANOS_PER_UNIT, cents_of, distribute, distribute_cents, format_cents, share_cents
from controlplane.ledger.queries import IDLE_CAUSES, LENDING, OTHERS, Charge, CostRow
from controlplane.web.figures import Figure, Series, stacked_bars
from controlplane.web.numerals import DASH, MINUS

LEADING_TENANTS = 4
PLATFORM = "platform"
TENANTS_SHOWN = 50


@dataclass(frozen=True)
class Cause:
    """How an idle cause is shown, who answers for it and what it means."""

    title: str
    css: str
    owner: str
    meaning: str


CAUSES: dict[str, Cause] = {
    "interactive_floor_unused": Cause(
        "Interactive floor unused", "idle-floor", "Interactive class of the pool",
        "Slots protected for interactive work that had none to do.",
    ),
    "batch_floor_unused": Cause(
        "Batch floor unused", "idle-floor", "Batch class of the pool", "Slots kept for batch that had no work.",
    ),
    "flex_not_lent": Cause(
        "Flex not lent", "idle-not-lent", "Owner of the pool", "Flex slots at home, neither used nor lent.",
    ),
    "lent_unused": Cause(
        "Lent, unused", "idle-not-lent", "Borrowing class", "Lent to batch, which did not fill them.",
    ),
    "draining": Cause(
        "Draining", "idle-draining", "Borrowing class", "Recalled slots that finish what runs and take nothing new.",
    ),
    "warming": Cause("Warming", "idle-draining", "Fleet operations", "Engines that start or load a model."),
    "broken": Cause("Broken", "idle-broken", "Fleet operations", "The meter says that the slot could not serve."),
    "unobserved": Cause(
        "Unobserved", "idle-unobserved", "Fleet operations",
        "No meter reading, or one that disagrees with the requests: nobody can say what it did.",
    ),
    "unused": Cause("Shared, unused", "idle-floor", "Owner of the pool", "Shared slots that nobody used."),
}  # fmt: skip
LINE_TITLES = {
    "direct": "Direct use",
    "repeated_work": "Repeated work",
    "lend_price": "Lend price",
    "lend_income": "Lend income",
    **{key: cause.title for key, cause in CAUSES.items()},
}


def cents_text(cents: int | None, *, signed: bool = False) -> str:
    """Cents as people read them: grouped, true minus, a dash for unknown."""
    if cents is None:
        return DASH
    whole, part = divmod(abs(cents), 100)
    sign = MINUS if cents < 0 else "+" if signed and cents > 0 else ""
    return f"{sign}{whole:,}.{part:02d}"


def row_id(key: str) -> str:
    """An id of an element from slugs joined by a slash: slugs have no underscore."""
    return key.replace("/", "_")


def split_cents(direct_nanos: int, idle_nanos: int) -> dict[str, int]:
    """Printed totals of use and idle, which add up to the printed fleet cost on every table of a page."""
    return distribute_cents({"direct": direct_nanos, "idle": idle_nanos})


def _sums(rows: Iterable[CostRow], key: Callable[[CostRow], str]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in rows:
        sums[key(row)] = sums.get(key(row), 0) + (row.nanos or 0)
    return sums


@dataclass(frozen=True)
class Part:
    """A swatch, a name and an amount; `share` is of the whole fleet's cost."""

    key: str
    title: str
    css: str
    colour: str
    cents: int
    share: float

    @property
    def value(self) -> str:
        return cents_text(self.cents)


@dataclass(frozen=True)
class Headline:
    """Fleet cost = used + idle, to the cent; every list adds up to its total."""

    fleet_cents: int
    used_cents: int
    idle_cents: int
    used_share: float
    idle_share: float
    tenants: tuple[Part, ...]
    causes: tuple[Part, ...]
    tenant_count: int

    @property
    def bar(self) -> tuple[Part, ...]:
        return tuple(part for part in (*self.tenants, *self.causes) if part.cents > 0)


def _used(row: CostRow) -> bool:
    return not row.is_idle and row.line not in LENDING


def leading(rows: Sequence[CostRow]) -> list[str]:
    """The tenants with most use, largest first, at most LEADING_TENANTS."""
    used = _sums((row for row in rows if _used(row) and row.tenant != OTHERS), lambda row: row.tenant)
    return sorted(used, key=lambda slug: (-used[slug], slug))[:LEADING_TENANTS]


def headline(rows: Sequence[CostRow], hidden: int = 0) -> Headline | None:
    """None when no amount is known. `hidden` tenants with use are one in the rows, as OTHERS."""
    priced = [row for row in rows if row.nanos is not None]
    if not priced:
        return None
    used = _sums((row for row in priced if _used(row)), lambda row: row.tenant)
    idle = _sums((row for row in priced if row.is_idle), lambda row: row.line)
    fleet_nanos = sum(row.nanos or 0 for row in priced)
    fleet_cents = cents_of(fleet_nanos)
    top = split_cents(sum(used.values()), sum(idle.values()))
    first = leading(priced)
    grouped = {slug: used[slug] for slug in first}
    rest = [slug for slug in used if slug not in grouped]
    others = len(set(rest) - {OTHERS}) + hidden
    if others:
        grouped[OTHERS] = sum(used[slug] for slug in rest)
    tenant_cents, idle_cents = share_cents(top["direct"], grouped), share_cents(top["idle"], idle)

    def ratio(nanos: int) -> float:
        return nanos / fleet_nanos if fleet_nanos else 0.0

    tenants = [
        Part(
            slug,
            _others(others) if slug == OTHERS else slug,
            "fill-6" if slug == OTHERS else f"fill-{number + 1}",
            "var(--series-6)" if slug == OTHERS else f"var(--series-{number + 1})",
            tenant_cents[slug],
            ratio(nanos),
        )
        for number, (slug, nanos) in enumerate(grouped.items())
    ]
    causes = [
        Part(line, CAUSES[line].title, CAUSES[line].css, "transparent", idle_cents[line], ratio(nanos))
        for line, nanos in sorted(idle.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Headline(
        fleet_cents, top["direct"], top["idle"], ratio(sum(used.values())), ratio(sum(idle.values())), tuple(tenants),
        tuple(causes), len(first) + others,
    )  # fmt: skip


def _others(count: int) -> str:
    return f"{count:,} other" + ("s" if count > 1 else "")


@dataclass(frozen=True)
class IdleRow:
    """An idle cause with who answers for it and who bears its cost under the policy."""

    cause: Cause
    slot_us: int
    cents: int | None
    share: float | None
    borne: str

    @property
    def slot_hours(self) -> float:
        return self.slot_us / 3_600_000_000

    @property
    def value(self) -> str:
        return cents_text(self.cents)


def idle_rows(rows: Sequence[CostRow], top: Headline | None, fleet_nanos: int) -> list[IdleRow]:
    """Largest time first. The rows are all of idle time, by who bears it; `fleet_nanos` is what everything cost."""
    cents = {part.key: part.cents for part in top.causes} if top else {}
    found = []
    for line in {row.line for row in rows}:
        mine = [row for row in rows if row.line == line]
        nanos = sum(row.nanos or 0 for row in mine)
        known = line in cents
        share = nanos / fleet_nanos if known and fleet_nanos else None
        slot_us = sum(row.slot_us for row in mine)
        found.append(IdleRow(CAUSES[line], slot_us, cents.get(line), share, _borne(mine)))
    return sorted(found, key=lambda row: (-row.slot_us, row.cause.title))


def _borne(rows: Sequence[CostRow]) -> str:
    by_owner: dict[str, int] = {}
    for row in rows:
        by_owner[row.tenant] = by_owner.get(row.tenant, 0) + row.slot_us
    whole = sum(by_owner.values())
    ordered = sorted(by_owner, key=lambda slug: (-by_owner[slug], slug))
    if not whole or len(ordered) == 1:
        return ordered[0]
    split = distribute(100, {slug: Fraction(100 * us, whole) for slug, us in by_owner.items()})
    shown = [f"{slug} {split[slug]} %" for slug in ordered[:3]]
    left = sum(split[slug] for slug in ordered[3:])
    return ", ".join(shown) + (f", {len(ordered) - 3} more {left} %" if len(ordered) > 3 else "")


COLUMNS = ("direct", "idle", "lending", "cost", "charges", "margin")


@dataclass
class PivotRow:
    """A row of the pivot with its printed cents by column; `level` 0 tenant, 1 class, 2 pool."""

    key: str
    title: str
    level: int
    parent: str
    requests: int | None
    slot_us: int
    cents: dict[str, int] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)
    tenant: str = ""
    class_: str = ""
    pool: str = ""
    open: bool = False
    opened: bool = False

    @property
    def slot_hours(self) -> float:
        return self.slot_us / 3_600_000_000

    @property
    def values(self) -> list[str]:
        return [cents_text(self.cents[name], signed=name == "margin") for name in COLUMNS]


@dataclass(frozen=True)
class Pivot:
    """Rows in order, tenants by cost; the platform's and the total stand apart. Every column adds up as printed."""

    rows: tuple[PivotRow, ...]
    total: PivotRow


def unfold(table: Pivot, selected: str) -> None:
    """Open the row that leads to the selected one (`tenant/class/pool`), else the first tenant."""
    tenant, _, rest = selected.partition("/")
    opened = {tenant, f"{tenant}/{rest.partition('/')[0]}"} if selected else {row.key for row in table.rows[:1]}
    for row in table.rows:
        row.opened, row.open = row.key in opened, row.parent in opened


def pivot(rows: Sequence[CostRow], charged: Sequence[Charge], selected: str = "", hidden: int = 0) -> Pivot:
    """Tenant, class and pool with cost by kind, charges and margin; of many tenants the `selected` one and those that
    cost most, the others as one row. `hidden` of these are one already, as OTHERS.

    Each column is distributed by itself: over tenants, each tenant's over its classes, each of those over its pools.
    """
    cells, others = _folded(_cells(rows, charged), selected, hidden)
    nodes: dict[str, PivotRow] = {}
    nanos: dict[str, dict[str, int]] = {}
    total = PivotRow("total", "Fleet cost", 0, "", 0, 0)
    nanos["total"] = dict.fromkeys(COLUMNS, 0)
    for (tenant, class_, pool), cell in sorted(cells.items()):
        path = [(tenant,), (tenant, class_), (tenant, class_, pool)][: 1 if tenant == OTHERS else 3]
        titles = [_others(others) if tenant == OTHERS else tenant, class_ or "no class", pool]
        parent = total
        for level, names in enumerate(path):
            key = "/".join(names)
            if key not in nodes:
                nodes[key] = PivotRow(
                    key, titles[level], level, parent.key, 0, 0,
                    tenant=tenant, class_=class_ if level > 0 else "", pool=pool if level > 1 else "",
                )  # fmt: skip
                nanos[key] = dict.fromkeys(COLUMNS, 0)
                parent.children.append(key)
            parent = nodes[key]
        for key in ("total", *("/".join(names) for names in path)):
            row = total if key == "total" else nodes[key]
            row.requests = None if row.tenant == PLATFORM else (row.requests or 0) + cell.requests
            row.slot_us += cell.slot_us
            for name in COLUMNS:
                nanos[key][name] += cell.nanos[name]
    total.cents = {name: cents_of(amount) for name, amount in nanos["total"].items()}
    total.cents |= split_cents(nanos["total"]["direct"], nanos["total"]["idle"])
    total.cents["margin"] = total.cents["charges"] - total.cents["cost"]
    ordered: list[PivotRow] = []
    _spread(total, nodes, nanos, ordered)
    return Pivot(tuple(ordered), total)


def _spread(
    parent: PivotRow, nodes: Mapping[str, PivotRow], nanos: Mapping[str, Mapping[str, int]], ordered: list[PivotRow]
) -> None:
    if not parent.children:
        return
    for name in COLUMNS[:-1]:
        parts = share_cents(parent.cents[name], {key: nanos[key][name] for key in parent.children})
        for key, cents in parts.items():
            nodes[key].cents[name] = cents
    for key in parent.children:
        nodes[key].cents["margin"] = nodes[key].cents["charges"] - nodes[key].cents["cost"]
    # the platform is nobody's bill, so it stands last, after who is not shown alone; else by cost
    last = (OTHERS, PLATFORM)
    parent.children.sort(key=lambda key: (last.index(key) if key in last else -1, -nanos[key]["cost"], key))
    for key in parent.children:
        ordered.append(nodes[key])
        _spread(nodes[key], nodes, nanos, ordered)


@dataclass
class _Cell:
    requests: int = 0
    slot_us: int = 0
    nanos: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))


def _cells(rows: Sequence[CostRow], charged: Sequence[Charge]) -> dict[tuple[str, str, str], _Cell]:
    cells: dict[tuple[str, str, str], _Cell] = {}
    for row in rows:
        cell = cells.setdefault((row.tenant, row.class_, row.pool), _Cell())
        column = "idle" if row.is_idle else "lending" if row.line in LENDING else "direct"
        cell.slot_us += row.slot_us
        for name in (column, "cost"):
            cell.nanos[name] += row.nanos or 0
    for one in charged:
        cell = cells.setdefault((one.tenant, one.class_, one.pool), _Cell())
        cell.requests += one.requests
        cell.nanos["charges"] += one.nanos
    return cells


def _folded(
    cells: dict[tuple[str, str, str], _Cell], selected: str, hidden: int
) -> tuple[dict[tuple[str, str, str], _Cell], int]:
    """The cells with those of the tenants that are not shown alone as one, and how many tenants that is."""
    cost: dict[str, int] = {}
    for (tenant, _, _), cell in cells.items():
        if tenant not in (PLATFORM, OTHERS):
            cost[tenant] = cost.get(tenant, 0) + cell.nanos["cost"]
    if len(cost) + hidden <= TENANTS_SHOWN:
        return cells, 0
    shown = {PLATFORM, selected, *sorted(cost, key=lambda slug: (-cost[slug], slug))[:TENANTS_SHOWN]}
    found, rest = {}, _Cell()
    for key, cell in cells.items():
        if key[0] in shown:
            found[key] = cell
            continue
        rest.requests += cell.requests
        rest.slot_us += cell.slot_us
        for name in COLUMNS:
            rest.nanos[name] += cell.nanos[name]
    hidden += len(cost.keys() - shown)
    return ({**found, (OTHERS, "", ""): rest} if hidden else found), hidden


@dataclass(frozen=True)
class TimeTable:
    """Cost by day or hour: a column per leading tenant, the others, idle, total. Columns add up as printed."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    totals: tuple[str, ...]
    figure: Figure
    text: str


DAY_MS = 86_400_000
TICK_EACH_DAY_TO = 10


def time_table(
    labels: Sequence[str], cells: Iterable[tuple[str, str, str, int]], first: Sequence[str], *, unit: str, step: str
) -> TimeTable:
    """`cells` are (label, tenant, line, nanos); `first` the tenants with columns of their own."""
    names = [*first]
    sums: dict[str, dict[str, int]] = {}
    found = list(cells)
    if any(tenant not in first for _, tenant, line, _ in found if line not in IDLE_CAUSES and line not in LENDING):
        names.append("Others")
    names.append("Idle")
    for name in names:
        sums[name] = dict.fromkeys(labels, 0)
    for label, tenant, line, nanos in found:
        if line in LENDING:
            continue  # pairs that add up to nothing
        name = "Idle" if line in IDLE_CAUSES else tenant if tenant in first else "Others"
        sums[name][label] += nanos
    whole = {label: sum(sums[name][label] for name in names) for label in labels}
    by_name = {name: sum(sums[name].values()) for name in names}
    used = {name: nanos for name, nanos in by_name.items() if name != "Idle"}
    top = split_cents(sum(used.values()), by_name["Idle"])
    totals = {**share_cents(top["direct"], used), "Idle": top["idle"]}
    columns = {name: share_cents(totals[name], sums[name]) for name in names}
    columns["Total"] = share_cents(cents_of(sum(whole.values())), whole)
    rows = tuple((label, tuple(cents_text(columns[name][label]) for name in (*names, "Total"))) for label in labels)
    series = [
        Series(
            name,
            [sums[name][label] / NANOS_PER_UNIT for label in labels],
            "var(--unknown-edge)" if name == "Idle" else "var(--series-6)" if name == "Others" else "",
            "/" if name == "Idle" else "",
        )
        for name in names
    ]
    whole_cents = cents_of(sum(whole.values()))
    text = f"Cost by tenant per {step}: {format_cents(whole_cents)} {unit} in all, of which " + ", ".join(
        f"{name} {format_cents(totals[name])}" for name in names
    )
    printed = (*(cents_text(totals[name]) for name in names), cents_text(whole_cents))
    chart = stacked_bars(list(labels), series, unit=unit, decimals=2)
    if step == "day":
        # a tick is a day: of one or two days an axis of instants would show hours
        days = {"tickformat": "%-d %b", **({"dtick": DAY_MS} if len(labels) <= TICK_EACH_DAY_TO else {})}
        chart["layout"].setdefault("xaxis", {}).update(days)
    return TimeTable((*names, "Total"), rows, printed, chart, f"{text}.")


CHARGE_LINES = ("prompt", "cached", "output", "gpu")


@dataclass(frozen=True)
class StatementRow:
    """One class, model and rate version of a statement: quantities, and cents that add up down each column."""

    charge: Charge
    cents: Mapping[str, int]

    @property
    def values(self) -> list[str]:
        if self.charge.is_unpriced:
            return [DASH] * (len(CHARGE_LINES) + 1)
        return [cents_text(self.cents[name]) for name in (*CHARGE_LINES, "total")]


@dataclass(frozen=True)
class Statement:
    """A tenant's charges of a period; `total_nanos` is exact."""

    rows: tuple[StatementRow, ...]
    totals: Mapping[str, int]
    total_nanos: int
    requests: int

    @property
    def unpriced_requests(self) -> int:
        return sum(row.charge.requests for row in self.rows if row.charge.is_unpriced)

    @property
    def total_values(self) -> list[str]:
        return [cents_text(self.totals[name]) for name in (*CHARGE_LINES, "total")]


def statement(charged: Sequence[Charge]) -> Statement:
    """Rows of different pools are one row of the statement: a tenant is billed by class and model."""
    merged: dict[tuple[str, str, int], Charge] = {}
    for one in charged:
        key = (one.class_, one.model, one.rate_version)
        merged[key] = _plus(merged[key], one) if key in merged else one
    keys = {"/".join(map(str, key)): charge for key, charge in sorted(merged.items())}

    def amounts(name: str) -> dict[str, int]:
        return {key: one.nanos if name == "total" else getattr(one, f"{name}_nanos") for key, one in keys.items()}

    columns: dict[str, dict[str, int]] = {}
    whole = sum(one.nanos for one in charged)
    lines = {name: sum(amounts(name).values()) for name in CHARGE_LINES}
    totals = {**share_cents(cents_of(whole), lines), "total": cents_of(whole)}
    for name in (*CHARGE_LINES, "total"):
        columns[name] = share_cents(totals[name], amounts(name))
    rows = tuple(StatementRow(one, {name: columns[name][key] for name in columns}) for key, one in keys.items())
    return Statement(rows, totals, whole, sum(one.requests for one in charged))


def _plus(left: Charge, right: Charge) -> Charge:
    sums = {
        name: getattr(left, name) + getattr(right, name)
        for name in (
            "requests", "prompt_tokens", "cached_tokens", "output_tokens", "gpu_us", "prompt_nanos", "cached_nanos",
            "output_nanos", "gpu_nanos",
        )
    }  # fmt: skip
    return Charge(left.tenant, left.class_, left.model, left.pool, left.rate_version, **sums)
