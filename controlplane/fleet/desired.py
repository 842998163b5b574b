"""Which revision an agent should apply: known to policy, which lives above and provides it when Django starts."""

from collections.abc import Callable, Iterable, Mapping

Reader = Callable[[Iterable[int]], Mapping[int, int]]
_readers: list[Reader] = []


def provide(reader: Reader) -> None:
    """`reader(agent_ids) -> {agent_id: revision}`; an agent without any desired revision is missing."""
    _readers[:] = [reader]


def desired_revisions(agent_ids: Iterable[int]) -> Mapping[int, int]:
    return _readers[0](agent_ids) if _readers else {}
