"""Balances that stay fast while the book grows: transfers are folded into sums by account and period, once each.

A reader adds the sums and the transfers after the last folded one. How far it is safe to fold is read while no posting
is under way: then every number up to the highest is committed or will never be.
"""

from datetime import datetime

from django.db import connection, transaction

from controlplane.ledger.models import BalanceFold
from controlplane.ledger.posting import hold_posting

FOLD_MOST = 500_000
"""Transfers of one fold: a book that was never folded is folded in pieces, so that no transaction is long."""

_FOLD = """
INSERT INTO ledger_balancesum (account_id, period, debit_nanos, credit_nanos, debits, credits)
SELECT account_id, period, sum(debit), sum(credit), sum(debits), sum(credits) FROM (
    SELECT debit_id AS account_id, period, amount_nanos AS debit, 0 AS credit, 1 AS debits, 0 AS credits
    FROM ledger_transfer WHERE id > %(after)s AND id <= %(through)s
    UNION ALL
    SELECT credit_id, period, 0, amount_nanos, 0, 1
    FROM ledger_transfer WHERE id > %(after)s AND id <= %(through)s
) moved GROUP BY account_id, period ORDER BY account_id, period
ON CONFLICT (account_id, period) DO UPDATE SET
    debit_nanos = ledger_balancesum.debit_nanos + excluded.debit_nanos,
    credit_nanos = ledger_balancesum.credit_nanos + excluded.credit_nanos,
    debits = ledger_balancesum.debits + excluded.debits, credits = ledger_balancesum.credits + excluded.credits
"""


def fold_balances(now: datetime) -> int:
    """Folds what is not folded yet, at most FOLD_MOST transfers a call; returns how many numbers it went over."""
    through = _highest_settled()
    BalanceFold.objects.get_or_create(pk=1)
    with transaction.atomic():
        row = BalanceFold.objects.select_for_update().get(pk=1)
        end = min(through, row.through_id + FOLD_MOST)
        if end <= row.through_id:
            return 0
        with connection.cursor() as cursor:
            cursor.execute(_FOLD, {"after": row.through_id, "through": end})
        folded = end - row.through_id
        row.through_id, row.folded_at = end, now
        row.save(update_fields=["through_id", "folded_at"])
    return folded


def _highest_settled() -> int:
    with transaction.atomic():
        hold_posting()
        with connection.cursor() as cursor:
            cursor.execute("SELECT coalesce(max(id), 0) FROM ledger_transfer")
            return int(cursor.fetchone()[0])
