"""Who leads a shard: one row with a term and a lease of three seconds by the database's clock.

A holder that renews in time keeps its term; every other way in starts a new one. Writes name their term and are void
in the statement itself once it is over (`applying`), so a leader that was stopped and comes back changes nothing.
"""

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from django.db import connection

LEASE_S = 3
KEEP_EVERY_S = 1.0
MAIN_SHARD = "main"

#: A transaction that need not be on disk when it returns: what a tick writes after it takes it along, and where a crash
#: undoes it, nothing had followed from it yet.
LAZY_SQL = "(SELECT set_config('synchronous_commit', 'off', TRUE)) AS lazy"
_HOLD_SQL = f"""
INSERT INTO flex_controllerterm AS held (shard, term, holder, expires_at)
SELECT %(shard)s, 1, %(holder)s, clock_timestamp() + make_interval(secs => %(lease)s) FROM {LAZY_SQL}
ON CONFLICT (shard) DO UPDATE SET
    term = held.term
        + CASE WHEN held.holder = EXCLUDED.holder AND held.expires_at > clock_timestamp() THEN 0 ELSE 1 END,
    holder = EXCLUDED.holder,
    expires_at = EXCLUDED.expires_at
WHERE held.holder = EXCLUDED.holder OR held.expires_at <= clock_timestamp()
RETURNING term
"""  # noqa: S608 - the text is constant
_RELEASE_SQL = """
UPDATE flex_controllerterm SET expires_at = clock_timestamp()
WHERE shard = %(shard)s AND holder = %(holder)s AND term = %(term)s AND expires_at > clock_timestamp()
"""
#: The first part of every statement that writes: its row is there while the term lasts. Takes `Leadership.named()`.
LED_SQL = """
WITH led AS MATERIALIZED (
    SELECT term FROM flex_controllerterm
    WHERE shard = %(shard)s AND term = %(term)s AND holder = %(holder)s AND expires_at > clock_timestamp()
    FOR SHARE
)"""
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


class LeadershipLost(Exception):
    """The term is over: another controller leads, and what was to be written was not."""


@dataclass
class Leadership:
    """One process's claim on one shard; `term` is None while another leads."""

    shard: str
    holder: str
    term: int | None = None
    _held_at_s: float = 0.0

    def hold(self) -> int | None:
        """Takes or renews the lease; returns the term, or None while another holder's lease runs."""
        self._held_at_s = time.monotonic()
        with connection.cursor() as cursor:
            cursor.execute(_HOLD_SQL, {"shard": self.shard, "holder": self.holder, "lease": LEASE_S})
            row = cursor.fetchone()
        self.term = None if row is None else int(row[0])
        return self.term

    def keep(self) -> None:
        """Renews the lease in the midst of work that may take longer than it lasts; once a second is enough.

        Raises LeadershipLost when it lapsed meanwhile, even if nobody else took it: the work was for another term.
        """
        if time.monotonic() - self._held_at_s < KEEP_EVERY_S:
            return
        term = self.term
        if self.hold() != term:
            raise LeadershipLost

    def named(self) -> dict[str, Any]:
        """The parameters of `LED_SQL`."""
        return {"shard": self.shard, "term": self.term, "holder": self.holder}

    def release(self) -> None:
        """Ends the lease now, so that a standby need not wait for it."""
        if self.term is None:
            return
        with connection.cursor() as cursor:
            cursor.execute(_RELEASE_SQL, self.named())
        self.term = None
