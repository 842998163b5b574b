"""What a month's book says, as rows for files: cost by day and line from the transfers, charges from the usage.

Cost rows are those of the book, so that a month that is closed has the same ones for ever; a row of a correction names
the month that it corrects. They add up to what the owners of cost bear in that month, to the nano.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import date
from decimal import Decimal

from django.db import connection

from controlplane.core.money import US_PER_HOUR
from controlplane.core.period import Window, day_windows, load_zone
from controlplane.ledger.charging import billed_elsewhere
from controlplane.ledger.queries import charges
from controlplane.tenants.models import Tenant
from controlplane.web.exports import decimal_of_nanos

SLOT_HOUR_PLACES = Decimal("0.000001")


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One line of a month. Money is exact decimals of the book currency; None is what does not apply or is unknown.

    `kind` is attribution, variance, adjustment (cost), charge, or credit_note. `day` None: of the month as a whole.
    `corrects` names the earlier month that a correction is of. `slot_hours` are those known when the file was made.
    """

    period: str
    day: date | None
    kind: str
    corrects: str
    tenant: str
    tenant_name: str
    cost_centre: str
    class_: str
    pool: str
    model: str
    line: str
    rate_version: int | None
    slot_hours: Decimal | None
    requests: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    cost: Decimal | None
    charge: Decimal | None
    currency: str


COLUMNS = tuple(field.name.rstrip("_") for field in fields(ExportRow))

_COSTS = """
WITH moved AS (
    SELECT e.kind, e.period, e.interval_start, e.source, t.debit_id AS owner_id, t.credit_id AS other_id,
           t.amount_nanos AS nanos
    FROM ledger_transfer t JOIN ledger_ledgerevent e ON e.id = t.event_id WHERE t.period = %(period)s
    UNION ALL
    SELECT e.kind, e.period, e.interval_start, e.source, t.credit_id, t.debit_id, -t.amount_nanos
    FROM ledger_transfer t JOIN ledger_ledgerevent e ON e.id = t.event_id WHERE t.period = %(period)s
)
SELECT CASE WHEN m.kind = 'attribution' THEN (m.interval_start AT TIME ZONE %(zone)s)::date END AS day, m.kind,
       CASE WHEN m.kind = 'attribution' THEN '' ELSE left(split_part(m.source, ':', 2), 7) END AS concerns,
       owner.tenant_slug, owner.class_slug, other.pool_slug, owner.line, owner.kind AS owner_kind,
       sum(m.nanos)::bigint AS nanos
FROM moved m JOIN ledger_account owner ON owner.id = m.owner_id JOIN ledger_account other ON other.id = m.other_id
WHERE owner.kind IN ('tenant', 'platform', 'billed')
GROUP BY 1, 2, 3, 4, 5, 6, 7, 8 HAVING sum(m.nanos) <> 0
ORDER BY 1 NULLS LAST, 2, 3, 4, 5, 6, 7, 8
"""


@dataclass(frozen=True, slots=True)
class _Names:
    names: dict[str, str]
    centres: dict[str, str]


def export_rows(period: str, window: Window, zone: str, currency: str, *, closing: bool = False) -> Iterator[ExportRow]:
    """Cost rows by day, then what is billed; deterministic order. At a `closing` all that is billed is in the book."""
    tenants = list(Tenant.objects.values_list("slug", "name", "cost_centre"))
    names = _Names({slug: name for slug, name, _ in tenants}, {slug: centre for slug, _, centre in tenants})
    hours = _slot_hours(window, zone)
    with connection.cursor() as cursor:
        cursor.execute(_COSTS, {"period": period, "zone": zone})
        found = cursor.fetchall()
    corrected_charges: dict[tuple[str, str], int] = {}
    for day, kind, concerns, tenant, class_, pool, line, owner_kind, nanos in found:
        if owner_kind == "billed":
            if kind == "charges" and concerns == period:
                corrected_charges[tenant, class_] = corrected_charges.get((tenant, class_), 0) + nanos
                continue
            yield _row(
                period, None, "charge" if kind == "charges" else kind, concerns if concerns != period else "", tenant,
                class_, "", "", "", names, currency, charge=nanos,
            )  # fmt: skip
            continue
        corrects = day.isoformat()[:7] if day is not None and day.isoformat()[:7] != period else ""
        corrects = concerns if concerns and concerns != period else corrects
        slot_us = hours.get((day.isoformat(), pool, tenant, class_, line)) if day is not None and not corrects else None
        yield _row(
            period, day, kind, corrects, tenant, class_, pool, "", line, names, currency, cost=nanos, slot_us=slot_us
        )
    yield from _charge_rows(period, window, names, currency, corrected_charges if closing else None)


