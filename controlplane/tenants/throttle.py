"""How often somebody may try to sign in: counted in the cache by name and address together, by name, by address.

A try is counted before the password is looked at, so tries side by side count too. When the cache does not answer,
tries go one at a time with a constant wait in front of each: slow, but never open.
"""

import hashlib
import logging
import threading
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.core.cache import cache
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

WINDOW_S = 900
LIMITS = {"pair": 5, "name": 30, "address": 60}
# Of pages that a long random link opens.
PAGE_LIMITS = {"pair": 60, "name": 6_000, "address": 60}
SLOW_S = 2.0
SLOW_QUEUE_S = 6.0
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether a try may go on; if not, when to come back."""

    open: bool
    try_again_at: datetime | None = None


def enter(name: str, address: str, now: datetime, *, limits: Mapping[str, int] = LIMITS) -> Gate:
    """Counts one try and says whether it may go on."""
    window = int(now.timestamp()) // WINDOW_S
    try:
        counts = {what: count_in(key, WINDOW_S) for what, key in _keys(name, address, window).items()}
    except (RedisError, OSError) as error:
        log.warning("cache unreachable, sign-in is slowed down: %s", error)
        return _slowly(now)
    if any(counts[what] > limit for what, limit in limits.items()):
        return Gate(False, datetime.fromtimestamp((window + 1) * WINDOW_S, tz=UTC))
    return Gate(True)


def forget(name: str, address: str, now: datetime) -> None:
    """A sign-in that worked clears what was counted for this name from this address; the wider counts stay."""
    window = int(now.timestamp()) // WINDOW_S
    try:
        cache.delete(_keys(name, address, window)["pair"])
    except (RedisError, OSError) as error:
        log.warning("cache unreachable, the sign-in count stays: %s", error)


def _keys(name: str, address: str, window: int) -> dict[str, str]:
    # As the form reads it: full-width letters and their like are other spellings of one name.
    name = unicodedata.normalize("NFKC", name.strip()).casefold()
    subjects = {"pair": f"{name}\0{address}", "name": name, "address": address}
    return {
        what: f"sign-in:{what}:{window}:{hashlib.sha256(subject.encode()).hexdigest()[:32]}"
        for what, subject in subjects.items()
    }


def count_in(key: str, window_s: int) -> int:
    """Counts one more under a key that names its window, and says how many those are. Raises RedisError, OSError."""
    cache.add(key, 0, timeout=2 * window_s)
    try:
        return cache.incr(key)
    except ValueError:  # evicted between the two calls
        cache.add(key, 1, timeout=2 * window_s)
        return 1


def _slowly(now: datetime) -> Gate:
    if not _one_at_a_time.acquire(timeout=SLOW_QUEUE_S):
        return Gate(False, now + timedelta(seconds=SLOW_QUEUE_S))
    try:
        time.sleep(SLOW_S)
    finally:
        _one_at_a_time.release()
    return Gate(True)
