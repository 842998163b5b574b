"""The one door to the book: events of transfers, idempotent by key, and what the accounts hold.

Rows are added, never changed; the database refuses anything else. An event's key with the same lines again is the same
event; with other lines it is an error of the caller.
"""

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from django.db import connection, transaction

from controlplane.core.attribution import PLATFORM
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.ledger.models import Account, LedgerEvent, Period, Transfer
from controlplane.tenants.models import Installation


class AccountKind(StrEnum):
    """What an account stands for."""

    FLEET = "fleet"
    TENANT = "tenant"
    PLATFORM = "platform"
    PROVIDER = "provider"
    BILLED = "billed"
    REVENUE = "revenue"


class ConflictingLines(ValueError):
    """An event key was posted before with other lines: the caller must choose another key."""


@dataclass(frozen=True, slots=True)
class AccountRef:
    """An account by its meaning; the row is made when it is first posted to."""

    kind: AccountKind
    tenant: str = ""
    class_: str = ""
    pool: str = ""
    line: str = ""

    @property
    def code(self) -> str:
        """Readable and stable, such as `tenant:<slug>:<class>:<line>`; `account_ref` reads it back."""
        if self.kind is AccountKind.FLEET:
            return f"fleet:{self.pool}"
        if self.kind is AccountKind.PLATFORM:
            return f"platform:{self.class_}:{self.line}"
        if self.kind is AccountKind.PROVIDER:
            return f"provider:{self.line}"
        if self.kind is AccountKind.BILLED:
            return f"billed:{self.tenant}:{self.class_}"
        if self.kind is AccountKind.REVENUE:
            return f"revenue:{self.class_}"
        return f"tenant:{self.tenant}:{self.class_}:{self.line}"


def fleet_account(pool: str) -> AccountRef:
    """Where a pool's cost comes from; its balance is minus what was attributed."""
    return AccountRef(AccountKind.FLEET, pool=pool)


def owner_account(tenant: str, class_: str, line: str) -> AccountRef:
    """Who bears a line of cost: a tenant, or the platform."""
    if tenant == PLATFORM:
        return AccountRef(AccountKind.PLATFORM, class_=class_, line=line)
    return AccountRef(AccountKind.TENANT, tenant=tenant, class_=class_, line=line)


def account_ref(code: str) -> AccountRef:
    """The account of a code. Raises ValueError for a text that is none."""
    kind, _, rest = code.partition(":")
    parts = rest.split(":")
    names = {
        "fleet": ("pool",),
        "tenant": ("tenant", "class_", "line"),
        "platform": ("class_", "line"),
        "provider": ("line",),
        "billed": ("tenant", "class_"),
        "revenue": ("class_",),
    }.get(kind, ())
    if not names or len(parts) != len(names):
        raise ValueError(f"{code[:80]!r} is not the code of an account, such as tenant:acme:chat:direct")
    return AccountRef(AccountKind(kind), **dict(zip(names, parts, strict=True)))


@dataclass(frozen=True, slots=True)
class PostingLine:
    """`amount_nanos` moves from `credit` to `debit`; a negative amount moves the other way."""

    debit: AccountRef
    credit: AccountRef
    amount_nanos: int


@dataclass(frozen=True, slots=True)
class Source:
    """What an event accounts for; balances per source are the sum over its events."""

    name: str
    interval_start: datetime | None = None
    interval_end: datetime | None = None


NO_SOURCE = Source("")


def period_of(at: datetime, zone_name: str) -> str:
    """The month (YYYY-MM) of the billing zone that holds an instant."""
    return window_at(load_zone(zone_name), Calendar.MONTH, at).label


def post(
    event_key: str,
    kind: str,
    lines: Iterable[PostingLine],
    *,
    at: datetime,
    now: datetime,
    created_by: str,
    source: Source = NO_SOURCE,
    corrects: LedgerEvent | None = None,
    reason: str = "",
) -> LedgerEvent:
    """Book an event that happened `at`; the month of the billing zone that holds `at` is its period.

    When that month is closed, the event is an adjustment of the first open month after it and names what it corrects:
    `corrects`, else the last event of its source.
    The same key with the same lines returns the event that is there. Raises ConflictingLines for the same key with
    other lines, ValueError for a transfer between one and the same account or when no amount is left to move.
    """
    moves = _net(lines)
    if not moves:
        raise ValueError(f"event {event_key!r} moves nothing: every amount is zero")
    digest = _digest(kind, moves)
    zone = Installation.objects.values_list("billing_zone", flat=True).get(pk=1)
    with transaction.atomic():
        hold_open()
        happened_in = period_of(at, zone)
        period = open_period(happened_in)
        if period != happened_in:
            corrects = (
                corrects or LedgerEvent.objects.filter(source=source.name).exclude(source="").order_by("id").last()
            )
            reason = reason or f"{happened_in} is closed"
        event, created = LedgerEvent.objects.get_or_create(
            key=event_key,
            defaults={
                "kind": kind, "digest": digest, "posted_at": now, "period": period, "source": source.name,
                "interval_start": source.interval_start, "interval_end": source.interval_end, "corrects": corrects,
                "reason": reason, "created_by": created_by,
            },
        )  # fmt: skip
        if created:
            _write(event, moves)
    if event.digest != digest:
        raise ConflictingLines(
            f"event {event_key!r} was posted on {event.posted_at:%Y-%m-%d %H:%M} UTC with other lines: "
            "a correction is an event of its own, under another key"
        )
    return event


