"""What arrives in a simulation, as columns: one row a request, in order of arrival.

A trace says when and how long, but not what its clients declared: here they ask for twice what they get. Tenants come
from the trace where it names them, else from shares with a seed; the class is said for each trace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from controlplane.lab.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Workload:
    """Columns of equal length; `at_us` never falls and starts where the simulation does.

    `class_of` and `tenant_of` are indexes into `classes` and `tenants` (slugs); `asked` is the output limit that the
    client sends, 0 where it leaves that to the class.
    """

    classes: tuple[str, ...]
    tenants: tuple[str, ...]
    at_us: list[int] = field(default_factory=list)
    class_of: list[int] = field(default_factory=list)
    tenant_of: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    tail_100ns: list[int] = field(default_factory=list)
    """What a trace's resolution has beyond the microsecond; empty where none has."""

    def __len__(self) -> int:
        return len(self.at_us)


@dataclass(frozen=True, slots=True)
class Stream:
    """A trace with the class of its requests, and what is changed about it."""

    requests: Sequence[TraceRequest]
    class_slug: str
    rate: float = 1.0
    """So many times as fast."""
    stretch: float = 1.0
    """So many times as long, prompts and outputs alike."""
    shift_us: int = 0


def zipf_shares(count: int, exponent: float = 1.0) -> list[float]:
    """Shares of tenants from the largest to the smallest; 0 is even."""
    return [1 / (rank**exponent) for rank in range(1, count + 1)]


def assemble(
    streams: Iterable[Stream],
    tenants: Sequence[str],
    *,
    seed: int = 0,
    shares: Sequence[float] | None = None,
    until_us: int | None = None,
) -> Workload:
    """Merge traces into one workload. Rows whose trace names a tenant keep it where it is one of `tenants`.

    The others draw theirs by `shares` (even by default) with the seed. Order: arrival, then stream, then line.
    Raises ValueError for no tenant, or a rate or stretch that is not positive.
    """
    if not tenants:
        raise ValueError("a workload needs at least one tenant")
    rng, rows = Random(seed), []  # noqa: S311  a simulation
    bounds = list(accumulate(shares or [1.0] * len(tenants)))
    known = {slug: index for index, slug in enumerate(tenants)}
    classes: dict[str, int] = {}
    for number, stream in enumerate(streams):
        if stream.rate <= 0 or stream.stretch <= 0:
            raise ValueError("a rate and a stretch are positive")
        class_index = classes.setdefault(stream.class_slug, len(classes))
        for line, request in enumerate(stream.requests):
            at_100ns = 10 * stream.shift_us + round(request.at_100ns / stream.rate)
            drawn = bisect_right(bounds, rng.random() * bounds[-1])
            if until_us is not None and at_100ns >= 10 * until_us:
                continue
            tenant = known.get(request.tenant, min(drawn, len(tenants) - 1))
            prompt = max(1, round(request.prompt_tokens * stream.stretch))
            output = max(1, round(request.output_tokens * stream.stretch))
            rows.append((at_100ns, number, line, class_index, tenant, prompt, output))
    rows.sort()
    columns = list(zip(*rows)) if rows else [()] * 7
    at, _, _, class_of, tenant_of, prompts, outputs = (list(column) for column in columns)
    asked = [2 * output for output in outputs]
    at_us, tails = [instant // 10 for instant in at], [instant % 10 for instant in at]
    return Workload(tuple(classes), tuple(tenants), at_us, class_of, tenant_of, prompts, outputs, asked, tails)
