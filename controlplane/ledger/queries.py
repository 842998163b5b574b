"""What finance reads: cost by day and line, its checks, charges from rollups, the events of an interval."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection
from django.db.models import QuerySet, Sum

from controlplane.core.idle_time import IdleCause
from controlplane.core.period import Window
from controlplane.fleet.models import Pool, ServedModel
from controlplane.ledger.attribution import source_of
from controlplane.ledger.attribution_input import Names, load_names
from controlplane.ledger.models import AttributionInterval, AttributionLine, LedgerEvent, RateCard
from controlplane.ledger.posting import booked_periods
from controlplane.usage.queries import Scope, totals
from controlplane.usage.retired_records import Ended, largest_records, retired_days

IDLE_CAUSES = tuple(str(cause) for cause in IdleCause)
LENDING = ("lend_price", "lend_income")
OTHERS = "~others"
"""Like `platform` no slug: the tenants that are not named alone, as one."""


@dataclass(frozen=True, slots=True)
class CostRow:
    """One line of cost of a day: `nanos` None where no rate was in force for any of it."""

    day: str
    pool: str
    tenant: str
    class_: str
    line: str
    slot_us: int
    nanos: int | None

    @property
    def is_idle(self) -> bool:
        return self.line in IDLE_CAUSES


_DAYS = "unnest(%s::text[], %s::timestamptz[], %s::timestamptz[]) AS d (label, starts, ends)"


def cost_rows(days: Sequence[Window], tenant: str | None = None) -> list[CostRow]:
    """Cost by local day, pool, tenant, class and line, in one statement; whole hours belong to one day each."""
    if not days:
        return []
    mine = "WHERE l.tenant_slug = %s" if tenant is not None else ""
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT d.label, p.slug, l.tenant_slug, l.class_slug, l.line, sum(l.gpu_us)::bigint,
                   sum(l.amount_nanos)::bigint
            FROM {_DAYS}
            JOIN ledger_attributioninterval i ON i.starts_at >= d.starts AND i.starts_at < d.ends
            JOIN fleet_pool p ON p.id = i.pool_id
            JOIN ledger_attributionline l ON l.interval_id = i.id {mine}
            GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
            """,  # noqa: S608 - constants
            [*_day_columns(days), *([tenant] if tenant is not None else [])],
        )
        return [CostRow(*row) for row in cursor.fetchall()]


@dataclass(frozen=True, slots=True)
class TenantCost:
    """All lines of a tenant (or `platform`) over a span; `used_nanos` without idle time and lending. None: no rate was
    in force for any of it.
    """

    tenant: str
    slot_us: int
    nanos: int | None
    used_nanos: int | None


@dataclass(frozen=True, slots=True)
class SpanCosts:
    """Every tenant's cost as one row, and what of it is idle time, by tenant and line."""

    tenants: list[TenantCost]
    idle: list[CostRow]


_BY_TENANT = """
  FROM ledger_attributioninterval i JOIN ledger_attributionline l ON l.interval_id = i.id
 WHERE i.starts_at >= %(since)s AND i.starts_at < %(until)s
"""
_SPAN = f"""
SELECT l.tenant_slug, NULL, sum(l.gpu_us)::bigint, sum(l.amount_nanos)::bigint,
       (sum(l.amount_nanos) FILTER (WHERE l.line <> ALL(%(unused)s)))::bigint {_BY_TENANT} GROUP BY 1
UNION ALL
SELECT l.tenant_slug, l.line, sum(l.gpu_us)::bigint, sum(l.amount_nanos)::bigint, NULL
{_BY_TENANT} AND l.line = ANY(%(idle)s) GROUP BY 1, 2 ORDER BY 1, 2
"""


def span_costs(days: Sequence[Window]) -> SpanCosts:
    """Of the days together, in one statement. Ten thousand tenants are ten thousand rows, whatever the number of days,
    pools, classes and lines that they have.
    """
    if not days:
        return SpanCosts([], [])
    unused = [*IDLE_CAUSES, *LENDING]
    with connection.cursor() as cursor:
        cursor.execute(
            _SPAN, {"since": days[0].start, "until": days[-1].end, "unused": unused, "idle": list(IDLE_CAUSES)}
        )
        rows = cursor.fetchall()
    return SpanCosts(
        [TenantCost(tenant, us, nanos, used) for tenant, line, us, nanos, used in rows if line is None],
        [CostRow("", "", tenant, "", line, us, nanos) for tenant, line, us, nanos, _ in rows if line is not None],
    )


