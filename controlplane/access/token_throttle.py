"""How often a personal token may call, and how often an address may send a wrong one; counted in the cache by minute.

Without a cache nothing is counted: a token is too long to be guessed, and the limit is for fairness.
"""

import hashlib
import logging
import time

from redis.exceptions import RedisError
from rest_framework.exceptions import Throttled

from controlplane.tenants.throttle import count_in

log = logging.getLogger(__name__)
WINDOW_S = 60
CALLS_MAX = 600
WRONG_MAX = 30


def enter(token_id: int | None, address: str) -> None:
    """Counts one call. Raises Throttled (429 with Retry-After) over the limit."""
    now_s = int(time.time())
    window = now_s // WINDOW_S
    wrong = hashlib.sha256(address.encode()).hexdigest()[:24]
    key = f"token:wrong:{window}:{wrong}" if token_id is None else f"token:{window}:{token_id}"
    try:
        count = count_in(key, WINDOW_S)
    except (RedisError, OSError) as error:
        log.warning("cache unreachable, calls of tokens are not counted: %s", error)
        return
    if count > (WRONG_MAX if token_id is None else CALLS_MAX):
        raise Throttled(wait=WINDOW_S - now_s % WINDOW_S)
