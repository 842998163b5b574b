"""What admission takes: tokens of a bucket, money of a lease, places of a concurrency limit.

All three are small mutable objects of one agent, single-threaded, with time as an argument. None of them can go below
zero or over its limit; what a request took is held by one `Reservation`, and every way a request can end gives it back.
"""

from __future__ import annotations

from typing import Final

from controlplane.core.native import native

PICO: Final = 1_000_000_000_000
"""Bucket levels are pico-tokens, so that microseconds x micro-tokens per second is an integer without a remainder."""
MICRO: Final = 1_000_000


class TokenBucket:
    """A token bucket that adds `rate_micro_per_s` micro-tokens per second up to its burst.

    Integer arithmetic throughout: refilling in one step or in a thousand gives the same level. Time never runs
    backwards here: an earlier `now_us` than the last one seen counts as the last one.
    """

    __slots__ = ("burst_pico", "level_pico", "rate_micro_per_s", "updated_us")

    def __init__(self, *, rate_micro_per_s: int, burst_micro: int, now_us: int, level_micro: int | None = None) -> None:
        if rate_micro_per_s < 0 or burst_micro < 0:
            raise ValueError("rate and burst of a bucket cannot be negative")
        level = burst_micro if level_micro is None else level_micro
        self.rate_micro_per_s = rate_micro_per_s
        self.burst_pico = burst_micro * MICRO
        self.level_pico = max(0, min(level, burst_micro)) * MICRO
        self.updated_us = now_us

    def refill(self, now_us: int) -> int:
        """Bring the level to `now_us` and return it in pico-tokens."""
        elapsed = now_us - self.updated_us
        if elapsed > 0:
            level = self.level_pico + elapsed * self.rate_micro_per_s
            self.level_pico = level if level < self.burst_pico else self.burst_pico
            self.updated_us = now_us
        return self.level_pico

    def covers(self, tokens: int, now_us: int) -> bool:
        """Whether `tokens` whole tokens are there at `now_us`."""
        return self.refill(now_us) >= tokens * PICO

    def take(self, tokens: int, now_us: int) -> bool:
        """Take `tokens` if they are there; a bucket that does not cover them is left as it was."""
        elapsed = now_us - self.updated_us
        level = self.level_pico
        if elapsed > 0:
            level += elapsed * self.rate_micro_per_s
            if level > self.burst_pico:
                level = self.burst_pico
            self.updated_us = now_us
        # One at a time is the rule, and the product of large numbers is dear.
        need = PICO if tokens == 1 else tokens * PICO
        if level < need:
            self.level_pico = level
            return False
        self.level_pico = level - need
        return True

    def give_back(self, tokens: int) -> None:
        """Return tokens that were taken and not used; never over the burst."""
        level = self.level_pico + tokens * PICO
        self.level_pico = level if level < self.burst_pico else self.burst_pico

    def take_late(self, tokens: int) -> int:
        """Take what was used beyond the estimate; returns the tokens that were no longer there (never below zero)."""
        need = tokens * PICO
        taken = min(self.level_pico, need)
        self.level_pico -= taken
        return -(-(need - taken) // PICO)

    def seconds_until(self, tokens: int, now_us: int) -> int:
        """Whole seconds, rounded up and at least 1, until `tokens` are there.

        A need above the burst is never covered; the answer is then the time to a full bucket.
        """
        missing = min(tokens * PICO, self.burst_pico) - self.refill(now_us)
        if missing <= 0:
            return 1
        if self.rate_micro_per_s == 0:
            return 3600
        return max(1, -(-missing // (self.rate_micro_per_s * MICRO)))

    def set_rate(self, *, rate_micro_per_s: int, burst_micro: int, now_us: int) -> None:
        """Change the limit from `now_us` on; what was spent stays spent."""
        self.refill(now_us)
        self.rate_micro_per_s = rate_micro_per_s
        self.burst_pico = burst_micro * MICRO
        self.level_pico = min(self.level_pico, self.burst_pico)


class LeasePurse:
    """The unspent part of an agent's lease for one tenant, in nanos.

    remaining + reserved + settled = granted, at every instant; none of them is ever negative. `lease_id` is 0 for none.
    """

    __slots__ = ("granted_nanos", "lease_id", "remaining_nanos", "reserved_nanos", "settled_nanos")

    def __init__(self, granted_nanos: int, *, lease_id: int = 0) -> None:
        if granted_nanos < 0:
            raise ValueError(f"a lease cannot be negative, got {granted_nanos}")
        self.lease_id = lease_id
        self.granted_nanos = granted_nanos
        self.remaining_nanos = granted_nanos
        self.reserved_nanos = 0
        self.settled_nanos = 0

    def reserve(self, amount_nanos: int) -> bool:
        """Reserve the upper bound of a charge; False and nothing taken when the lease does not cover it."""
        if amount_nanos < 0:
            raise ValueError(f"cannot reserve a negative amount, got {amount_nanos}")
        if amount_nanos > self.remaining_nanos:
            return False
        self.remaining_nanos -= amount_nanos
        self.reserved_nanos += amount_nanos
        return True

    def settle(self, reserved_nanos: int, charge_nanos: int) -> int:
        """End a reservation with its charge; returns the excess over the reservation, which is the platform's."""
        if not 0 <= reserved_nanos <= self.reserved_nanos:
            raise ValueError(f"{reserved_nanos} nanos are not reserved here (open: {self.reserved_nanos})")
        charge_nanos = charge_nanos if charge_nanos > 0 else 0
        booked = charge_nanos if charge_nanos < reserved_nanos else reserved_nanos
        self.reserved_nanos -= reserved_nanos
        self.settled_nanos += booked
        self.remaining_nanos += reserved_nanos - booked
        return charge_nanos - booked

    def release(self, reserved_nanos: int) -> None:
        """End a reservation without a charge."""
        self.settle(reserved_nanos, 0)

    def grant(self, amount_nanos: int) -> None:
        """Add a newly granted lease."""
        if amount_nanos < 0:
            raise ValueError(f"a lease cannot be negative, got {amount_nanos}")
        self.granted_nanos += amount_nanos
        self.remaining_nanos += amount_nanos

    def recall(self, amount_nanos: int) -> int:
        """Hand back up to `amount_nanos` of what is not reserved; returns what was handed back."""
        back = min(max(amount_nanos, 0), self.remaining_nanos)
        self.granted_nanos -= back
        self.remaining_nanos -= back
        return back


class ConcurrencyCounter:
    """Requests of one tenant or key that are running or queued, against a limit (None: unlimited)."""

    __slots__ = ("limit", "queued", "running")

    def __init__(self, limit: int | None, *, running: int = 0, queued: int = 0) -> None:
        if running < 0 or queued < 0 or (limit is not None and limit < 0):
            raise ValueError("a concurrency limit and its counts cannot be negative")
        self.limit = limit
        self.running = running
        self.queued = queued

    @property
    def held(self) -> int:
        """Running and queued together: what the limit bounds."""
        return self.running + self.queued

    def has_room(self) -> bool:
        """Whether one more request may be admitted."""
        return self.limit is None or self.running + self.queued < self.limit

    def enter(self) -> bool:
        """Count one admitted request as queued; False when the limit is reached."""
        if self.limit is not None and self.running + self.queued >= self.limit:
            return False
        self.queued += 1
        return True

    def start(self) -> None:
        """A queued request began to run."""
        if self.queued <= 0:
            raise ValueError("no queued request to start")
        self.queued -= 1
        self.running += 1

    def requeue(self) -> None:
        """A running request went back to its queue (preempted or retried)."""
        if self.running <= 0:
            raise ValueError("no running request to put back")
        self.running -= 1
        self.queued += 1

    def leave(self, *, running: bool) -> None:
        """A request ended, from the state it was in."""
        if running:
            if self.running <= 0:
                raise ValueError("no running request to end")
            self.running -= 1
        else:
            if self.queued <= 0:
                raise ValueError("no queued request to end")
            self.queued -= 1


@native(free_list_len=1, acyclic=True)
class Reservation:
    """Everything one admitted request holds; ended exactly once, by `settle` or `release`.

    Counters and token buckets are those of the tenant and of the key, each None where there is no such limit.
    """

    __slots__ = ("amount_nanos", "key", "key_bucket", "open", "purse", "running", "tenant", "tenant_bucket", "tokens")

    def __init__(
        self,
        purse: LeasePurse | None,
        amount_nanos: int,
        tenant: ConcurrencyCounter | None,
        key: ConcurrencyCounter | None,
        tenant_bucket: TokenBucket | None,
        key_bucket: TokenBucket | None,
        tokens: int,
    ) -> None:
        self.purse = purse
        self.amount_nanos = amount_nanos
        self.tenant = tenant
        self.key = key
        self.tenant_bucket = tenant_bucket
        self.key_bucket = key_bucket
        self.tokens = tokens
        self.running = False
        self.open = True

    def start(self) -> None:
        """The request began to run."""
        self.running = True
        if self.tenant is not None:
            self.tenant.start()
        if self.key is not None:
            self.key.start()

    def requeue(self) -> None:
        """The request went back to its queue."""
        self.running = False
        if self.tenant is not None:
            self.tenant.requeue()
        if self.key is not None:
            self.key.requeue()

    def settle(self, charge_nanos: int, used_tokens: int) -> int:
        """End with a charge and the tokens used; returns the nanos over the reservation (booked to platform).

        Raises ValueError when the reservation has ended before: a late settle must not be booked twice.
        """
        if not self.open:
            raise ValueError("this reservation was already settled or released")
        self.open = False
        if self.tenant is not None:
            self.tenant.leave(running=self.running)
        if self.key is not None:
            self.key.leave(running=self.running)
        if self.tenant_bucket is not None:
            self._return(self.tenant_bucket, used_tokens)
        if self.key_bucket is not None:
            self._return(self.key_bucket, used_tokens)
        return 0 if self.purse is None else self.purse.settle(self.amount_nanos, charge_nanos)

    def _return(self, bucket: TokenBucket, used_tokens: int) -> None:
        if used_tokens < self.tokens:
            bucket.give_back(self.tokens - used_tokens)
        else:
            bucket.take_late(used_tokens - self.tokens)

    def release(self) -> None:
        """End without a charge: nothing was delivered."""
        self.settle(0, 0)