def costs_of(tenants: Sequence[str], days: Sequence[Window]) -> list[CostRow]:
    """`cost_rows` of these tenants added up over the days, which are empty in them."""
    if not days:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT '', p.slug, l.tenant_slug, l.class_slug, l.line, sum(l.gpu_us)::bigint, sum(l.amount_nanos)::bigint
            FROM ledger_attributionline l
            JOIN ledger_attributioninterval i ON i.id = l.interval_id
            JOIN fleet_pool p ON p.id = i.pool_id
            WHERE l.tenant_slug = ANY(%s) AND i.starts_at >= %s AND i.starts_at < %s
            GROUP BY 2, 3, 4, 5 ORDER BY 2, 3, 4, 5
            """,
            [list(tenants), days[0].start, days[-1].end],
        )
        return [CostRow(*row) for row in cursor.fetchall()]


def day_costs(days: Sequence[Window], apart: Sequence[str]) -> list[tuple[str, str, str, int]]:
    """(day, tenant, line, nanos) by day; only the tenants that are to stand `apart` are named, the others are one: what
    all have but those, for the lines of all are added up without their tenants in a sixth of the time.
    """
    if not days:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH whole AS (
                SELECT l.interval_id, l.line, coalesce(sum(l.amount_nanos), 0) AS nanos, count(*) AS lines
                FROM ledger_attributioninterval i JOIN ledger_attributionline l ON l.interval_id = i.id
                WHERE i.starts_at >= %s AND i.starts_at < %s GROUP BY 1, 2
            ), apart AS MATERIALIZED (
                SELECT l.interval_id, l.tenant_slug, l.line, coalesce(sum(l.amount_nanos), 0) AS nanos,
                       count(*) AS lines
                FROM ledger_attributioninterval i JOIN ledger_attributionline l ON l.interval_id = i.id
                WHERE i.starts_at >= %s AND i.starts_at < %s AND l.tenant_slug = ANY(%s) GROUP BY 1, 2, 3
            ), parts AS (
                SELECT interval_id, tenant_slug, line, nanos, lines FROM apart
                UNION ALL SELECT interval_id, '', line, nanos, lines FROM whole
                UNION ALL SELECT interval_id, '', line, -nanos, -lines FROM apart
            )
            SELECT d.label, parts.tenant_slug, parts.line, sum(parts.nanos)::bigint
            FROM {_DAYS}
            JOIN ledger_attributioninterval i ON i.starts_at >= d.starts AND i.starts_at < d.ends
            JOIN parts ON parts.interval_id = i.id
            GROUP BY 1, 2, 3 HAVING sum(parts.lines) > 0 ORDER BY 1, 2, 3
            """,  # noqa: S608 - constants
            [*(days[0].start, days[-1].end) * 2, list(apart), *_day_columns(days)],
        )
        return cursor.fetchall()


