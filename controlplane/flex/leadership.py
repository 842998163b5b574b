"""Who leads a shard: one row with a term and a lease of three seconds by the database's clock.

A holder that renews in time keeps its term; every other way in starts a new one. Writes name their term and are void
in the statement itself once it is over (`applying`), so a leader that was stopped and comes back changes nothing.
"""

import os
import re
import secrets
import socket
from dataclasses import dataclass

from django.db import connection

LEASE_S = 3
MAIN_SHARD = "main"

_HOLD_SQL = """
INSERT INTO flex_controllerterm AS held (shard, term, holder, expires_at)
VALUES (%(shard)s, 1, %(holder)s, clock_timestamp() + make_interval(secs => %(lease)s))
ON CONFLICT (shard) DO UPDATE SET
    term = held.term
        + CASE WHEN held.holder = EXCLUDED.holder AND held.expires_at > clock_timestamp() THEN 0 ELSE 1 END,
    holder = EXCLUDED.holder,
    expires_at = EXCLUDED.expires_at
WHERE held.holder = EXCLUDED.holder OR held.expires_at <= clock_timestamp()
RETURNING term
"""
_RELEASE_SQL = """
UPDATE flex_controllerterm SET expires_at = clock_timestamp()
WHERE shard = %(shard)s AND holder = %(holder)s AND term = %(term)s AND expires_at > clock_timestamp()
"""
_SHARD = re.compile(r"(\d{1,3})/(\d{1,3})")


@dataclass(frozen=True)
class Shard:
    """`main` is every pool; `2/4` the second of four parts (by pool id). Parts and `main` must not run side by side."""

    name: str = MAIN_SHARD
    part: int = 0
    parts: int = 1

    def has(self, pool_id: int) -> bool:
        return pool_id % self.parts == self.part


def read_shard(name: str) -> Shard:
    """The shard of a name. Raises ValueError that says which names there are."""
    if name == MAIN_SHARD:
        return Shard()
    match = _SHARD.fullmatch(name)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"{name!r} is no shard: use {MAIN_SHARD}, or N/M such as 1/2 for the first of two parts")
    return Shard(name, int(match[1]) - 1, int(match[2]))


def own_name() -> str:
    """A name for this process that no other has, nor this process after a restart."""
    return f"{socket.gethostname()[:60]}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass
class Leadership:
    """One process's claim on one shard; `term` is None while another leads."""

    shard: str
    holder: str
    term: int | None = None

    def hold(self) -> int | None:
        """Takes or renews the lease; returns the term, or None while another holder's lease runs."""
        with connection.cursor() as cursor:
            cursor.execute(_HOLD_SQL, {"shard": self.shard, "holder": self.holder, "lease": LEASE_S})
            row = cursor.fetchone()
        self.term = None if row is None else int(row[0])
        return self.term

    def release(self) -> None:
        """Ends the lease now, so that a standby need not wait for it."""
        if self.term is None:
            return
        with connection.cursor() as cursor:
            cursor.execute(_RELEASE_SQL, {"shard": self.shard, "holder": self.holder, "term": self.term})
        self.term = None
