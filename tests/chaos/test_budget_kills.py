"""kill -9 of processes that lease and spend one budget while it is raised and lowered: sampled all along, not over."""

import os
import random
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
from django.conf import settings
from django.db import connection

from controlplane.audit.actors import Actor
from controlplane.budgets.increases import add_increase
from controlplane.budgets.lease_settling import close_epochs
from controlplane.budgets.models import Budget, BudgetIncrease, BudgetWindow, Lease
from controlplane.exchange.database import close_pools
from controlplane.exchange.database import connection as exchange_connection
from tests import factories

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPENDERS, KILLS, SEED = 4, 8, 20_261_130
GRANTED_WITHIN_S = 5.0
ADA = Actor(id=None, name="ada", role="finance")
# One statement sees windows, leases and limits of one instant.
_SAMPLE = """
SELECT w.settled_nanos, w.leased_nanos, w.limit_nanos, b.limit_nanos,
       (SELECT coalesce(sum(i.amount_nanos), 0) FROM budgets_budgetincrease i WHERE i.budget_id = b.id),
       coalesce(sum(l.spent_nanos), 0), coalesce(sum(l.amount_nanos - l.spent_nanos) FILTER (WHERE l.state = 'open'), 0)
FROM budgets_budgetwindow w JOIN budgets_budget b ON b.id = w.budget_id
LEFT JOIN budgets_leasewindow lw ON lw.window_id = w.id LEFT JOIN budgets_lease l ON l.id = lw.lease_id
GROUP BY w.id, b.id ORDER BY w.id
"""


def sample() -> int:
    """Checks every window; returns settled and leased of all together."""
    with connection.cursor() as cursor:
        cursor.execute(_SAMPLE)
        rows = cursor.fetchall()
    for settled, leased, limit, base, raised, spent, out in rows:
        assert settled + leased <= limit <= base + raised, "a hard limit was passed"
        assert (settled, leased) == (spent, out), "counters and leases differ"
    return sum(row[0] + row[1] for row in rows)


class Spender:
    """One process; a killed one comes back under the next epoch, and the old one is sealed."""

    def __init__(self, folder: Path, agent: int, tenant: int) -> None:
        self.folder, self.agent, self.tenant, self.epoch = folder, agent, tenant, 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        address = urlsplit(os.environ["DATABASE_URL"])
        environment = {
            **os.environ,
            "DATABASE_URL": urlunsplit(address._replace(path=f"/{connection.settings_dict['NAME']}")),
            "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
            "FLEXBAND_SIGNING_KEYS": str(settings.SIGNING_KEY_DIR),
            "FLEXBAND_VAR_DIR": str(self.folder),
        }
        self.log = self.folder / f"spender-{self.agent}-{self.epoch}.log"
        given = map(str, (self.agent, self.epoch, self.tenant, self.agent * 100 + self.epoch))
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.lease_spender", *given],
                cwd=Path(__file__).parents[2], env=environment, stdout=out, stderr=out,
            )  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert b"Traceback" not in self.log.read_bytes(), self.log.read_text()

    def seal(self) -> None:
        now = datetime.now(UTC)
        with exchange_connection() as held, held.transaction(), held.cursor() as cursor:
            close_epochs(cursor, [(self.agent, self.epoch)], now)


def test_killed_spenders_never_pass_a_limit_that_rises_and_falls(transactional_db, tmp_path, capsys):
    factories.installation()
    parent = factories.tenant("group")
    tenant = factories.tenant("acme", parent=parent)
    now = datetime.now(UTC)
    rows = [
        Budget.objects.create(
            tenant=owner, name=period, period=period, limit_nanos=limit, hard=True, created_at=now, updated_at=now
        )
        for owner, period, limit in ((tenant, "day", 3_000), (tenant, "month", 9_000), (parent, "week", 12_000))
    ]
    chance, samples, spenders = random.Random(SEED), 0, []
    try:
        spenders = [Spender(tmp_path, number + 1, tenant.pk) for number in range(SPENDERS)]
        for kill in range(KILLS):
            until = time.monotonic() + chance.uniform(0.5, 2.0)
            # Once the limits are used up, only what an increase allows is granted.
            given_up = until + GRANTED_WITHIN_S
            while time.monotonic() < until or not (
                time.monotonic() > given_up or any(b"granted" in one.log.read_bytes() for one in spenders)
            ):
                sample()
                samples += 1
                time.sleep(0.02)
            now = datetime.now(UTC)
            add_increase(
                budget_id=rows[kill % 2].pk, amount_nanos=chance.randrange(100, 900),
                ends_at=now + timedelta(seconds=2), reason="launch", actor=ADA, now=now,
            )  # fmt: skip
            victim = spenders[kill % SPENDERS]
            victim.kill()
            victim.seal()
            victim.start()
    finally:
        for one in spenders:
            one.process.kill()
            one.process.wait()
    for one in spenders:
        one.kill()
        one.seal()
    sample()
    close_pools()
    leased = BudgetWindow.objects.filter(budget=rows[0]).values_list("leased_nanos", flat=True)
    with capsys.disabled():
        print(f"\n  {KILLS} kills, {BudgetIncrease.objects.count()} increases, {samples} samples,"
              f" {Lease.objects.count()} leases: never over")  # fmt: skip
    assert list(leased) == [0] and Lease.objects.exists() and samples > KILLS
