"""Figures from Triton's metrics page (`nv_*`): what waits for execution, and how large its batches are.

The page is read with the same care as other servers': a figure that cannot be trusted is unknown, the others stand. Of
a page that is cut off the family at the cut is unknown, because the rest of it is missing. Values that no count has
(negative, not finite, beyond 2^53) are sentinels and make their figure unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from controlplane.agent.engine_metrics import count_of, number_of
from controlplane.core.counter_resets import increase

PENDING: Final = "nv_inference_pending_request_count"
INFERENCES: Final = "nv_inference_count"
EXECUTIONS: Final = "nv_inference_exec_count"
GPU_USED: Final = "nv_gpu_memory_used_bytes"
GPU_TOTAL: Final = "nv_gpu_memory_total_bytes"
COUNTED: Final = {"inferences": INFERENCES, "executions": EXECUTIONS}
OF_GPUS: Final = (GPU_USED, GPU_TOTAL)
"""These have no model."""
FAMILIES: Final = (PENDING, INFERENCES, EXECUTIONS, *OF_GPUS)

_LINE: Final = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?[0-9.]+)?[ \t]*")
_NAME: Final = re.compile(r"(?:# (?:HELP|TYPE) )?([a-zA-Z_:][a-zA-Z0-9_:]*)")
_MODEL: Final = re.compile(r'(?:^|,)model="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class TritonReading:
    """One page, of one model over all its versions; memory of all GPUs. `seen`: it is a Triton's page. None is unknown,
    never zero."""

    seen: bool = False
    waiting: int | None = None
    inferences: int | None = None
    executions: int | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None


def read_triton_page(page: bytes, model: str, *, whole: bool = True) -> TritonReading:
    """Read a page for a model, or for all of them where none is named."""
    text = page.decode("utf-8", "replace")
    lines = text.split("\n")
    rest = lines.pop()
    unsure = set(_families_at_the_cut(lines, rest)) if rest or not whole else set()
    values: dict[str, list[float]] = {}
    for line in lines:
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is not None and match[1] in FAMILIES and (match[1] in OF_GPUS or _is_of(match[2] or "", model)):
            values.setdefault(match[1], []).append(number_of(match[3]))
    counts = {name: None if name in unsure else count_of(values.get(name)) for name in FAMILIES}
    return TritonReading(
        "\nnv_" in "\n" + text, counts[PENDING], counts[INFERENCES], counts[EXECUTIONS], counts[GPU_USED],
        counts[GPU_TOTAL],
    )  # fmt: skip


def _families_at_the_cut(lines: list[str], rest: str) -> Iterator[str]:
    last = _NAME.match(lines[-1]) if lines else None
    if last is not None:
        yield last[1]
    begun = _NAME.match(rest)
    if begun is not None:
        # The cut may be inside the name itself.
        yield from (name for name in FAMILIES if name.startswith(begun[1]))


def _is_of(labels: str, model: str) -> bool:
    if not model:
        return True
    found = _MODEL.search(labels)
    return found is not None and re.sub(r"\\(.)", r"\1", found[1]) == model


class TritonTotals:
    """Inferences, and the executions that ran them, since the agent watches the server, across its restarts.

    Triton tells no start time: a counter that went back says that it began again.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self.counted: dict[str, int | None] = dict.fromkeys(COUNTED)
        """None until two readings told it."""
        self._before: dict[str, int] = {}

    def take(self, reading: TritonReading) -> None:
        """The next reading. A figure that is unknown in it goes on from the last known one."""
        now: dict[str, int | None] = {"inferences": reading.inferences, "executions": reading.executions}
        known = {name: value for name, value in now.items() if value is not None}
        anew = any(value < self._before.get(name, 0) for name, value in known.items())
        self.restarts += anew
        for name, value in known.items():
            before = self._before.get(name)
            if before is not None:
                self.counted[name] = (self.counted[name] or 0) + increase((0 if anew else before, value))
            self._before[name] = value
