"""GPU memory from a page of DCGM's exporter: `DCGM_FI_DEV_FB_*`, in MiB, one line for each GPU or MIG instance.

The page may be read in any state. What cannot be trusted is unknown (None), never zero, and the rest stands: a value
that is none, or one of DCGM's sentinels for "not there"; a line that is broken; a cut; a GPU that is named and missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from controlplane.agent.engine_metrics import COUNT_MAX, MIB, before_the_cut, number_of

USED, FREE, RESERVED, TOTAL = "USED", "FREE", "RESERVED", "TOTAL"

_LINE: Final = re.compile(
    rb"DCGM_FI_DEV_FB_(USED|FREE|RESERVED|TOTAL)"
    rb'(?:\{((?:[^"\n}]|"(?:[^"\\\n]|\\.)*")*)\})?[ \t]+(\S+)(?:[ \t]+-?[0-9]+)?[ \t]*\r?'
)
_FAMILY: Final = re.compile(rb"DCGM_FI_DEV_FB_(USED|FREE|RESERVED|TOTAL)\b")
_LABEL: Final = re.compile(rb'(?:^|,)[ \t]*(gpu|UUID|uuid|GPU_I_ID)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Over the GPUs that were asked for. None is unknown."""

    used_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(slots=True)
class _Gpu:
    """A GPU, or MIG instance of one: its index and UUID, empty where the page has none, and MiB by family."""

    index: str
    uuid: str
    instance: str
    mib: dict[str, float] = field(default_factory=dict)

    def take(self, family: str, value: float) -> None:
        """A GPU has a line for each container that shares it: the same value. Two values are nobody's."""
        before = self.mib.setdefault(family, value)
        if before != value:
            self.mib[family] = math.nan

    def answers_to(self, name: str) -> bool:
        """`0`, `GPU-...`, and with `/7` its MIG instance 7."""
        whole, _, instance = name.partition("/")
        return whole in (self.index, self.uuid) and instance in ("", self.instance)


def read_gpus(page: bytes, chosen: Collection[str] = (), *, whole: bool = True) -> GpuMemory | None:
    """Memory of the chosen GPUs, of all on the page where none is named; None for a page without any GPU's memory.

    Total is DCGM's own, else what is used, free and reserved together. A cut-off page (not `whole`, or without a line
    end at its end) has no family that it was cut in.
    """
    cut = b""
    if not whole or not page.endswith(b"\n"):
        whole = False
        page, cut = before_the_cut(page)
    gpus, broken = _gpus(page)
    if not gpus:
        return None
    broken |= {family for family in (USED, FREE, RESERVED, TOTAL) if cut == b"DCGM_FI_DEV_FB_" + family.encode()}
    wanted = _wanted(gpus, chosen)
    if wanted is None:
        return GpuMemory()
    used = _sum(_of(gpu, USED, broken) for gpu in wanted)
    total = _sum(_total(gpu, broken, whole=whole) for gpu in wanted)
    if used is None or (total is not None and total < used):
        return GpuMemory()
    return GpuMemory(used * MIB, None if total is None else total * MIB)


def _gpus(page: bytes) -> tuple[list[_Gpu], set[str]]:
    """The GPUs of a page, and the families that have a line which is none."""
    found: dict[tuple[str, str], _Gpu] = {}
    broken: set[str] = set()
    for line in page.split(b"\n"):
        begun = _FAMILY.match(line)
        if begun is None:
            continue
        family = begun[1].decode()
        match = _LINE.fullmatch(line)
        labels = {} if match is None else _labels(match[2] or b"")
        index, uuid = labels.get("gpu", ""), labels.get("UUID") or labels.get("uuid", "")
        if match is None or not (index or uuid):
            broken.add(family)
            continue
        instance = labels.get("GPU_I_ID", "")
        gpu = found.setdefault((uuid or index, instance), _Gpu(index, uuid, instance))
        gpu.take(family, number_of(match[3]))
    return list(found.values()), broken


def _labels(text: bytes) -> Mapping[str, str]:
    return {name.decode(): value.decode("utf-8", "replace") for name, value in _LABEL.findall(text)}


def _wanted(gpus: Iterable[_Gpu], chosen: Collection[str]) -> list[_Gpu] | None:
    """Each once; None where a name has no GPU, or, of a page of several machines, more than one."""
    if not chosen:
        return _each_once(gpus)
    found: dict[int, _Gpu] = {}
    for name in chosen:
        own = _each_once(gpu for gpu in gpus if gpu.answers_to(name))
        if len({gpu.uuid or gpu.index for gpu in own}) != 1:
            return None
        found |= {id(gpu): gpu for gpu in own}
    return list(found.values())


def _each_once(gpus: Iterable[_Gpu]) -> list[_Gpu]:
    """Without the MIG instances of a GPU that has a line of its own."""
    gpus = list(gpus)
    on_their_own = {gpu.uuid or gpu.index for gpu in gpus if not gpu.instance}
    return [gpu for gpu in gpus if not gpu.instance or (gpu.uuid or gpu.index) not in on_their_own]


def _total(gpu: _Gpu, broken: Collection[str], *, whole: bool) -> int | None:
    if TOTAL in gpu.mib or TOTAL in broken:
        return _of(gpu, TOTAL, broken)
    parts = [USED, FREE]
    if not whole or RESERVED in gpu.mib or RESERVED in broken:
        parts.append(RESERVED)  # older exporters have none; on a page that was cut it may only be missing
    return _sum(_of(gpu, family, broken) for family in parts)


def _of(gpu: _Gpu, family: str, broken: Collection[str]) -> int | None:
    value = gpu.mib.get(family, math.nan)
    return int(value) if family not in broken and 0 <= value <= COUNT_MAX else None


def _sum(values: Iterable[int | None]) -> int | None:
    """None when one of them is."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