def cost_by_tenant(days: Sequence[Window]) -> dict[str, int]:
    """Nanos by tenant (and `platform`) over the days of `cost_rows`; what had no rate adds nothing."""
    if not days:
        return {}
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT l.tenant_slug, coalesce(sum(l.amount_nanos), 0)::bigint
            FROM ledger_attributioninterval i JOIN ledger_attributionline l ON l.interval_id = i.id
            WHERE i.starts_at >= %s AND i.starts_at < %s
            GROUP BY 1
            """,
            [days[0].start, days[-1].end],
        )
        return dict(cursor.fetchall())


def _day_columns(days: Sequence[Window]) -> list[list[Any]]:
    return [[day.label for day in days], [day.start for day in days], [day.end for day in days]]


def hour_rows(window: Window) -> list[tuple[datetime, str, str, int, int | None]]:
    """(start of the hour, tenant, line, slot time, nanos) for charts of a day or two."""
    lines = AttributionLine.objects.filter(interval__starts_at__gte=window.start, interval__starts_at__lt=window.end)
    summed = lines.values_list("interval__starts_at", "tenant_slug", "line").annotate(
        us=Sum("gpu_us"), nanos=Sum("amount_nanos")
    )
    return list(summed.order_by("interval__starts_at", "tenant_slug", "line"))


def line_rows(window: Window, pool: str | None = None) -> Iterator[tuple[Any, ...]]:
    """Every line of every interval in the order of time, for exports: read in batches, never held as a whole."""
    lines = AttributionLine.objects.filter(interval__starts_at__gte=window.start, interval__starts_at__lt=window.end)
    if pool is not None:
        lines = lines.filter(interval__pool__slug=pool)
    columns = (
        "interval__starts_at", "interval__ends_at", "interval__pool__slug", "tenant_slug", "class_slug", "line",
        "gpu_us", "amount_nanos",
    )  # fmt: skip
    order = ("interval__starts_at", "interval__pool__slug", "tenant_slug", "class_slug", "line")
    yield from lines.order_by(*order).values_list(*columns).iterator(chunk_size=2_000)


@dataclass(frozen=True, slots=True)
class SlotFinding:
    """Something to look into at one slot, over all hours of the span; `interval_id` is the latest of them."""

    pool: str
    slot: str
    kind: str
    us: int
    minutes: int
    hours: int
    first: datetime
    last: datetime
    interval_id: int


@dataclass(frozen=True, slots=True)
class Checks:
    """Two more ways to the same cost, how far attribution has come and what to look into."""

    intervals: int
    intervals_nanos: int
    ledger_nanos: int
    owned_us: int
    unpriced_us: int
    posted_through: datetime | None
    open_intervals: int
    findings: tuple[SlotFinding, ...]


FINDINGS_SHOWN = 20
_FINDINGS = """
SELECT p.slug, f ->> 'slot', f ->> 'kind', sum((f ->> 'us')::bigint)::bigint, sum((f ->> 'minutes')::int)::int,
       count(DISTINCT i.id)::int, min(i.starts_at), max(i.starts_at), (array_agg(i.id ORDER BY i.starts_at DESC))[1]
FROM ledger_attributioninterval i JOIN fleet_pool p ON p.id = i.pool_id
CROSS JOIN LATERAL jsonb_array_elements(i.findings) AS f
WHERE i.starts_at >= %s AND i.starts_at < %s
GROUP BY 1, 2, 3 ORDER BY max(i.starts_at) DESC, 1, 2, 3
"""


def checks(window: Window) -> Checks:
    """Three statements: the intervals, the book, the findings."""
    span = [window.start, window.end]
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT count(*), coalesce(sum(cost_nanos), 0)::bigint, coalesce(sum(owned_us), 0)::bigint,
                   coalesce(sum(unpriced_us), 0)::bigint, max(ends_at), count(*) FILTER (WHERE NOT complete)
            FROM ledger_attributioninterval WHERE starts_at >= %s AND starts_at < %s
            """,
            span,
        )
        count, cost, owned, unpriced, through, unfinished = cursor.fetchone()
        cursor.execute(
            """
            SELECT coalesce(sum(CASE WHEN c.kind = 'fleet' THEN t.amount_nanos ELSE 0 END)
                          - sum(CASE WHEN d.kind = 'fleet' THEN t.amount_nanos ELSE 0 END), 0)::bigint
            FROM ledger_ledgerevent e JOIN ledger_transfer t ON t.event_id = e.id
            JOIN ledger_account d ON d.id = t.debit_id JOIN ledger_account c ON c.id = t.credit_id
            WHERE e.kind = 'attribution' AND e.interval_start >= %s AND e.interval_start < %s
            """,
            span,
        )
        (ledger,) = cursor.fetchone()
        cursor.execute(_FINDINGS, span)
        findings = tuple(SlotFinding(*row) for row in cursor.fetchall())
    return Checks(count, cost, ledger, owned, unpriced, through, unfinished, findings)


@dataclass(frozen=True, slots=True)
class Charge:
    """What a tenant is charged for a class and model at one version of the rates, from the sums of rounded charges."""

    tenant: str
    class_: str
    model: str
    pool: str
    rate_version: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_us: int
    prompt_nanos: int
    cached_nanos: int
    output_nanos: int
    gpu_nanos: int

    @property
    def nanos(self) -> int:
        return self.prompt_nanos + self.cached_nanos + self.output_nanos + self.gpu_nanos

    @property
    def is_unpriced(self) -> bool:
        """No rate card was in force for these requests: what they are to be charged is unknown, it is not zero."""
        return not self.rate_version and not self.nanos


