"""Dynamic batching of one-shot work (embeddings, classifiers): when requests are run together, and how they part again.

A batch closes when it holds `max_batch_size` inputs or when its oldest member has waited `max_wait_us`, whichever comes
first. Only members of one shape bucket share a batch. A request with several inputs counts as that many, as they fill
the batch dimension of the model; one that would overfill a batch closes it and begins the next. Time is an argument and
never goes back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from controlplane.core.money import split_by_counts

Output = TypeVar("Output")

SHORTEST_BUCKET_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Limits of a batch: inputs it holds at most, and how long its oldest member waits at most."""

    max_batch_size: int = 1
    max_wait_us: int = 0

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be 1 or more, not {self.max_batch_size}")
        if self.max_wait_us < 0:
            raise ValueError(f"max_wait_us must be 0 or more, not {self.max_wait_us}")

    @property
    def on(self) -> bool:
        """Whether anything is ever run together."""
        return self.max_batch_size > 1


class Closing(StrEnum):
    """Why a batch closed."""

    FULL = "full"
    NO_ROOM = "no_room"
    """The next request would have overfilled it."""
    WAITED = "waited"
    POLICY_CHANGED = "policy_changed"


@dataclass(frozen=True, slots=True)
class Member:
    """A request that may share a batch; `shape` is its bucket, `inputs` how much of the batch it takes."""

    id: int
    shape: str
    arrived_us: int
    inputs: int = 1

    def __post_init__(self) -> None:
        if self.inputs < 1:
            raise ValueError(f"member {self.id} must have at least one input, not {self.inputs}")


@dataclass(frozen=True, slots=True)
class Batch:
    """Members that run together, in order of arrival."""

    shape: str
    members: tuple[Member, ...]
    closed_us: int
    closing: Closing

    @property
    def inputs(self) -> int:
        return sum(member.inputs for member in self.members)


class _OpenBatch:
    __slots__ = ("inputs", "members", "oldest_us")

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.inputs = 0
        self.oldest_us = 0

    def add(self, member: Member) -> None:
        self.oldest_us = min(self.oldest_us, member.arrived_us) if self.members else member.arrived_us
        self.members[member.id] = member
        self.inputs += member.inputs

    def remove(self, member_id: int) -> None:
        member = self.members.pop(member_id)
        self.inputs -= member.inputs
        if self.members and member.arrived_us == self.oldest_us:
            self.oldest_us = min(other.arrived_us for other in self.members.values())


class Batcher:
    """The open batches of one place where work runs, at most one per shape bucket."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self._open: dict[str, _OpenBatch] = {}
        self._shape_of: dict[int, str] = {}

    @property
    def waiting(self) -> int:
        """Members that no batch has taken yet."""
        return len(self._shape_of)

    def offer(self, member: Member, now_us: int) -> list[Batch]:
        """Take a member in; returns the batches that closed, those whose time had come before it first.

        Raises ValueError when a member of that id waits already.
        """
        if member.id in self._shape_of:
            raise ValueError(f"member {member.id} waits already")
        closed = self.due(now_us)
        at = self._open.get(member.shape)
        if at is not None and at.inputs + member.inputs > self.policy.max_batch_size:
            closed.append(self._close(member.shape, now_us, Closing.NO_ROOM))
            at = None
        if at is None:
            at = self._open[member.shape] = _OpenBatch()
        at.add(member)
        self._shape_of[member.id] = member.shape
        if at.inputs >= self.policy.max_batch_size:
            closed.append(self._close(member.shape, now_us, Closing.FULL))
        elif now_us >= self._deadline_us(at):
            closed.append(self._close(member.shape, now_us, Closing.WAITED))
        return closed

    def cancel(self, member_id: int) -> bool:
        """A member leaves; False when it does not wait. The next oldest decides when its batch closes."""
        shape = self._shape_of.pop(member_id, None)
        if shape is None:
            return False
        at = self._open[shape]
        at.remove(member_id)
        if not at.members:
            del self._open[shape]
        return True

    def due(self, now_us: int) -> list[Batch]:
        """Close the batches whose oldest member has waited long enough, the longest wait first."""
        if not self._open:
            return []
        late = [(self._deadline_us(at), shape) for shape, at in self._open.items() if now_us >= self._deadline_us(at)]
        return [self._close(shape, now_us, Closing.WAITED) for _, shape in sorted(late)]

    def next_due_us(self) -> int | None:
        """When `due` has something to close next, if nothing arrives or leaves; None without open batches."""
        return min((self._deadline_us(at) for at in self._open.values()), default=None)

    def set_policy(self, policy: BatchPolicy, now_us: int) -> list[Batch]:
        """Other limits from now on; returns the batches that are full or late by these."""
        self.policy = policy
        full = sorted(shape for shape, at in self._open.items() if at.inputs >= policy.max_batch_size)
        return [self._close(shape, now_us, Closing.POLICY_CHANGED) for shape in full] + self.due(now_us)

    def _deadline_us(self, at: _OpenBatch) -> int:
        return at.oldest_us + self.policy.max_wait_us

    def _close(self, shape: str, now_us: int, closing: Closing) -> Batch:
        members = tuple(self._open.pop(shape).members.values())
        for member in members:
            del self._shape_of[member.id]
        return Batch(shape, members, now_us, closing)


@dataclass(frozen=True, slots=True)
class Rows(Generic[Output]):
    """What one member gets of a batch's outputs."""

    member: Member
    outputs: Sequence[Output]


class OutputCountError(Exception):
    """A batch came back with another number of outputs than it had inputs: nobody's output can be told."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"the batch had {expected} inputs and came back with {got} outputs, so none can be given out")
        self.expected = expected
        self.got = got


def split(members: Iterable[Member], outputs: Sequence[Output]) -> list[Rows[Output]]:
    """Each member's own outputs, in the order in which its inputs went in. Raises OutputCountError."""
    members = tuple(members)
    expected = sum(member.inputs for member in members)
    if len(outputs) != expected:
        raise OutputCountError(expected, len(outputs))
    rows, at = [], 0
    for member in members:
        rows.append(Rows(member, outputs[at : at + member.inputs]))
        at += member.inputs
    return rows


def share_tokens(total: int, expected: Sequence[int]) -> list[int]:
    """Each member's part of the prompt tokens that a server counted for the whole batch; they add up to `total`.

    In proportion to what was expected of each, by largest remainder; evenly when nothing was.
    """
    weights = expected if sum(expected) else [1] * len(expected)
    parts = split_by_counts(total, dict(enumerate(weights)))
    return [parts[index] for index in range(len(expected))]


def length_bucket(tokens: int) -> int:
    """The power of two, from 64 up, that an input of so many tokens is padded to: inputs of one bucket go together."""
    return max(SHORTEST_BUCKET_TOKENS, 1 << max(0, tokens - 1).bit_length())


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """How long a batch runs: a fixed part and one per input (linear, as batches of one shape bucket nearly are)."""

    fixed_us: int
    per_input_us: int

    def __post_init__(self) -> None:
        if self.fixed_us < 0 or self.per_input_us < 0:
            raise ValueError(f"times must be 0 or more, not {self.fixed_us} and {self.per_input_us}")

    def service_us(self, inputs: int) -> int:
        """Time of a batch with that many inputs, in microseconds."""
        return self.fixed_us + self.per_input_us * inputs
