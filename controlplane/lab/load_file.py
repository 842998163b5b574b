"""A load with classes, tenants and jobs as bytes, so that what was replayed can be replayed again to the byte."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from random import Random

import msgspec

from controlplane.lab.items import JobSpec
from controlplane.lab.scenario import Load
from controlplane.lab.workload import Workload

ROWS_MAX = 500_000
BYTES_MAX = 256 << 20
_COLUMNS = ("at_us", "class_of", "tenant_of", "prompt", "output", "asked")


class _Job(msgspec.Struct, array_like=True):
    name: str
    tenant: str
    class_slug: str
    prompts: list[int]
    outputs: list[int]
    submitted_us: int
    deadline_us: int | None


class _File(msgspec.Struct, array_like=True):
    start_us: int
    classes: list[str]
    tenants: list[str]
    columns: list[list[int]]
    cached: list[int]
    jobs: list[_Job]


@dataclass(frozen=True, slots=True)
class KeptLoad:
    """A load as it was recorded. `start_us` is its beginning as Unix time; `cached` has one number a request."""

    load: Load
    start_us: int
    cached: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Requests and items together."""
        return len(self.load.workload) + sum(len(job.prompts) for job in self.load.jobs)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a load that is replayed: all of it, or one stretch whose place the seed drew."""

    kept: KeptLoad
    recorded: int
    replayed: int
    from_us: int
    to_us: int

    @property
    def whole(self) -> bool:
        return self.replayed == self.recorded


def load_as_bytes(kept: KeptLoad) -> bytes:
    """Compressed; equal loads give equal bytes."""
    work = kept.load.workload
    jobs = [
        _Job(
            job.name, job.tenant, job.class_slug, list(job.prompts), list(job.outputs), job.submitted_us,
            job.deadline_us,
        )
        for job in kept.load.jobs
    ]  # fmt: skip
    columns = [list(getattr(work, name)) for name in _COLUMNS]
    file = _File(kept.start_us, list(work.classes), list(work.tenants), columns, list(kept.cached), jobs)
    return zlib.compress(msgspec.msgpack.encode(file), 6)


def read_load(content: bytes) -> KeptLoad:
    """What `load_as_bytes` wrote. Raises ValueError for anything else."""
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(content, BYTES_MAX)
        file = msgspec.msgpack.decode(plain, type=_File)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"is no recorded load: {error}") from None
    if not unpacker.eof or len(file.columns) != len(_COLUMNS) or len({len(column) for column in file.columns}) != 1:
        raise ValueError("is no recorded load: it is cut off")
    work = Workload(tuple(file.classes), tuple(file.tenants), **dict(zip(_COLUMNS, file.columns, strict=True)))
    work.tail_100ns.extend([0] * len(work))
    jobs = tuple(
        JobSpec(
            job.name, job.tenant, job.class_slug, job.prompts, job.outputs, submitted_us=job.submitted_us,
            deadline_us=job.deadline_us,
        )
        for job in file.jobs
    )  # fmt: skip
    return KeptLoad(Load(work, jobs), file.start_us, file.cached)


def stretch_of(kept: KeptLoad, rows_max: int, seed: int) -> Stretch:
    """At most so many requests and items: neighbours in time, for thinned traffic would wait for nobody.

    Of each job the same share of items stays, its first ones; instants count from the stretch's start.
    """
    work, total = kept.load.workload, kept.rows
    end_us = work.at_us[-1] if len(work) else 0
    if total <= rows_max:
        return Stretch(kept, total, total, 0, end_us)
    keep = max(1, len(work) * rows_max // total) if len(work) else 0
    first = Random(seed).randrange(len(work) - keep + 1) if keep else 0  # noqa: S311  a sample
    from_us = work.at_us[first] if keep else 0
    to_us = work.at_us[first + keep - 1] if keep else 0
    columns = {name: getattr(work, name)[first : first + keep] for name in _COLUMNS}
    columns["at_us"] = [at - from_us for at in columns["at_us"]]
    part = Workload(work.classes, work.tenants, **columns, tail_100ns=[0] * keep)
    jobs = tuple(_part_of(job, rows_max, total, from_us) for job in kept.load.jobs)
    cut = KeptLoad(Load(part, jobs), kept.start_us + from_us, kept.cached[first : first + keep])
    return Stretch(cut, total, cut.rows, from_us, to_us)


def _part_of(job: JobSpec, rows_max: int, total: int, from_us: int) -> JobSpec:
    keep = max(1, len(job.prompts) * rows_max // total)
    return JobSpec(
        job.name, job.tenant, job.class_slug, job.prompts[:keep], job.outputs[:keep],
        submitted_us=max(0, job.submitted_us - from_us),
        deadline_us=None if job.deadline_us is None else job.deadline_us - from_us,
    )  # fmt: skip
