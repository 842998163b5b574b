"""All spools of an agent under one directory: the current epoch's, and old ones until they are sealed and 24 h old."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

from controlplane.agent.journal_entries import Moved
from controlplane.agent.spool import KEEP_ACCEPTED_US, EpochSpool, epoch_directory, spooled_epochs
from controlplane.wire.report import LeaseSpend

log = logging.getLogger(__name__)

DEFAULT_BYTES_MAX: Final = 4 * 1024**3
DROPPED_NAMED_MAX: Final = 50


class SpoolStore:
    """Current and old epochs. Bounded: past `bytes_max` the oldest reports go, and what went is named.

    The newest segment of each epoch always stays, so that the control plane hears of what went.
    """

    def __init__(self, root: Path, *, bytes_max: int = DEFAULT_BYTES_MAX) -> None:
        self.root = root
        self.bytes_max = bytes_max
        self.current: EpochSpool | None = None
        self.old: dict[int, EpochSpool] = {}
        self.dropped: list[str] = []
        """What was lost for want of space since the start, in words; the last ones."""
        self.reports_dropped = 0

    def recover(self) -> None:
        """Open what earlier processes left."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for epoch in spooled_epochs(self.root):
            self.old[epoch] = EpochSpool.reopen(self.root, epoch)

    def unsealed(self) -> list[EpochSpool]:
        """Old epochs of which something may still have to be sent, oldest first."""
        return [spool for _, spool in sorted(self.old.items()) if spool.state.sealed is None]

    def accepted(self, epoch: int, seq: int, now_us: int) -> None:
        """A hello was answered with how far an epoch was taken: less far than it was, by a restored control plane.

        Then what it lost goes out again, also of an epoch that was sealed.
        """
        spool = self.old.get(epoch)
        if spool is None:
            return
        if seq >= spool.state.accepted_through:
            spool.accept(seq, now_us)
            return
        first = spool.state.rewind(seq + 1)
        log.warning("epoch %d was taken through report %d only: sending again from report %d", epoch, seq, first)

    def next_to_send(self) -> EpochSpool | None:
        """The old epoch to go on with: reports that were cut go first, then epochs are sealed, oldest first.

        A process that said hello again spends leases of the epoch before under the next one. The seal of the one gives
        back what is not known as spent, so what the other was still to tell comes before it.
        """
        unsealed = self.unsealed()
        return next((spool for spool in unsealed if spool.state.reports), unsealed[0] if unsealed else None)

    def spent_after(self, epoch: int) -> list[LeaseSpend]:
        """Totals of leases that journals of later epochs have and no report of theirs tells.

        Their processes are gone: nothing is reserved any more.
        """
        totals: dict[int, int] = {}
        for later, spool in self.old.items():
            for lease_id, nanos in spool.state.spent.items() if later > epoch else ():
                totals[lease_id] = max(nanos, totals.get(lease_id, 0))
        return [LeaseSpend(lease_id, nanos, 0) for lease_id, nanos in totals.items()]

    def begin(self, epoch: int, now_us: int) -> EpochSpool:
        """The spool of a new epoch; requests still open under the one before go on in it."""
        before, spool = self.current, EpochSpool.create(self.root, epoch, now_us)
        if before is not None:
            moving = list(before.state.opened.values())
            for entry in moving:
                spool.append(entry)
            spool.flush()
            before.append(Moved([entry.request_id for entry in moving]))
            before.flush()
            self.old[before.epoch] = before
        self.current = spool
        return spool

    def pack_reports(self, packs: bool) -> None:
        """From now on reports of every epoch are cut in the packed form, or in JSON."""
        for spool in self._spools:
            spool.packs = packs

    def tidy(self, now_us: int) -> None:
        """Remove what is accepted and old enough, and keep within the bound."""
        for epoch, spool in list(self.old.items()):
            sealed = spool.state.sealed
            if sealed is not None and now_us - sealed.at_us >= KEEP_ACCEPTED_US:
                self._remove(epoch)
        if self.current is not None:
            self.current.drop_accepted(now_us)
        if self.size_bytes() > self.bytes_max:
            self._make_room(now_us)

    def _make_room(self, now_us: int) -> None:
        """Accepted reports go first, then whole old epochs from the oldest on, each named."""
        for epoch, spool in sorted(self.old.items()):
            if self.size_bytes() <= self.bytes_max:
                return
            if spool.state.sealed is not None:
                self._remove(epoch)
        spools = [spool for _, spool in sorted(self.old.items())] + ([self.current] if self.current is not None else [])
        for spool in spools:
            spool.drop_accepted(now_us, keep_us=0)
        for spool in spools:
            over = self.size_bytes() - self.bytes_max
            if over > 0:
                self._name_lost(spool, spool.drop_oldest_unaccepted(spool.size_bytes() - over))
        # What is left of an epoch is one segment: there must be very many epochs for this.
        for epoch, spool in sorted(self.old.items()):
            if self.size_bytes() <= self.bytes_max:
                return
            state = spool.state
            first = state.reports[0].seq if state.reports else state.last_seq + 1
            self.reports_dropped += len(state.reports)
            self._name_dropped(f"epoch {epoch}: reports {first} to {state.last_seq} and {len(state.closed)} records")
            self._remove(epoch)

    def _name_lost(self, spool: EpochSpool, lost: list[int]) -> None:
        if lost:
            self.reports_dropped += len(lost)
            records = spool.records_lost(lost[0], lost[-1] + 1)
            with_records = "" if records is None else f" with {records} records"
            self._name_dropped(f"epoch {spool.epoch}: reports {lost[0]} to {lost[-1]}{with_records}")

    def _name_dropped(self, what: str) -> None:
        self.dropped = [*self.dropped[1 - DROPPED_NAMED_MAX :], what]
        log.critical("the spool is over %d bytes: dropped %s; they are lost", self.bytes_max, what)

    def _remove(self, epoch: int) -> None:
        spool = self.old.pop(epoch)
        spool.close()
        shutil.rmtree(epoch_directory(self.root, epoch), ignore_errors=True)

    def size_bytes(self) -> int:
        return sum(spool.size_bytes() for spool in self._spools)

    @property
    def unaccepted_reports(self) -> int:
        return sum(len(spool.state.reports) for spool in self._spools)

    @property
    def records_accepted(self) -> int:
        """Usage records that the control plane has taken from this process, those of older epochs among them."""
        return sum(spool.records_accepted for spool in self._spools)

    @property
    def records_unreported(self) -> int:
        """Closed records that the control plane has not taken yet."""
        states = [spool.state for spool in self._spools if spool.state.sealed is None]
        return sum(len(state.closed) + sum(report.records for report in state.reports) for state in states)

    @property
    def _spools(self) -> list[EpochSpool]:
        return [*self.old.values(), *([self.current] if self.current is not None else [])]

    def close(self) -> None:
        for spool in self._spools:
            spool.close()
