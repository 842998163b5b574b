"""What a tenant's statement shows beside its usage: as issued at a closing, and corrections of other months."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection

from controlplane.core.money import cents_of, share_cents
from controlplane.ledger.models import Period, StatementIssue
from controlplane.ledger.pages import cents_text
from controlplane.ledger.queries import cost_by_tenant
from controlplane.ledger.ranges import FinanceRange
from controlplane.tenants.models import Tenant
from controlplane.usage.queries import Scope, charges_by_tenant

KIND_TITLES = {
    "charge": "Usage",
    "charges": "Late usage",
    "credit_note": "Credit note",
    "billed_elsewhere": "Billed in another month",
}


@dataclass(frozen=True)
class IssuedLine:
    """A line as it was issued; `value` in cents that add up to the printed total."""

    title: str
    class_: str
    model: str
    rate_version: int | None
    requests: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    value: str


@dataclass(frozen=True)
class Issued:
    """A statement of a closing. `method` says how idle cost was spread, for each pool that had a share in it."""

    number: str
    supersedes: str
    version: int
    closed_at: datetime
    reason: str
    total: str
    total_nanos: int
    lines: tuple[IssuedLine, ...]
    method: str


@dataclass(frozen=True, slots=True)
class Billed:
    """What a tenant is billed in a span, and its part of the fleet's cost; nanos, as summed and not yet rounded."""

    tenant_id: int
    slug: str
    requests: int
    charge_nanos: int
    cost_nanos: int

    @property
    def place(self) -> tuple[int, str]:
        """Most first."""
        return (-self.charge_nanos, self.slug)


def billed(shown: FinanceRange) -> list[Billed]:
    """Of every tenant, most first; four statements that group by tenant alone."""
    charged = charges_by_tenant(Scope(shown.window.start, shown.window.end))
    costs = cost_by_tenant(shown.days)
    found = []
    for pk, slug in Tenant.objects.values_list("pk", "slug"):
        row = charged.get(pk)
        found.append(Billed(pk, slug, row.requests if row else 0, row.nanos if row else 0, costs.get(slug, 0)))
    return sorted(found, key=lambda row: row.place)


def statement_number(tenant: str, number: int) -> str:
    """The number as printed: the tenant's slug and a count without gaps."""
    return f"{tenant.upper()}-{number:06d}"


def issued(tenant: str, period: str) -> Issued | None:
    """The statement of a closed month; None while the month is open, or when the tenant had nothing in it."""
    row = Period.objects.filter(name=period, state=Period.State.CLOSED).first()
    if row is None:
        return None
    found = StatementIssue.objects.select_related("version").filter(
        version__period=row, version__version=row.version, tenant_slug=tenant
    )
    issue = found.first()
    if issue is None:
        return None
    version = issue.version
    return Issued(
        statement_number(tenant, issue.number),
        statement_number(tenant, issue.supersedes) if issue.supersedes else "",
        version.version, version.closed_at, version.reason, cents_text(cents_of(issue.charge_nanos)),
        issue.charge_nanos, _lines(issue.lines, issue.charge_nanos), _method(version.methods),
    )  # fmt: skip


def _lines(rows: Sequence[Mapping[str, Any]], total_nanos: int) -> tuple[IssuedLine, ...]:
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["kind"], row["corrects"], row["class"], row["model"], row["rate_version"])
        into = merged.setdefault(key, dict.fromkeys(_SUMMED))
        for name in _SUMMED:
            if row[name] is not None:
                into[name] = (into[name] or 0) + row[name]
    keys = {str(number): key for number, key in enumerate(sorted(merged, key=str))}
    cents = share_cents(cents_of(total_nanos), {n: merged[key]["charge_nanos"] or 0 for n, key in keys.items()})
    return tuple(
        IssuedLine(
            _title(key[0], key[1]), key[2], key[3], key[4], merged[key]["requests"], merged[key]["prompt_tokens"],
            merged[key]["cached_tokens"], merged[key]["output_tokens"], cents_text(cents[number]),
        )
        for number, key in keys.items()
    )  # fmt: skip


_SUMMED = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "charge_nanos")


def _title(kind: str, corrects: str) -> str:
    title = KIND_TITLES.get(kind, kind)
    return f"{title} of {corrects}" if corrects else title


def _method(methods: Sequence[Mapping[str, Any]]) -> str:
    by_pool: dict[str, list[str]] = {}
    for row in methods:
        by_pool.setdefault(row["pool"], []).append(row["method"])
    return ", ".join(f"{pool}: {' then '.join(names)}" for pool, names in sorted(by_pool.items()))


@dataclass(frozen=True)
class Correction:
    """What a month bills beside its own usage: late usage of a closed month, a credit note."""

    title: str
    class_: str
    reason: str
    nanos: int
    at: datetime


def corrections(tenant: str, period: str) -> list[Correction]:
    """Movements of what a tenant is billed in a month that are not that month's usage, oldest first."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT e.kind, left(split_part(e.source, ':', 2), 7), a.class_slug, e.reason, e.posted_at,
                   CASE WHEN t.debit_id = a.id THEN t.amount_nanos ELSE -t.amount_nanos END
            FROM ledger_account a JOIN ledger_transfer t ON t.debit_id = a.id OR t.credit_id = a.id
            JOIN ledger_ledgerevent e ON e.id = t.event_id
            WHERE a.kind = 'billed' AND a.tenant_slug = %(tenant)s AND t.period = %(period)s
              AND NOT (e.kind = 'charges' AND left(split_part(e.source, ':', 2), 7) = %(period)s)
            ORDER BY e.id
            """,
            {"tenant": tenant, "period": period},
        )
        rows = cursor.fetchall()
    return [
        Correction(_title(kind, concerns if concerns != period else ""), class_, reason, nanos, at)
        for kind, concerns, class_, reason, at, nanos in rows
    ]
