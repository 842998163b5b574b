"""An agent's part of a budget without its engines: `python -m tests.chaos.lease_spender AGENT EPOCH TENANT SEED`.

Asks for leases, spends of them and settles, in transactions of its own, until it is killed. It says what it has spent
only after the transaction has committed, as an agent knows its spending only from what it was granted.
"""

import random
import sys
from datetime import UTC, datetime


def main(agent: int, epoch: int, tenant: int, seed: int) -> None:
    import django

    django.setup()
    from controlplane.budgets.lease_settling import SpendReport, settle
    from controlplane.budgets.leases import Asking, acquire
    from controlplane.core.period import to_us
    from controlplane.exchange.database import connection
    from controlplane.wire.report import LeaseSpend

    chance, spent, told = random.Random(seed), {}, {}
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    while True:
        now = datetime.now(UTC)
        with connection() as held, held.transaction(), held.cursor() as cursor:
            granted = acquire(cursor, Asking(agent, epoch, tenant, chance.randrange(1, 60)), now)
        if granted.lease is not None:
            told[granted.lease.lease_id] = granted.lease
            sys.stdout.write("granted\n")
        for lease_id, lease in told.items():
            more = chance.randrange(0, 40)
            if to_us(now) <= lease.expires_us:
                spent[lease_id] = min(lease.amount_nanos, spent.get(lease_id, 0) + more)
        spends = [LeaseSpend(lease_id, nanos, 0) for lease_id, nanos in spent.items()]
        with connection() as held, held.transaction(), held.cursor() as cursor:
            settle(cursor, [SpendReport(agent, to_us(now), spends)], now)
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
