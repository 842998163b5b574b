"""Balances of a book of ten million transfers: folded sums and the tail since, beside plain sums over all transfers.

    python -m benchmarks.ledger [--quick] [--transfers N] [--rounds N] [--json FILE]

Events and transfers of twelve months are copied into the book's own tables, folded by the code that does so each
minute, and a tail is left unfolded. Every account's balance must be the same both ways. Uses a database of its own on
the server of `DATABASE_URL`, or on a throwaway server. Exit 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.ingest import benchmark_django

GOAL_PERIOD, GOAL_ALL = 10.0, 10.0
MONTHS = [f"2026-{month:02d}" for month in range(1, 13)]
TENANTS, CLASSES, LINES, POOLS = 200, ("chat", "bulk", "embed"), ("direct", "lent_unused", "flex_not_lent"), 12
PER_EVENT = 20
TAIL = 2_400
"""What a hundred pools post in a minute: the worker folds once a minute."""
FIRST = datetime(2026, 1, 1, tzinfo=UTC)

_PLAIN = """
SELECT account_id, sum(debit)::bigint, sum(credit)::bigint FROM (
    SELECT debit_id AS account_id, amount_nanos AS debit, 0::bigint AS credit FROM ledger_transfer {limit}
    UNION ALL SELECT credit_id, 0, amount_nanos FROM ledger_transfer {limit}
) moved GROUP BY account_id
"""

_FILL = """
INSERT INTO ledger_transfer (id, event_id, debit_id, credit_id, amount_nanos, period)
SELECT n + 1, event + 1, CASE WHEN forth THEN owner ELSE fleet END, CASE WHEN forth THEN fleet ELSE owner END, amount,
       to_char((%(first)s::timestamptz + interval '365 days' * (event::float8 / %(events)s)) AT TIME ZONE 'UTC',
               'YYYY-MM')