def _charge_rows(
    period: str, window: Window, names: _Names, currency: str, booked: dict[tuple[str, str], int] | None
) -> Iterator[ExportRow]:
    """Charges of usage, and in rows of their own what of it is billed in another month.

    That is what is beyond the `booked` at a closing, and before it what was booked elsewhere already.
    """
    seen: dict[tuple[str, str], int] = {}
    for one in charges(window.start, window.end):
        seen[one.tenant, one.class_] = seen.get((one.tenant, one.class_), 0) + one.nanos
        yield ExportRow(
            period, None, "charge", "", one.tenant, names.names.get(one.tenant, ""), names.centres.get(one.tenant, ""),
            one.class_, one.pool, one.model, "", one.rate_version or None,
            _hours(one.gpu_us), one.requests,
            one.prompt_tokens, one.cached_tokens, one.output_tokens, None, decimal_of_nanos(one.nanos), currency,
        )  # fmt: skip
    if booked is None:
        left = {key: -nanos for key, nanos in billed_elsewhere(period).items()}
    else:
        left = {key: booked.get(key, 0) - seen.get(key, 0) for key in seen.keys() | booked.keys()}
    for tenant, class_ in sorted(key for key, nanos in left.items() if nanos):
        yield _row(
            period, None, "billed_elsewhere", "", tenant, class_, "", "", "", names, currency,
            charge=left[tenant, class_],
        )  # fmt: skip


def _hours(us: int) -> Decimal:
    return (Decimal(us) / US_PER_HOUR).quantize(SLOT_HOUR_PLACES)


def _row(
    period: str, day: date | None, kind: str, corrects: str, tenant: str, class_: str, pool: str, model: str, line: str,
    names: _Names, currency: str, *, cost: int | None = None, charge: int | None = None, slot_us: int | None = None,
) -> ExportRow:  # fmt: skip
    return ExportRow(
        period, day, kind, corrects, tenant, names.names.get(tenant, ""), names.centres.get(tenant, ""), class_, pool,
        model, line, None, None if slot_us is None else _hours(slot_us), None, None, None, None,
        decimal_of_nanos(cost), decimal_of_nanos(charge), currency,
    )  # fmt: skip


def _slot_hours(window: Window, zone: str) -> dict[tuple[str, str, str, str, str], int]:
    days = day_windows(load_zone(zone), window.start, window.end)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT d.label, p.slug, l.tenant_slug, l.class_slug, l.line, sum(l.gpu_us)::bigint
            FROM unnest(%s::text[], %s::timestamptz[], %s::timestamptz[]) AS d (label, starts, ends)
            JOIN ledger_attributioninterval i ON i.starts_at >= d.starts AND i.starts_at < d.ends
            JOIN fleet_pool p ON p.id = i.pool_id JOIN ledger_attributionline l ON l.interval_id = i.id
            GROUP BY 1, 2, 3, 4, 5
            """,
            [[day.label for day in days], [day.start for day in days], [day.end for day in days]],
        )
        return {(day, pool, tenant, class_, line): us for day, pool, tenant, class_, line, us in cursor.fetchall()}


def row_count(period: str) -> int:
    """About how many rows an export of the month has: what decides whether it is a job."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM (SELECT DISTINCT (i.starts_at)::date, i.pool_id, l.tenant_slug, l.class_slug, l.line"
            " FROM ledger_attributionline l JOIN ledger_attributioninterval i ON i.id = l.interval_id"
            " WHERE i.starts_at >= %s::date AND i.starts_at < %s::date + interval '1 month') d",
            [f"{period}-01", f"{period}-01"],
        )
        return int(cursor.fetchone()[0])
