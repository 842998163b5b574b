"""The durable side of one epoch: records from admission to acceptance, and reports as exact bytes.

An entry is buffered, and written before the response it belongs to is finished: the shell flushes once per turn of its
event loop and hands out last bytes after that. So a killed process loses no record whose response was finished;
`sync()` (once a second and before each report leaves) bounds what a machine that loses power can lose.

An epoch is a directory of segments. A segment begins with all that is still open or not reported, so that older ones
matter for their reports alone; they go 24 h after the last of those was accepted.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from controlplane.agent.atomic_file import sync_directory
from controlplane.agent.errors import AgentError
from controlplane.agent.frames import HEADER, FramesRead, header, read_frames
from controlplane.agent.journal_entries import (
    Accepted,
    Begun,
    Closed,
    Cut,
    Entry,
    Head,
    Mark,
    Moved,
    Opened,
    Recut,
    Sealed,
    Turned,
    decode,
    encode,
    entries_of,
)

log = logging.getLogger(__name__)

SEGMENT_BYTES = 16 * 1024 * 1024
TOGETHER_MAX = 64
"""Entries that are written as one at most."""
RESPONSES_BYTES = 4 * 1024 * 1024
"""Responses of batch items that wait for a report: over this one is cut."""
KEEP_ACCEPTED_US = 24 * 3_600_000_000


@dataclass(frozen=True)
class StoredReport:
    """Where a report's bytes are."""

    seq: int
    at_us: int
    seal: bool
    path: Path
    offset: int
    length: int
    records: int = 0


@dataclass
class SpoolState:
    """What the entries of an epoch add up to."""

    opened: dict[str, Opened | Begun] = field(default_factory=dict)
    closed: deque[Closed] = field(default_factory=deque)
    responses_bytes: int = 0
    """Responses of batch items among `closed`: what they hold of memory."""
    spent: dict[int, int] = field(default_factory=dict)
    """Lease id -> what was spent of it, in nanos, of leases that were spent of since the last report was cut."""
    turned: list[Turned] = field(default_factory=list)
    admitted: list[Mark] = field(default_factory=list)
    """Marks of requests that were admitted and closed since the last report: nobody has counted their admission."""
    reports: deque[StoredReport] = field(default_factory=deque)
    """Reports that are not accepted, oldest first."""
    accepted: deque[StoredReport] = field(default_factory=deque)
    last_seq: int = 0
    accepted_through: int = 0
    sealed: Sealed | None = None

    def take(self, entry: Entry, path: Path, offset: int, length: int) -> None:
        """Bring the state up to one more entry."""
        if isinstance(entry, Begun | Opened):
            self.opened[entry.request_id] = entry
        elif isinstance(entry, Closed):
            self.take_closed(entry)
        elif isinstance(entry, Turned):
            self.turned.append(entry)
        elif isinstance(entry, Moved):
            for request_id in entry.request_ids:
                self.opened.pop(request_id, None)
        elif isinstance(entry, Cut):
            self._take_cut(entry, path, offset, length)
        elif isinstance(entry, Recut):
            self._take_recut(entry, path, offset, length)
        elif isinstance(entry, Accepted):
            self.accept(entry.seq)
        elif isinstance(entry, Sealed):
            self.sealed = entry
        elif isinstance(entry, Head):
            self._take_head(entry)

    def take_closed(self, entry: Closed) -> None:
        """A request ended."""
        opened = self.opened.pop(entry.row.request_id, None)
        if opened is not None and not opened.counted:
            self.admitted += opened.marks
        self.closed.append(entry)
        if entry.lease_spent_nanos:
            self.spent[entry.lease_id] = max(entry.lease_spent_nanos, self.spent.get(entry.lease_id, 0))
        if entry.item is not None:
            self.responses_bytes += len(entry.item.response)

    def _take_head(self, head: Head) -> None:
        # The segment repeats what was open and unreported when it began.
        self.opened.clear()
        self.closed.clear()
        self.spent.clear()
        self.turned.clear()
        self.admitted = list(head.admitted)
        self.responses_bytes = 0
        self.last_seq = max(self.last_seq, head.next_seq - 1)

    def _take_cut(self, cut: Cut, path: Path, offset: int, length: int) -> None:
        self.last_seq = cut.seq
        self.reports.append(StoredReport(cut.seq, cut.at_us, cut.seal, path, offset, length, cut.records))
        for _ in range(min(cut.records, len(self.closed))):
            carried = self.closed.popleft()
            if carried.item is not None:
                self.responses_bytes -= len(carried.item.response)
        self.closed = deque(
            entry if entry.counted else msgspec.structs.replace(entry, counted=True) for entry in self.closed
        )
        for request_id, entry in self.opened.items():
            if not entry.counted:
                self.opened[request_id] = msgspec.structs.replace(entry, counted=True)
        self.spent.clear()
        self.turned.clear()
        self.admitted.clear()

    def _take_recut(self, recut: Recut, path: Path, offset: int, length: int) -> None:
        stored = StoredReport(recut.seq, recut.at_us, recut.seal, path, offset, length, recut.records)
        self.reports = deque(stored if report.seq == recut.seq else report for report in self.reports)
        self.closed.extendleft(reversed(recut.rest))
        self.responses_bytes += sum(len(entry.item.response) for entry in recut.rest if entry.item is not None)
        for request_id in recut.lost:
            self.opened.pop(request_id, None)

    def closed_over(self, records: int) -> bool:
        """Whether more rows than that wait for a report, or more bytes of responses than one should carry."""
        return len(self.closed) > records or self.responses_bytes > RESPONSES_BYTES

    def rewind(self, seq: int) -> int:
        """Make `seq` the next to send, as a restored control plane asks, or the first after it that is kept.

        Returns the number of that one; without any that is kept, the one that comes next.
        """
        while self.accepted and self.accepted[-1].seq >= seq:
            self.reports.appendleft(self.accepted.pop())
        self.accepted_through = seq - 1
        self.sealed = None
        return self.reports[0].seq if self.reports else self.last_seq + 1

    def accept(self, seq: int) -> None:
        self.accepted_through = max(self.accepted_through, seq)
        # More than was ever sent from here was taken: a copy of this directory went on without us.
        self.last_seq = max(self.last_seq, seq)
        while self.reports and self.reports[0].seq <= seq:
            self.accepted.append(self.reports.popleft())