FROM (
    SELECT n, event, 1 + event %% %(pools)s AS fleet, %(pools)s + 1 + floor(random() * %(owners)s)::int AS owner,
           random() < 0.98 AS forth, 1 + floor(random() * 9999999999)::bigint AS amount
    FROM (SELECT n, least(n / %(per)s, %(events)s - 1) AS event FROM generate_series(0, %(transfers)s - 1) n) numbered
) chosen
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer transfers, for a look")
    parser.add_argument("--transfers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transfers = options.transfers or (1_000_000 if options.quick else 10_000_000)
    with benchmark_django():
        table = measure(transfers, options.rounds or (3 if options.quick else 5))
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    return 0 if table["period"] >= GOAL_PERIOD and table["all"] >= GOAL_ALL else 1


def measure(transfers: int, rounds: int) -> dict[str, Any]:
    from django.core.management import call_command

    from controlplane.ledger.posting import trial_balance

    call_command("migrate", verbosity=0)
    began = time.perf_counter()
    fill(transfers)
    filled = time.perf_counter() - began
    began = time.perf_counter()
    fold_through(transfers - TAIL)
    folded = time.perf_counter() - began
    month = MONTHS[-1]
    ways: dict[str, Callable[[], Any]] = {
        "plain_period": lambda: plain(month),
        "period": lambda: trial_balance(month),
        "plain_all": lambda: plain(None),
        "all": lambda: trial_balance(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            answers[name] = way()
            if number:
                seconds[name].append(time.perf_counter() - began)
    for name in ("period", "all"):
        if answers[f"plain_{name}"] != by_account(answers[name]):
            raise SystemExit(f"the balances of {name} differ from plain sums")
        if not answers[name].balanced:
            raise SystemExit("debits and credits differ")
    return {
        "transfers": transfers,
        "tail": TAIL,
        "accounts": len(answers["all"].rows),
        "rounds": rounds,
        "fill_s": filled,
        "fold_s": folded,
        **{f"{name}_s": statistics.median(spent) for name, spent in seconds.items()},
        "period": statistics.median(seconds["plain_period"]) / statistics.median(seconds["period"]),
        "all": statistics.median(seconds["plain_all"]) / statistics.median(seconds["all"]),
        "post_ms": post_ms(),
    }


def fill(transfers: int) -> None:
    """A year of attribution: a pool hour's event moves cost from its fleet account to tenants' and platform's lines."""
    from django.db import connection

    codes = [f"fleet:pool-{number}" for number in range(POOLS)]
    codes += [f"tenant:t{n}:{class_}:{line}" for n in range(TENANTS) for class_ in CLASSES for line in LINES]
    with connection.cursor() as cursor:
        # keys to other tables are checked once at the end, which an owner may ask for without being a superuser
        cursor.execute(
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE conrelid = 'ledger_transfer'::regclass AND contype = 'f'"
        )
        keys = cursor.fetchall()
        for name, _ in keys:
            cursor.execute(f'ALTER TABLE ledger_transfer DROP CONSTRAINT "{name}"')
        cursor.execute(
            "SELECT indexname, indexdef FROM pg_indexes"
            " WHERE tablename = 'ledger_transfer' AND indexname NOT LIKE '%pkey'"
        )
        indexes = cursor.fetchall()
        for name, _ in indexes:
            cursor.execute(f'DROP INDEX "{name}"')
        with cursor.copy(
            "COPY ledger_account (id, code, kind, tenant_slug, class_slug, pool_slug, line) FROM STDIN"
        ) as copy:
            for number, code in enumerate(codes, start=1):
                copy.write_row((number, code, code.split(":")[0], "", "", "", ""))
        with cursor.copy(
            "COPY ledger_ledgerevent (id, key, kind, digest, posted_at, period, source, reason, created_by) FROM STDIN"
        ) as copy:
            for number in range(transfers // PER_EVENT):
                at = FIRST + timedelta(days=365) * number / (transfers // PER_EVENT)
                source = f"attribution:pool-{number % POOLS}:{number}"
                copy.write_row((number + 1, f"{source}#1", "attribution", "", at, f"{at:%Y-%m}", source, "", "bench"))
        cursor.execute("SELECT setseed(0.7)")
        cursor.execute(
            _FILL,
            {"transfers": transfers, "events": transfers // PER_EVENT, "per": PER_EVENT, "pools": POOLS,
             "owners": len(codes) - POOLS, "first": FIRST},
        )  # fmt: skip
        for _, definition in indexes:
            cursor.execute(definition)
        for name, definition in keys:
            cursor.execute(f'ALTER TABLE ledger_transfer ADD CONSTRAINT "{name}" {definition}')
        for table in ("ledger_account", "ledger_ledgerevent", "ledger_transfer"):
            cursor.execute(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), max(id)) FROM {table}")
        cursor.execute("VACUUM ANALYZE")


def fold_through(last: int) -> None:
    """Folds as the worker does, up to a transfer; what comes after it is the tail that a reader adds."""
    from controlplane.ledger import balance_sums

    whole = balance_sums._highest_settled
    balance_sums._highest_settled = lambda: last
    try:
        while balance_sums.fold_balances(datetime.now(UTC)):
            pass
    finally:
        balance_sums._highest_settled = whole


def plain(month: str | None) -> dict[int, tuple[int, int]]:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(_PLAIN.format(limit="WHERE period = %(month)s" if month else ""), {"month": month})
        return {account: (debit, credit) for account, debit, credit in cursor.fetchall()}


def by_account(trial: Any) -> dict[int, tuple[int, int]]:
    from controlplane.ledger.models import Account

    ids = dict(Account.objects.values_list("code", "id"))
    return {ids[row.code]: (row.debit_nanos, row.credit_nanos) for row in trial.rows}


def post_ms(count: int = 200) -> float:
    """Milliseconds of one posting of twenty lines into the full book, all checks on."""
    from controlplane.ledger.posting import PostingLine, fleet_account, owner_account, post
    from controlplane.tenants.models import Installation

    Installation.objects.get_or_create(pk=1, defaults={"name": "Bench"})
    fleet = fleet_account("pool-0")
    owners = [owner_account(f"t{number}", "chat", "direct") for number in range(PER_EVENT)]
    began = time.perf_counter()
    for number in range(count):
        lines = [PostingLine(owner, fleet, 1 + place) for place, owner in enumerate(owners)]
        post(f"bench:{number}", "attribution", lines, at=FIRST, now=FIRST, created_by="bench")
    return (time.perf_counter() - began) / count * 1000


def print_table(table: dict[str, Any]) -> None:
    say = sys.stdout.write
    say(
        f"{table['transfers']:,} transfers between {table['accounts']:,} accounts, {table['tail']:,} of them not folded"
    )
    say(f"; filled in {table['fill_s']:.0f} s, folded in {table['fold_s']:.1f} s\n\n")
    say(f"{'balances of all accounts':28} {'plain sums':>12} {'the book':>12} {'ratio':>8} {'goal':>6}\n")
    for name, goal in (("period", GOAL_PERIOD), ("all", GOAL_ALL)):
        label = "one month" if name == "period" else "twelve months"
        say(
            f"{label:28} {table[f'plain_{name}_s'] * 1000:>9.1f} ms {table[f'{name}_s'] * 1000:>9.1f} ms"
            f" {table[name]:>8.1f} {goal:>6.0f}\n"
        )
    say(f"one posting of {PER_EVENT} lines into the full book: {table['post_ms']:.1f} ms\n")


if __name__ == "__main__":
    sys.exit(main())
