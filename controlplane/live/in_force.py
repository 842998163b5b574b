"""Contracts with their versions in force: remembered by the rows that they are made of until one of them changes.

A thousand contracts are three thousand rows, and what is made of them takes a sixth of a page of everything, while they
change a few times a day. One statement reads which version of each row there is (`xmin` and `ctid`, which no two
versions of a row share): nothing here is told to be dropped, other rows are another key.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from typing import Final

from django.db import connection
from django.db.models import QuerySet

from controlplane.contracts.models import Contract
from controlplane.contracts.queries import Standing, standings

KEPT_MOST: Final = 2
CONTRACT_COLUMNS: Final = ("slug", "name", "workload_class_id", "tenant_id")

_ROWS = """
SELECT md5(string_agg(concat_ws(' ', kind, id, place, written_by), ',' ORDER BY kind, id)) FROM (
    SELECT 1 AS kind, id, ctid AS place, xmin AS written_by FROM contracts_contract
     UNION ALL SELECT 2, id, ctid, xmin FROM contracts_contractversion
     UNION ALL SELECT 3, id, ctid, xmin FROM contracts_workloadclass
     UNION ALL SELECT 4, id, ctid, xmin FROM tenants_tenant
                WHERE id IN (SELECT tenant_id FROM contracts_contract WHERE archived_at IS NULL)
) AS present
"""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Holds from `made_at` to the instant at which the next version comes into force, None while none is to come."""

    made_at: datetime
    until: datetime | None
    rows: list[Standing]


_kept: OrderedDict[str | None, _Kept] = OrderedDict()
_lock = Lock()


def in_force(now: datetime, contracts: QuerySet[Contract] | None = None) -> list[Standing]:
    """Contracts that are not archived (or those of them in `contracts`) with the version in force, by slug. They are
    shared: nobody changes them.
    """
    rows = _all(now)
    if contracts is None:
        return list(rows)
    wanted = set(contracts.order_by().values_list("pk", flat=True))
    return [row for row in rows if row.contract.pk in wanted]


def _all(now: datetime) -> list[Standing]:
    with connection.cursor() as cursor:
        cursor.execute(_ROWS)
        (key,) = cursor.fetchone()
    with _lock:
        kept = _kept.get(key)
    if kept is not None and kept.made_at <= now and (kept.until is None or now < kept.until):
        return kept.rows
    rows = _read(now)
    coming = [row.next.effective_from for row in rows if row.next is not None]
    with _lock:
        _kept[key] = _Kept(now, min(coming, default=None), rows)
        _kept.move_to_end(key)
        while len(_kept) > KEPT_MOST:
            _kept.popitem(last=False)
    return rows


def _read(now: datetime) -> list[Standing]:
    # Of a tenant what a row names, and each class once: whole ones are most of what a thousand contracts take.
    rows = Contract.objects.filter(archived_at=None).select_related("tenant").prefetch_related("workload_class")
    return standings(rows.only(*CONTRACT_COLUMNS, "tenant__slug", "tenant__name").order_by("slug"), now)