class EpochSpool:
    """One epoch's journal. Only the process that holds the epoch writes to it."""

    def __init__(self, directory: Path, epoch: int, state: SpoolState, segment: int, size: int, now_us: int) -> None:
        self.directory = directory
        self.epoch = epoch
        self.state = state
        self.last_heard_us = now_us
        """When the process that wrote this was last heard of: the end of what it left open."""
        self.packs = False
        """Whether reports are cut in the packed form: the control plane said that it takes it."""
        self._segment = segment
        self._path = directory / f"{segment:06d}.log"
        self._buffer: list[bytes] = []
        self._together: list[Entry] = []
        """Counted in, and not encoded yet."""
        self._written = size
        self._dirty = False
        self.records_accepted = 0
        self._dropped: dict[int, int] = {}
        """Records of the reports that were given up for want of space, by number."""
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @classmethod
    def create(cls, root: Path, epoch: int, now_us: int) -> "EpochSpool":
        """A fresh epoch's spool. Raises AgentError when that epoch has been spooled before."""
        directory = epoch_directory(root, epoch)
        try:
            directory.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            raise AgentError(f"{directory} exists: epoch {epoch} was used before, and epochs only grow") from None
        sync_directory(directory.parent)
        spool = cls(directory, epoch, SpoolState(), 1, 0, now_us)
        spool._begin_segment(now_us)
        return spool

    @classmethod
    def reopen(cls, root: Path, epoch: int) -> "EpochSpool":
        """What a process that is gone left behind; the torn end of its last segment is cut off."""
        directory = epoch_directory(root, epoch)
        state = SpoolState()
        paths = sorted(directory.glob("*.log"))
        size, heard_us = 0, 0
        for path in list(paths):
            data = path.read_bytes()
            read = read_frames(data)
            if len(paths) > 1 and path == paths[-1] and not _begun(read):
                # Killed while this segment was begun: the one before it still says everything.
                path.unlink()
                paths.pop()
                break
            for offset, payload in read.entries:
                for entry in entries_of(payload):
                    state.take(entry, path, offset, len(payload))
            size, heard_us = read.valid_bytes, path.stat().st_mtime_ns // 1000
            if read.valid_bytes < len(data):
                log.warning("%s: %d bytes after its last whole entry", path, len(data) - read.valid_bytes)
                if path == paths[-1]:
                    with path.open("r+b") as file:
                        file.truncate(read.valid_bytes)
                        os.fsync(file.fileno())
        segment = int(paths[-1].stem) if paths else 1
        return cls(directory, epoch, state, segment, size, heard_us)

    def append(self, entry: Entry) -> None:
        """Buffer an entry and count it in."""
        self._join()
        payload = encode(entry)
        self.state.take(entry, self._path, self._written + HEADER.size, len(payload))
        self._frame(payload)

    def begun(self, entry: Begun) -> None:
        """Buffer the beginning of a request and count it in; what comes between two flushes is written as one."""
        self.state.opened[entry.request_id] = entry
        self._together.append(entry)
        if len(self._together) >= TOGETHER_MAX:
            self._join()

    def closed(self, entry: Closed) -> None:
        """Buffer the end of a request and count it in, as `begun`."""
        if entry.item is not None:
            # Responses may be large, and what is written as one has to be read as one.
            self.append(entry)
            return
        self.state.take_closed(entry)
        self._together.append(entry)
        if len(self._together) >= TOGETHER_MAX:
            self._join()

    def _join(self) -> None:
        together = self._together
        if together:
            self._together = []
            self._frame(encode(together if len(together) > 1 else together[0]))

    def _frame(self, payload: bytes) -> None:
        self._buffer += (header(payload, self._written), payload)
        self._written += HEADER.size + len(payload)

    def flush(self) -> None:
        """Hand everything buffered to the kernel: from here on only the machine's death loses it."""
        self._join()
        if not self._buffer:
            return
        data = b"".join(self._buffer)
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, data[done:] if done else data)
        finally:
            # On a full disk the rest stays buffered, and the next flush goes on where this one stopped.
            self._buffer = [data[done:]] if done < len(data) else []
        self._dirty = True

    @property
    def dirty(self) -> bool:
        """Whether there is something that `sync` would make durable."""
        return self._dirty

    def sync(self) -> None:
        """Make everything flushed durable; blocks for the disk, so the shell calls it in a thread."""
        self._dirty = False
        try:
            os.fdatasync(self._descriptor)
        except OSError:
            self._dirty = True
            raise

    def cut(self, report: Cut) -> None:
        """Write a report down before it is sent, and begin a new segment when this one is full."""
        if report.seq != self.state.last_seq + 1:
            raise ValueError(f"report {report.seq} does not follow {self.state.last_seq}")
        self.append(report)
        self.flush()
        if self._written >= SEGMENT_BYTES:
            self._rotate(report.at_us)

    def recut(self, report: Recut) -> None:
        """Replace a report that is not accepted by a smaller one of the same number."""
        if not any(stored.seq == report.seq for stored in self.state.reports):
            raise ValueError(f"report {report.seq} does not wait to be accepted")
        self.append(report)
        self.flush()
        if self._written >= SEGMENT_BYTES:
            self._rotate(report.at_us)

    def body_of(self, report: StoredReport) -> bytes:
        """The exact bytes of a stored report."""
        self.flush()
        with report.path.open("rb") as file:
            file.seek(report.offset)
            entry = decode(file.read(report.length))
        if not isinstance(entry, Cut | Recut) or entry.seq != report.seq:
            raise AgentError(f"{report.path} was changed by another program: report {report.seq} is not where it was")
        return entry.body

    def accept(self, seq: int, now_us: int) -> None:
        """The control plane has taken reports through `seq`."""
        reports = self.state.reports
        self.records_accepted += sum(report.records for report in reports if report.seq <= seq)
        if seq > self.state.accepted_through or (reports and reports[0].seq <= seq):
            self.append(Accepted(seq, now_us))
            with contextlib.suppress(OSError):
                # Stays buffered; without it reports are sent again, which counts nothing twice.
                self.flush()

    def seal(self, now_us: int, reason: str = "") -> None:
        """Nothing of this epoch is sent again."""
        self.append(Sealed(now_us, reason))
        self.flush()

    def close(self) -> None:
        self.flush()
        os.close(self._descriptor)

    def _begin_segment(self, now_us: int) -> None:
        kept_open, kept_closed = list(self.state.opened.values()), list(self.state.closed)
        kept_turned = list(self.state.turned)
        kept: list[Entry] = [*kept_open, *kept_closed, *kept_turned]
        head = Head(self.epoch, self._segment, self.state.last_seq + 1, len(kept), list(self.state.admitted))
        for entry in (head, *kept):
            self.append(entry)
        self.flush()
        os.fdatasync(self._descriptor)
        sync_directory(self.directory)
        self.last_heard_us = now_us

    def _rotate(self, now_us: int) -> None:
        os.fdatasync(self._descriptor)
        path = self.directory / f"{self._segment + 1:06d}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.close(self._descriptor)
        self._segment, self._path, self._descriptor, self._written = self._segment + 1, path, descriptor, 0
        self._begin_segment(now_us)
        self.drop_accepted(now_us)

    def drop_accepted(self, now_us: int, keep_us: int = KEEP_ACCEPTED_US) -> int:
        """Remove segments of which nothing is needed any more; returns the bytes freed."""
        needed = {report.path for report in self.state.reports}
        recent = {report.path for report in self.state.accepted if now_us - report.at_us < keep_us}
        freed = 0
        for path in sorted(self.directory.glob("*.log")):
            if path == self._path or path in needed or path in recent:
                break
            freed += path.stat().st_size
            path.unlink()
        while self.state.accepted and not self.state.accepted[0].path.exists():
            self.state.accepted.popleft()
        while len(self.state.accepted) > 100_000:
            self.state.accepted.popleft()
        return freed

    def drop_oldest_unaccepted(self, bytes_max: int) -> list[int]:
        """Give up the oldest unaccepted reports until the epoch's size is under a bound; returns their numbers.

        The first report that is left tells the control plane of it when that asks for one of them.
        """
        lost: list[int] = []
        while self.size_bytes() > bytes_max and self.state.reports and self.state.reports[0].path != self._path:
            path = self.state.reports[0].path
            dropped = [report for report in self.state.reports if report.path == path]
            lost += [report.seq for report in dropped]
            self._dropped.update((report.seq, report.records) for report in dropped)
            self.state.reports = deque(report for report in self.state.reports if report.path != path)
            path.unlink(missing_ok=True)
        return lost

    def records_lost(self, first_seq: int, until_seq: int) -> int | None:
        """Records in reports that were given up, `until_seq` not among them; None when a process before this did it."""
        lost = [self._dropped.get(seq) for seq in range(first_seq, until_seq)]
        return None if None in lost else sum(count for count in lost if count is not None)

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob("*.log"))


def _begun(read: FramesRead) -> bool:
    """Whether a segment holds its head and everything that the head promises."""
    if not read.entries:
        return False
    head = decode(read.entries[0][1])
    return isinstance(head, Head) and sum(len(entries_of(payload)) for _, payload in read.entries) > head.kept


def epoch_directory(root: Path, epoch: int) -> Path:
    return root / f"epoch-{epoch:09d}"


def spooled_epochs(root: Path) -> Iterator[int]:
    """Epochs that have a directory, oldest first."""
    for path in sorted(root.glob("epoch-*")):
        digits = path.name.removeprefix("epoch-")
        if path.is_dir() and digits.isdigit():
            yield int(digits)
