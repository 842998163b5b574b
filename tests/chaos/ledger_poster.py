"""A process that posts events and folds balances until it is killed: `python -m tests.chaos.ledger_poster SEED EVENTS`.

Each event's lines follow from its number alone, so that whoever posts it again must find the same. Prints a line when
it begins and one with each event's number once `post` has returned.
"""

import random
import sys
import time
from datetime import UTC, datetime

FIRST = datetime(2026, 11, 1, tzinfo=UTC)
TENANTS = 6


def lines_of(number: int) -> list[tuple[int, int]]:
    """(tenant, nanos) of an event."""
    chance = random.Random(number)
    return [(tenant, chance.randrange(1, 10**9)) for tenant in chance.sample(range(TENANTS), 3)]


def post_event(number: int) -> None:
    from controlplane.ledger.posting import PostingLine, fleet_account, owner_account, post

    fleet = fleet_account(f"pool-{number % 3}")
    lines = [
        PostingLine(owner_account(f"t{tenant}", "chat", "direct"), fleet, nanos) for tenant, nanos in lines_of(number)
    ]
    post(f"chaos:{number}", "attribution", lines, at=FIRST, now=FIRST, created_by="chaos")


def main(seed: int, events: int) -> None:
    import django

    django.setup()
    from controlplane.ledger.balance_sums import fold_balances

    order = list(range(events))
    random.Random(seed).shuffle(order)
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    for place, number in enumerate(order):
        post_event(number)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        if place % 7 == 0:
            fold_balances(datetime.now(UTC))
    sys.stdout.write("done\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
