"""What the demo's traffic offers: who asks, where, and when; one JSON file between the demo and its traffic process."""

from pathlib import Path

import msgspec


class Target(msgspec.Struct, frozen=True):
    """An agent's tenant-facing address."""

    agent: str
    pool: str
    address: str


class Client(msgspec.Struct, frozen=True):
    """A key of a tenant with the class it asks for and its share of the interactive requests."""

    tenant: str
    secret: str
    workload_class: str
    share: float


class Source(msgspec.Struct, frozen=True):
    """Interactive requests of one pool: a trace file, or seeded synthetic ones at a rate with a burst."""

    pool: str
    model: str
    rate_per_s: float = 0.0
    trace: str = ""
    speed: float = 1.0
    burst_first_s: float = 0.0
    burst_every_s: float = 0.0
    burst_length_s: float = 0.0
    burst_factor: float = 1.0
    prompt_max: int = 8_000
    output_max: int = 1_000


class JobPlan(msgspec.Struct, frozen=True):
    """A batch job with items that agents lease, its tokens those of a mean item; a new one follows when it ends."""

    tenant: str
    secret: str
    pool: str
    model: str
    workload_class: str
    items: int
    prompt_tokens: int
    output_tokens: int
    deadline_s: int


class TrafficPlan(msgspec.Struct, frozen=True):
    """`cancel_share` of the streamed requests are given up by their client after some chunks."""

    control_plane: str
    seed: int
    targets: list[Target]
    clients: dict[str, list[Client]]
    sources: list[Source]
    jobs: list[JobPlan]
    cancel_share: float = 0.01
    result: str = ""
    ends: str = ""
    """A file that gets a line `request-id end` for each request whose end its client saw."""
    drain_s: float = 45.0
    """How long clients wait for their answers once traffic is to stop."""


class TrafficResult(msgspec.Struct):
    """What the clients saw. `failed` are promises that were broken; tokens are those of completed requests."""

    offered: int = 0
    admitted: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    unreachable: int = 0
    rejected_by_reason: dict[str, int] = {}
    failed_by_reason: dict[str, int] = {}
    prompt_tokens: int = 0
    output_tokens: int = 0
    jobs_submitted: int = 0

    @property
    def rejected(self) -> int:
        return sum(self.rejected_by_reason.values())


def read_plan(path: Path) -> TrafficPlan:
    return msgspec.json.decode(path.read_bytes(), type=TrafficPlan)


def write_json(path: Path, document: object) -> None:
    """Whole or not at all: the file appears by rename, readable by its owner only."""
    part = path.with_suffix(path.suffix + ".part")
    part.touch(mode=0o600)
    part.write_bytes(msgspec.json.encode(document))
    part.replace(path)