def charges(
    since: datetime, until: datetime, tenant_ids: Sequence[int] | None = None, names: Names | None = None
) -> list[Charge]:
    """Charges of requests that ended in [since, until), open deltas included; five statements, three with `names`."""
    names = names or load_names()
    models = dict(ServedModel.objects.values_list("id", "name"))
    pools = dict(Pool.objects.values_list("id", "slug"))
    by = ("tenant_id", "class_id", "model_id", "pool_id", "rate_version")
    rows = [
        Charge(
            names.tenant(row.key["tenant_id"]),
            names.class_(row.key["class_id"]),
            models.get(row.key["model_id"], ""),
            pools.get(row.key["pool_id"], ""),
            row.key["rate_version"],
            row.requests,
            row.prompt_tokens,
            row.cached_tokens,
            row.output_tokens,
            row.gpu_us,
            row.charge_prompt_nanos,
            row.charge_cached_nanos,
            row.charge_output_nanos,
            row.charge_gpu_nanos,
        )
        for row in totals(Scope(since, until, tenant_ids=tenant_ids), by)
    ]
    return sorted(rows, key=lambda row: (row.tenant, row.class_, row.model, row.pool, row.rate_version))


def rate_cards(versions: Sequence[int]) -> dict[int, RateCard]:
    """Rate cards by their id, which is a record's `rate_version`."""
    return RateCard.objects.select_related("model").in_bulk(list(versions))


def interval_events(interval: AttributionInterval) -> QuerySet[LedgerEvent]:
    """Everything that was posted for an interval, oldest first, with transfers and accounts: three statements."""
    source = source_of(interval.pool, interval.starts_at)
    return (
        LedgerEvent.objects.filter(source=source)
        .order_by("id")
        .prefetch_related("transfers__debit", "transfers__credit")
    )


def periods() -> list[str]:
    """Months that anything was posted in, newest first."""
    return booked_periods()


def interval_at(pool: str, at: datetime) -> AttributionInterval | None:
    """The pool hour that an instant's cost is in; None while it was not attributed."""
    before = AttributionInterval.objects.filter(pool__slug=pool, starts_at__lte=at).order_by("-starts_at").first()
    return before if before is not None and at < before.starts_at + timedelta(hours=1) else None


REQUESTS_SHOWN = 100
_ARRIVED_WITHIN = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request's part in an hour: its share of GPU time and its charge."""

    request_id: UUID
    ended_at: datetime
    gpu_us: int
    prompt_tokens: int
    output_tokens: int
    charge_nanos: int


def retired_days_of(interval: AttributionInterval) -> list[date]:
    """The days whose records a pool hour's requests are read from files of."""
    return [row.day for row in retired_days(interval.starts_at, interval.ends_at + _ARRIVED_WITHIN)]


def hour_requests(interval: AttributionInterval, tenant: str, class_: str) -> list[RequestLine]:
    """The largest requests of a tenant and class that ended in a pool hour and arrived within a day of it.

    Retired days are read from their files; raises ArchiveChanged for one that is gone.
    """
    names = load_names()
    ids = ({slug: pk for pk, slug in names.tenants.items()}, {slug: pk for pk, slug in names.classes.items()})
    if tenant not in ids[0] or class_ not in ids[1]:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT request_id, ended_at, gpu_us, prompt_tokens, output_tokens,
                   charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos
            FROM usage_record
            WHERE received_at >= %s AND received_at < %s AND ended_at >= %s AND ended_at < %s AND pool_id = %s
              AND tenant_id = %s AND class_id = %s
            ORDER BY gpu_us DESC, request_id LIMIT %s
            """,
            [
                interval.starts_at, interval.ends_at + _ARRIVED_WITHIN, interval.starts_at, interval.ends_at,
                interval.pool_id, ids[0][tenant], ids[1][class_], REQUESTS_SHOWN,
            ],
        )  # fmt: skip
        kept = [RequestLine(*row) for row in cursor.fetchall()]
    wanted = Ended(interval.pool_id, ids[0][tenant], ids[1][class_], interval.starts_at, interval.ends_at)
    retired = largest_records(wanted, interval.ends_at + _ARRIVED_WITHIN, REQUESTS_SHOWN)
    lines = [*kept, *(RequestLine(*row) for row in retired)]
    return sorted(lines, key=lambda line: (-line.gpu_us, line.request_id))[:REQUESTS_SHOWN]
