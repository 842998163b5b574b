"""Generated arrivals, departures and passing time for the batcher, and what happened to each request."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from controlplane.core.batching import Batch, Batcher, BatchPolicy, Member


@dataclass(frozen=True)
class Step:
    """After `pause_us`, a request arrives (`inputs` over 0) or the `leaver`-th of those that wait leaves."""

    pause_us: int
    shape: str = "a"
    inputs: int = 0
    leaver: int = 0


pauses = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 40))
arrivals = st.builds(Step, pause_us=pauses, shape=st.sampled_from("aaabc"), inputs=st.integers(1, 4))
departures = st.builds(Step, pause_us=pauses, leaver=st.integers(0, 20))
stories = st.lists(st.one_of(arrivals, arrivals, arrivals, departures), max_size=60)
policies = st.builds(BatchPolicy, max_batch_size=st.integers(1, 8), max_wait_us=st.integers(0, 60))


@dataclass
class World:
    """A batcher whose timer is exact; `extra_looks` asks it more often than needed."""

    policy: BatchPolicy
    extra_looks: bool = False
    now_us: int = 1_000
    closed: list[Batch] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    members: dict[int, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batcher = Batcher(self.policy)

    @property
    def waiting(self) -> list[int]:
        gone = self.left | {member.id for batch in self.closed for member in batch.members}
        return [number for number in self.members if number not in gone]

    def pass_time(self, until_us: int) -> None:
        while True:
            due_us = self.batcher.next_due_us()
            if due_us is None or due_us > until_us:
                break
            self.now_us = max(self.now_us, due_us)
            found = self.batcher.due(self.now_us)
            assert found, "next_due_us named an instant at which nothing was due"
            self.closed += found
        while self.extra_looks and self.now_us < until_us:
            self.now_us += 1
            self.closed += self.batcher.due(self.now_us)
        self.now_us = until_us

    def take(self, step: Step) -> None:
        self.pass_time(self.now_us + step.pause_us)
        if step.inputs:
            member = Member(len(self.members) + 1, step.shape, self.now_us, step.inputs)
            self.members[member.id] = member
            self.closed += self.batcher.offer(member, self.now_us)
        elif self.waiting:
            leaver = self.waiting[step.leaver % len(self.waiting)]
            assert self.batcher.cancel(leaver)
            self.left.add(leaver)

    def run(self, steps: list[Step]) -> "World":
        for step in steps:
            self.take(step)
            assert self.batcher.waiting == len(self.waiting)
        self.pass_time(self.now_us + self.policy.max_wait_us)
        return self
