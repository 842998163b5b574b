"""What the fleet has to know of workload classes and contracts, which live above it.

The contracts app provides both when Django starts; the fleet only asks, so imports go one way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.fleet.models import Pool


@dataclass(frozen=True, slots=True)
class ServedClass:
    """A class that is not archived. `model_names` empty allows every model."""

    slug: str
    name: str
    kind: str
    min_share_ppm: int
    model_names: tuple[str, ...] = ()

    def serves(self, pool: Pool, model_name: str) -> bool:
        """True when the pool serves this class: its own class, or one that names the pool's model."""
        return self.slug in (pool.interactive_class, pool.batch_class) or model_name in self.model_names

    def allows(self, model_name: str) -> bool:
        return not self.model_names or model_name in self.model_names


ClassReader = Callable[[], Sequence[ServedClass]]
RoomReader = Callable[[Pool, datetime], Sequence[str]]
_readers: dict[str, Callable[..., Sequence]] = {}


def provide(*, classes: ClassReader, room_warnings: RoomReader) -> None:
    """Called once by the app that owns classes and contracts."""
    _readers.update(classes=classes, room_warnings=room_warnings)


def served_classes() -> Sequence[ServedClass]:
    """Every class that is not archived, by slug."""
    return _readers["classes"]()


def room_warnings(pool: Pool, now: datetime) -> Sequence[str]:
    """Sentences about contracts that the pool's lend_p95 leaves no room, with what to do."""
    return _readers["room_warnings"](pool, now)
