"""Leases of hard budgets on this agent: what may still be spent, what each lease has spent, and asking for more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from controlplane.core.admission_snapshot import BudgetView, LeaseState
from controlplane.core.reservations import LeasePurse
from controlplane.wire.report import Exhausted, Lease, LeaseSpend

EXHAUSTED_MEMORY_US: Final = 1_000_000
"""For so long an answer of "used up" is believed before the control plane is asked again."""
LOW_WATER_REQUESTS: Final = 4
CLOSED_KEEP_US: Final = 600_000_000


class SlicePurse(LeasePurse):
    """The purse of an outage slice: opened only while neither the control plane nor a lease is there."""

    __slots__ = ()


class HeldLease:
    """One lease row of the control plane as it is spent here."""

    __slots__ = (
        "closed_us", "ends_us", "epoch", "expires_us", "job", "learnt_us", "lease_id", "purse", "tenant_id", "told",
    )  # fmt: skip

    def __init__(self, lease: Lease, epoch: int, now_us: int, ahead_us: int) -> None:
        self.lease_id = lease.lease_id
        self.epoch = epoch
        self.tenant_id = lease.tenant_id
        self.job = lease.job
        """The job whose requests alone it pays for; empty for those of its tenant."""
        self.purse = (SlicePurse if lease.outage else LeasePurse)(lease.amount_nanos, lease_id=lease.lease_id)
        self.ends_us = lease.expires_us
        """When it ends, by the control plane's clock."""
        self.expires_us = lease.expires_us + ahead_us
        """The same by the clock here."""
        self.learnt_us = now_us
        self.closed_us: int | None = None
        self.told = False
        """Whether a report has all that was spent of it: it is closed, and nothing was reserved any more."""

    def usable(self, now_us: int) -> bool:
        return self.closed_us is None and now_us < self.expires_us

    def close(self, now_us: int) -> None:
        """Nothing more is reserved of it; what is reserved will be settled."""
        self.closed_us = now_us
        self.purse.recall(self.purse.remaining_nanos)