PERIOD_LOCK = 0x70657269
"""Posters hold it together, whoever closes a period or reads how far the book goes holds it alone."""


def hold_open() -> None:
    """No month is closed or opened until the transaction ends; other postings go on."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", [PERIOD_LOCK])


def hold_posting() -> None:
    """Waits for every posting under way and keeps others waiting until the transaction ends."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [PERIOD_LOCK])


def open_period(period: str) -> str:
    """The month itself when it is open, else the first open one after it."""
    closed = set(Period.objects.filter(name__gte=period, state=Period.State.CLOSED).values_list("name", flat=True))
    return first_open(period, closed)


def first_open(period: str, closed: Container[str]) -> str:
    """The same among months of which those that are closed are known."""
    while period in closed:
        year, month = int(period[:4]), int(period[5:])
        period = f"{year + month // 12:04d}-{month % 12 + 1:02d}"
    return period


Move = tuple[AccountRef, AccountRef, int]


def _net(lines: Iterable[PostingLine]) -> list[Move]:
    """One move per pair of accounts, positive, in the order of the accounts' codes."""
    sums: dict[tuple[AccountRef, AccountRef], int] = {}
    for line in lines:
        if line.debit == line.credit:
            raise ValueError(f"a transfer from {line.debit.code} to itself moves nothing")
        turned = line.debit.code > line.credit.code
        pair = (line.credit, line.debit) if turned else (line.debit, line.credit)
        sums[pair] = sums.get(pair, 0) + (-line.amount_nanos if turned else line.amount_nanos)
    moves = [(a, b, nanos) if nanos > 0 else (b, a, -nanos) for (a, b), nanos in sums.items() if nanos]
    return sorted(moves, key=lambda move: (move[0].code, move[1].code))


def _digest(kind: str, moves: Sequence[Move]) -> str:
    text = "\n".join([kind, *(f"{debit.code} {credit.code} {nanos}" for debit, credit, nanos in moves)])
    return hashlib.sha256(text.encode()).hexdigest()


def _write(event: LedgerEvent, moves: Sequence[Move]) -> None:
    ids = _account_ids({ref.code: ref for debit, credit, _ in moves for ref in (debit, credit)})
    Transfer.objects.bulk_create(
        Transfer(
            event=event,
            debit_id=ids[debit.code],
            credit_id=ids[credit.code],
            amount_nanos=nanos,
            period=event.period,
        )
        for debit, credit, nanos in moves
    )


def _account_ids(refs: Mapping[str, AccountRef]) -> dict[str, int]:
    known = _known_ids(refs)
    missing = [refs[code] for code in sorted(refs) if code not in known]
    if missing:
        # in the order of codes, so that two posters never wait for each other in a circle
        Account.objects.bulk_create([_row(ref) for ref in missing], ignore_conflicts=True)
        known = _known_ids(refs)
    return known


def _known_ids(codes: Iterable[str]) -> dict[str, int]:
    return dict(Account.objects.filter(code__in=list(codes)).values_list("code", "id"))


def _row(ref: AccountRef) -> Account:
    return Account(
        code=ref.code,
        kind=ref.kind,
        tenant_slug=ref.tenant or (PLATFORM if ref.kind is AccountKind.PLATFORM else ""),
        class_slug=ref.class_,
        pool_slug=ref.pool,
        line=ref.line,
    )


def posted_from(fleet: AccountRef, source: str) -> dict[str, int]:
    """What one source has moved from a fleet account so far: net nanos by the code of the other account, none zero."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT other.code, sum(moved.nanos)::bigint FROM (
                SELECT t.debit_id AS account_id, t.amount_nanos AS nanos, t.credit_id AS fleet_id
                FROM ledger_transfer t JOIN ledger_ledgerevent e ON e.id = t.event_id WHERE e.source = %(source)s
                UNION ALL
                SELECT t.credit_id, -t.amount_nanos, t.debit_id
                FROM ledger_transfer t JOIN ledger_ledgerevent e ON e.id = t.event_id WHERE e.source = %(source)s
            ) moved
            JOIN ledger_account other ON other.id = moved.account_id
            JOIN ledger_account fleet ON fleet.id = moved.fleet_id AND fleet.code = %(fleet)s
            GROUP BY other.code HAVING sum(moved.nanos) <> 0 ORDER BY other.code
            """,
            {"source": source, "fleet": fleet.code},
        )
        return dict(cursor.fetchall())


