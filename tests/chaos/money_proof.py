"""What must hold of money after any kill: the book says what the records say, and so do attribution and budgets."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

import psycopg

from controlplane.demo.settings import python
from controlplane.wire.report import FLAG_NOT_CHARGED
from tests.chaos.job_system import JobSystem
from tests.e2e.demo_run import ROOT

_CHARGE = "charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos"
#: Books the month's charges twice, as a close that was cut off and run again does.
_BOOK_CHARGES = """
import json
from django.utils import timezone
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.ledger.periods import post_charges
from controlplane.tenants.models import Installation
now = timezone.now()
window = window_at(load_zone(Installation.objects.get(pk=1).billing_zone), Calendar.MONTH, now)
events = [post_charges(window.label, window, now=now, created_by="chaos") for _ in range(2)]
print(json.dumps([event.key if event else None for event in events]))
"""


@dataclass(frozen=True)
class Money:
    """Sums in nanos: what the fleet cost, and what was charged."""

    cost_nanos: int = 0
    charge_nanos: int = 0
    transfers: int = 0
    leases: int = 0

    def line(self) -> str:
        return (
            f"ledger: cost {self.cost_nanos:,} and charges {self.charge_nanos:,} nanos, as attribution and records say,"
            f" in {self.transfers:,} transfers; {self.leases:,} leases add up to their budgets"
        )


def check_money(system: JobSystem, database: psycopg.Connection) -> Money:
    """Raises AssertionError for what is lost or there twice."""
    attributed = json.loads(_run(system, "attribute_now", "--json"))
    cost = _check_cost(database)
    assert attributed["fleet"] == attributed["attributed"] == cost > 0
    first, second = json.loads(_run(system, "shell", "--no-imports", "-c", _BOOK_CHARGES))
    assert first is not None and second is None, "charges are booked once"
    charged = _check_charges(database)
    leases = _check_budgets(database)
    return Money(cost, charged, _number(database, "SELECT count(*) FROM ledger_transfer"), leases)


def _run(system: JobSystem, *arguments: str) -> str:
    done = subprocess.run(
        python("manage.py", *arguments), cwd=ROOT, env=system.environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _number(database: psycopg.Connection, sql: str, values: tuple[object, ...] = ()) -> int:
    row = database.execute(sql, values).fetchone()
    assert row is not None
    return int(row[0] or 0)


def _check_cost(database: psycopg.Connection) -> int:
    """Three ways to the fleet's cost; the book's lines are those of attribution, account by account."""
    lines = _number(database, "SELECT sum(amount_nanos) FROM ledger_attributionline")
    hours = _number(database, "SELECT sum(cost_nanos) FROM ledger_attributioninterval")
    assert lines == hours == _balance(database, "fleet", -1), "lines, pool hours and ledger differ"
    slot_time = "SELECT (SELECT sum(gpu_us) FROM ledger_attributionline) - (SELECT sum(owned_us) FROM %s)"
    assert _number(database, slot_time % "ledger_attributioninterval") == 0, "slot time is not tiled by its lines"
    return hours


def _balance(database: psycopg.Connection, kind: str, sign: int = 1) -> int:
    """Debits less credits of all accounts of a kind."""
    return sign * _number(
        database,
        "SELECT sum(CASE WHEN d.kind = %s THEN t.amount_nanos ELSE 0 END)"
        "     - sum(CASE WHEN c.kind = %s THEN t.amount_nanos ELSE 0 END)"
        " FROM ledger_transfer t JOIN ledger_account d ON d.id = t.debit_id"
        " JOIN ledger_account c ON c.id = t.credit_id",
        (kind, kind),
    )


def _check_charges(database: psycopg.Connection) -> int:
    charged = _number(database, f"SELECT sum({_CHARGE}) FROM usage_record WHERE flags & %s = 0", (FLAG_NOT_CHARGED,))
    assert _balance(database, "billed") == _balance(database, "revenue", -1) == charged > 0, "charges were booked wrong"
    return charged


def _check_budgets(database: psycopg.Connection) -> int:
    """Each window counts what its leases say: spent is settled, the rest of open ones is out on lease."""
    wrong = database.execute(
        "SELECT w.id, w.settled_nanos, w.leased_nanos, s.spent, s.open FROM budgets_budgetwindow w"
        " LEFT JOIN LATERAL (SELECT coalesce(sum(l.spent_nanos - l.waived_nanos), 0) AS spent,"
        "   coalesce(sum(l.amount_nanos - l.spent_nanos) FILTER (WHERE l.state = 'open'), 0) AS open"
        "   FROM budgets_leasewindow lw JOIN budgets_lease l ON l.id = lw.lease_id WHERE lw.window_id = w.id) s ON true"
        " WHERE w.settled_nanos <> s.spent OR w.leased_nanos <> s.open"
        "    OR (w.hard AND w.settled_nanos + w.leased_nanos > w.limit_nanos)"
    ).fetchall()
    assert wrong == [], "windows and leases disagree"
    return _number(database, "SELECT count(*) FROM budgets_lease")
