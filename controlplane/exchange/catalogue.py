"""What exists, for the validation of reports: read at most every few seconds, sooner when an unknown id comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec
from psycopg import Cursor

from controlplane.usage.validation import Card, ClassFacts, Known, Members

MAX_AGE_S = 5.0
RELOAD_PAUSE_S = 0.25


class _TenantId(msgspec.Struct):
    id: int


class _Bundle(msgspec.Struct):
    """The ids in a policy document; the rest of it is skipped."""

    tenants: list[_TenantId]
    classes: list[_TenantId]


_bundle_decoder = msgspec.json.Decoder(_Bundle)


@dataclass
class _Cached:
    known: Known
    read_at: float


class Catalogue:
    """`Known` per database, with the members of revisions kept for good: a revision never changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._cached: dict[str, _Cached] = {}
        self._members: dict[tuple[str, int, int], Members] = {}

    def known(self, cursor: Cursor[Any], revisions: set[tuple[int, int]], *, fresh: bool = False) -> Known:
        """What exists; `revisions` are the (pool id, revision) pairs that will be asked for.

        `fresh` asks for a new reading, which is given at most every RELOAD_PAUSE_S.
        """
        name = cursor.connection.info.dbname
        with self._lock:
            cached = self._cached.get(name)
            age = self._clock() - cached.read_at if cached else float("inf")
            if cached is None or age > MAX_AGE_S or (fresh and age > RELOAD_PAUSE_S):
                cached = _Cached(_read(cursor), self._clock())
                self._cached[name] = cached
            self._read_members(cursor, name, revisions)
        known = cached.known
        known.members = lambda pool_id, revision: self._members.get((name, pool_id, revision))
        return known

    def serves(self, cursor: Cursor[Any], revisions: set[tuple[int, int]], tenant_id: int) -> bool:
        """Whether a tenant is a member in one of some (pool id, revision) pairs; true where none of them exists."""
        name = cursor.connection.info.dbname
        with self._lock:
            self._read_members(cursor, name, revisions)
            found = [self._members[(name, *pair)] for pair in revisions if (name, *pair) in self._members]
        return not found or any(tenant_id in members.tenants for members in found)

    def forget(self) -> None:
        """Reads everything again at the next use."""
        with self._lock:
            self._cached.clear()
            self._members.clear()

    def _read_members(self, cursor: Cursor[Any], name: str, revisions: set[tuple[int, int]]) -> None:
        missing = sorted(pair for pair in revisions if (name, *pair) not in self._members and _fits(pair))
        if not missing:
            return
        cursor.execute(
            "SELECT b.pool_id, b.revision_id, b.body FROM policy_policybundle b"
            " JOIN unnest(%s::int[], %s::int[]) AS r (pool_id, revision) ON b.pool_id = r.pool_id"
            " AND b.revision_id = r.revision",
            ([pool_id for pool_id, _ in missing], [revision for _, revision in missing]),
        )
        for pool_id, revision, body in cursor.fetchall():
            document = _bundle_decoder.decode(bytes(body))
            self._members[(name, pool_id, revision)] = Members(
                tenants=frozenset(row.id for row in document.tenants),
                classes=frozenset(row.id for row in document.classes),
            )


def _fits(pair: tuple[int, int]) -> bool:
    return 0 < pair[1] < 2**31


def _read(cursor: Cursor[Any]) -> Known:
    def rows(sql: str) -> list[tuple[Any, ...]]:
        cursor.execute(sql)
        return cursor.fetchall()

    return Known(
        slot_pools=dict(rows("SELECT id, pool_id FROM fleet_slot")),
        tenants=frozenset(row[0] for row in rows("SELECT id FROM tenants_tenant")),
        classes={
            row[0]: ClassFacts(row[1], row[2])
            for row in rows("SELECT id, slug, kind = 'batch' FROM contracts_workloadclass")
        },
        models=frozenset(row[0] for row in rows("SELECT id FROM fleet_servedmodel")),
        cards={
            row[0]: Card(*row[1:])
            for row in rows(
                "SELECT id, class_slug, model_id, prompt_nanos_per_mtok, cached_nanos_per_mtok, output_nanos_per_mtok,"
                " gpu_nanos_per_slot_hour, discount_ppm FROM ledger_ratecard"
            )
        },
        contract_versions=frozenset(row[0] for row in rows("SELECT id FROM contracts_contractversion")),
    )


catalogue = Catalogue()