class LeaseBook:
    """All leases of this agent's epoch, and those of its epoch before while requests still hold some of them.

    The control plane's rows are the truth; this follows every answer.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._ahead_us = 0
        """How far the clock here is ahead of the control plane's, as the last report had it."""
        self._leases: dict[int, HeldLease] = {}
        self._by_tenant: dict[int, list[HeldLease]] = {}
        self._slices: dict[int, list[HeldLease]] = {}
        """By tenant, the leases that are kept for an outage."""
        self._exhausted: dict[int, tuple[Exhausted, int]] = {}
        self._without: dict[tuple[int, str], int] = {}
        """(tenant, job) -> when it was answered that the budget is used up and so is what the job reserved."""
        self.unanswered: set[int] = set()
        """Tenants whose last question found no control plane, until it answers anything again."""
        self.answered_us = 0
        """When the control plane last said what is leased."""
        self.on_return: Callable[[], None] = lambda: None
        """Called when it answers again after a question that it did not answer."""

    def begin_epoch(self, epoch: int, now_us: int) -> None:
        """From here on requests are paid from leases of this epoch: those of another end with it."""
        self.epoch = epoch
        for held in self._leases.values():
            if held.closed_us is None:
                held.close(now_us)

    def follow_clock(self, ahead_us: int, now_us: int) -> None:
        """A report is cut, or the first answer came: from here on ends are reckoned with this.

        What has ended by then is over for good, whatever the clock does next: the report tells that it is.
        """
        self._ahead_us = ahead_us
        for held in self._leases.values():
            held.expires_us = held.ends_us + ahead_us
            if held.closed_us is None and now_us > held.expires_us:
                held.close(now_us)

    def apply(self, leases: list[Lease], exhausted: list[Exhausted], *, asked_us: int, now_us: int) -> None:
        """Take all open leases of an answer to what was sent at `asked_us`.

        A lease that is not named is over, unless it was learnt after that question: then the answer is the older news.
        """
        self.answered_us = now_us
        if self.unanswered:
            self.unanswered.clear()
            self.on_return()
        named = set()
        for lease in leases:
            named.add(lease.lease_id)
            self._take(lease, now_us)
        for held in list(self._leases.values()):
            if held.lease_id not in named and held.learnt_us < asked_us and held.closed_us is None:
                held.close(now_us)
            if held.closed_us is not None and held.told and now_us - held.closed_us > CLOSED_KEEP_US:
                self._forget(held)
        for entry in exhausted:
            self._exhausted[entry.tenant_id] = entry, now_us

    def nothing_for(self, tenant_id: int, job: str, now_us: int) -> None:
        """A question for a job was answered with a budget that is used up: its reservation did not pay either."""
        self._without = {key: at_us for key, at_us in self._without.items() if now_us - at_us < EXHAUSTED_MEMORY_US}
        self._without[(tenant_id, job)] = now_us

    def _take(self, lease: Lease, now_us: int) -> None:
        held = self._leases.get(lease.lease_id)
        if held is None:
            held = self._leases[lease.lease_id] = HeldLease(lease, self.epoch, now_us, self._ahead_us)
            self._kept_in(held).setdefault(lease.tenant_id, []).append(held)
            if not lease.outage:
                self._exhausted.pop(lease.tenant_id, None)
            return
        if held.closed_us is not None and held.epoch == self.epoch and lease.expires_us > held.ends_us:
            held.closed_us, held.told = None, False
        held.ends_us, held.expires_us = lease.expires_us, lease.expires_us + self._ahead_us
        more = lease.amount_nanos - held.purse.granted_nanos
        if more > 0:
            held.purse.grant(more)
            if not lease.outage:
                self._exhausted.pop(lease.tenant_id, None)
        elif more < 0:
            held.purse.recall(-more)

    def _forget(self, held: HeldLease) -> None:
        del self._leases[held.lease_id]
        self._kept_in(held)[held.tenant_id].remove(held)

    def _kept_in(self, held: HeldLease) -> dict[int, list[HeldLease]]:
        return self._slices if isinstance(held.purse, SlicePurse) else self._by_tenant

    def look_up(self, view: BudgetView, tenant_id: int, bound_nanos: int, now_us: int, job: str = "") -> None:
        """Fill a tenant's budget view for a request, of a job or of none, whose charge is at most `bound_nanos`.

        What its job reserved comes first. The outage slice is in it only while the control plane does not answer.
        """
        view.outage_purse, view.window_ends_at_us = None, None
        view.purse = self._purse(tenant_id, job, bound_nanos, now_us)
        if job and (view.purse is None or view.purse.remaining_nanos < bound_nanos):
            view.purse = self._purse(tenant_id, "", bound_nanos, now_us) or view.purse
        known = self._known_exhausted(tenant_id, now_us, job)
        if known is not None:
            view.state = LeaseState.EXHAUSTED
            view.window_ends_at_us = known.ends_us
        elif tenant_id in self.unanswered:
            view.state = LeaseState.CUT_OFF
            view.outage_purse = self._slice(tenant_id, bound_nanos, now_us)
        else:
            view.state = LeaseState.ABSENT

    def _purse(self, tenant_id: int, job: str, bound_nanos: int, now_us: int) -> LeasePurse | None:
        """The lease of a job, or of none, that covers a bound, else the last one that may be spent."""
        found: LeasePurse | None = None
        for held in self._by_tenant.get(tenant_id, ()):
            if held.job == job and held.usable(now_us):
                found = held.purse
                if found.remaining_nanos >= bound_nanos:
                    break
        return found

    def _known_exhausted(self, tenant_id: int, now_us: int, job: str) -> Exhausted | None:
        """An answer of "used up" that is still believed; for a request of a job only one to a question for that job."""
        known = self._exhausted.get(tenant_id)
        if known is None or now_us - known[1] >= EXHAUSTED_MEMORY_US:
            return None
        if job and now_us - self._without.get((tenant_id, job), -EXHAUSTED_MEMORY_US) >= EXHAUSTED_MEMORY_US:
            return None
        return known[0]

    def _slice(self, tenant_id: int, bound_nanos: int, now_us: int) -> LeasePurse | None:
        """The tenant's slice that covers a bound, else the last one that may be spent."""
        found: LeasePurse | None = None
        for held in self._slices.get(tenant_id, ()):
            if held.usable(now_us):
                found = held.purse
                if found.remaining_nanos >= bound_nanos:
                    break
        return found

    def remaining_nanos(self, tenant_id: int, now_us: int, job: str = "") -> int:
        """What the tenant may still spend here, for a job or for none, without asking."""
        return sum(
            held.purse.remaining_nanos
            for held in self._by_tenant.get(tenant_id, ())
            if held.job in ("", job) and held.usable(now_us)
        )

    def slices_nanos(self, now_us: int) -> dict[int, int]:
        """Tenant id -> what is left of its outage slices."""
        return {
            tenant_id: sum(held.purse.remaining_nanos for held in slices if held.usable(now_us))
            for tenant_id, slices in self._slices.items()
            if slices
        }

    def runs_low(self, tenant_id: int, bound_nanos: int, now_us: int, job: str = "") -> bool:
        """Whether to ask for more before a request, of a job or of none, has to wait for it."""
        if self._known_exhausted(tenant_id, now_us, job) is not None:
            return False
        return self.remaining_nanos(tenant_id, now_us, job) < LOW_WATER_REQUESTS * bound_nanos

    def exhausted_window(self, tenant_id: int) -> str:
        """The budget that blocked, for the client's message."""
        known = self._exhausted.get(tenant_id)
        return known[0].budget if known is not None else ""

    def spends(self, tenant_id: int | None = None) -> list[LeaseSpend]:
        """Spent and reserved of every lease so far, or of one tenant's."""
        held = (
            self._leases.values()
            if tenant_id is None
            else [*self._by_tenant.get(tenant_id, ()), *self._slices.get(tenant_id, ())]
        )
        return [LeaseSpend(h.lease_id, h.purse.settled_nanos, h.purse.reserved_nanos) for h in held]

    def note_told(self, spends: Iterable[LeaseSpend]) -> None:
        """A report that is written down says this. A closed lease of which nothing is reserved is told whole by it."""
        for spend in spends:
            held = self._leases.get(spend.lease_id)
            if held is not None:
                held.told = held.closed_us is not None and not spend.reserved_nanos

    def spends_of_epoch(self, epoch: int) -> list[LeaseSpend]:
        """Spent and reserved of the leases of an epoch so far, of those that are still held."""
        held = [h for h in self._leases.values() if h.epoch == epoch]
        return [LeaseSpend(h.lease_id, h.purse.settled_nanos, h.purse.reserved_nanos) for h in held]

    @property
    def reserved_nanos(self) -> int:
        return sum(held.purse.reserved_nanos for held in self._leases.values())