def posted_by_source(accounts: Mapping[str, AccountRef]) -> dict[str, int]:
    """What each source has moved from the account it is given with so far: net nanos by source, none zero."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT e.source, sum(CASE WHEN t.credit_id = a.id THEN t.amount_nanos ELSE -t.amount_nanos END)::bigint
            FROM unnest(%s::text[], %s::text[]) AS asked (source, code)
            JOIN ledger_account a ON a.code = asked.code
            JOIN ledger_ledgerevent e ON e.source = asked.source
            JOIN ledger_transfer t ON t.event_id = e.id AND a.id IN (t.debit_id, t.credit_id)
            GROUP BY 1 HAVING sum(CASE WHEN t.credit_id = a.id THEN t.amount_nanos ELSE -t.amount_nanos END) <> 0
            """,
            [[*accounts], [account.code for account in accounts.values()]],
        )
        return dict(cursor.fetchall())


@dataclass(frozen=True, slots=True)
class Balance:
    """What an account was debited and credited, in nanos; `balance_nanos` is debits less credits."""

    code: str
    kind: str
    debit_nanos: int
    credit_nanos: int

    @property
    def balance_nanos(self) -> int:
        return self.debit_nanos - self.credit_nanos


@dataclass(frozen=True, slots=True)
class TrialBalance:
    """Every account that moved; debits and credits of the whole are equal or the book is broken."""

    rows: tuple[Balance, ...]
    transfers: int

    @property
    def debit_nanos(self) -> int:
        return sum(row.debit_nanos for row in self.rows)

    @property
    def credit_nanos(self) -> int:
        return sum(row.credit_nanos for row in self.rows)

    @property
    def balanced(self) -> bool:
        return self.debit_nanos == self.credit_nanos

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all accounts and their balances: two books with equal balances have the same."""
        text = "\n".join(f"{row.code} {row.balance_nanos}" for row in self.rows if row.balance_nanos)
        return hashlib.sha256(text.encode()).hexdigest()


_TRIAL = """
WITH tail AS MATERIALIZED (
    SELECT debit_id, credit_id, amount_nanos, period FROM ledger_transfer
    WHERE id > (SELECT coalesce(max(through_id), 0) FROM ledger_balancefold)
      AND id <= (SELECT max(id) FROM ledger_transfer)
),
moved AS (
    SELECT account_id, debit_nanos AS debit, credit_nanos AS credit, debits FROM ledger_balancesum {limit}
    UNION ALL
    SELECT debit_id, amount_nanos, 0, 1 FROM tail {limit}
    UNION ALL
    SELECT credit_id, 0, amount_nanos, 0 FROM tail {limit}
), summed AS (
    SELECT account_id, sum(debit)::bigint AS debit, sum(credit)::bigint AS credit, sum(debits)::bigint AS debits
    FROM moved GROUP BY account_id
)
SELECT a.code, a.kind, s.debit, s.credit, s.debits
FROM summed s JOIN ledger_account a ON a.id = s.account_id ORDER BY a.code COLLATE "C"
"""


def trial_balance(period: str | None = None) -> TrialBalance:
    """All accounts with movements in a period (YYYY-MM), or ever: sums of what is folded and the transfers since.

    One statement sees sums, fold and transfers of one instant, so nothing is missed or counted twice.
    """
    limit = "WHERE period = %(period)s" if period else ""
    with connection.cursor() as cursor:
        cursor.execute(_TRIAL.format(limit=limit), {"period": period} if period else {})
        rows = cursor.fetchall()
    return TrialBalance(tuple(Balance(*row[:4]) for row in rows), sum(int(row[4]) for row in rows))


def booked_periods() -> list[str]:
    """Months that anything was posted in, newest first: those of the folded sums and of the transfers since."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT period FROM ledger_balancesum UNION SELECT period FROM ledger_transfer"
            " WHERE id > (SELECT coalesce(max(through_id), 0) FROM ledger_balancefold) ORDER BY 1 DESC"
        )
        return [period for (period,) in cursor.fetchall()]


def charged_through() -> datetime | None:
    """The end of the last day that charges are booked of; None when none are."""
    last = LedgerEvent.objects.filter(source__startswith="charges:").order_by("-source").first()
    return last.interval_end if last else None


def balances(period: str | None = None) -> dict[str, int]:
    """Account code -> debits less credits in nanos, of a period or of all time; accounts at zero are left out."""
    return {row.code: row.balance_nanos for row in trial_balance(period).rows if row.balance_nanos}
