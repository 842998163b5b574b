"""Figures from an inference server's Prometheus page: vLLM, SGLang and llama.cpp name them differently.

The reader is our own because of what pages do: a parser of the whole format gives up a page for one bad line or a cut
in its last one, and takes tens of milliseconds of the event loop for a real page. Here a figure that cannot be trusted
is unknown (None), and the others stand.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from controlplane.core.counter_resets import increase

COUNT_MAX: Final = 1 << 53
"""Beyond it a sample is a sentinel or no longer exact."""

RUNNING, WAITING, KV_USED = "running", "waiting", "kv_used"
PROMPT, OUTPUT, STARTED = "prompt_tokens", "output_tokens", "started_s"
GPU_USED, GPU_FREE = "gpu_used_mib", "gpu_free_mib"
COUNTED: Final = (PROMPT, OUTPUT)
MIB: Final = 1 << 20

NAMES: Final[dict[bytes, str]] = {
    b"vllm:num_requests_running": RUNNING,
    b"vllm:num_requests_waiting": WAITING,
    b"vllm:kv_cache_usage_perc": KV_USED,
    b"vllm:gpu_cache_usage_perc": KV_USED,
    b"vllm:prompt_tokens_total": PROMPT,
    b"vllm:generation_tokens_total": OUTPUT,
    b"sglang:num_running_reqs": RUNNING,
    b"sglang:num_queue_reqs": WAITING,
    b"sglang:token_usage": KV_USED,
    b"sglang:prompt_tokens_total": PROMPT,
    b"sglang:generation_tokens_total": OUTPUT,
    b"llamacpp:requests_processing": RUNNING,
    b"llamacpp:requests_deferred": WAITING,
    b"llamacpp:kv_cache_usage_ratio": KV_USED,
    b"llamacpp:prompt_tokens_total": PROMPT,
    b"llamacpp:tokens_predicted_total": OUTPUT,
    b"process_start_time_seconds": STARTED,
    # of DCGM, on pages that carry the exporter's lines too
    b"DCGM_FI_DEV_FB_USED": GPU_USED,
    b"DCGM_FI_DEV_FB_FREE": GPU_FREE,
}
ENGINES: Final = {b"vllm": "vLLM", b"sglang": "SGLang", b"llamacpp": "llama.cpp"}

_SAMPLE: Final = re.compile(
    rb'^(%b)(\{(?:[^"\n}]|"(?:[^"\\\n]|\\.)*")*\})?[ \t]+(\S+)(?:[ \t]+-?[0-9.]+)?(?:[ \t]+#.*)?[ \t]*\r?$'
    % b"|".join(map(re.escape, NAMES)),
    re.MULTILINE,
)
_NAME: Final = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OTHER_RANK: Final = re.compile(rb'[{,](?:tp|pp)_rank="(?!0")')


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One page. Requests are counts, `kv_used` is 0 to 1 (of several engines the fullest), tokens are counters since
    the server's start, `started_s` is Unix time, GPU memory is over all GPUs. None is unknown, never zero."""

    engine: str = ""
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    started_s: float | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None


def read_page(page: bytes, *, whole: bool = True) -> EngineReading:
    """Read a page; of one that is cut off (not `whole`, or without a line end at its end) the family at the cut is
    unknown, because the rest of it is missing."""
    cut_name = b""
    if not whole or not page.endswith(b"\n"):
        page, cut_name = before_the_cut(page)
    values: dict[str, list[float]] = {}
    engine = ""
    for name, labels, text in _SAMPLE.findall(page):
        engine = engine or ENGINES.get(name.partition(b":")[0], "")
        if not _OTHER_RANK.search(labels):
            value = math.nan if name == cut_name else number_of(text)
            values.setdefault(NAMES[name], []).append(value)
    used, free = count_of(values.get(GPU_USED)), count_of(values.get(GPU_FREE))
    return EngineReading(
        engine=engine,
        running=count_of(values.get(RUNNING)),
        waiting=count_of(values.get(WAITING)),
        kv_used=_share(values.get(KV_USED)),
        prompt_tokens=count_of(values.get(PROMPT)),
        output_tokens=count_of(values.get(OUTPUT)),
        started_s=_instant(values.get(STARTED)),
        gpu_used_bytes=None if used is None else used * MIB,
        gpu_total_bytes=None if used is None or free is None else (used + free) * MIB,
    )


def before_the_cut(page: bytes) -> tuple[bytes, bytes]:
    """The whole lines of a page, and the name of the samples among which it stops; empty between two families."""
    lines, _, rest = page.rpartition(b"\n")
    last = _NAME.match(lines.rpartition(b"\n")[2])
    begun = _NAME.match(rest)
    if begun is not None and begun.end() < len(rest):
        cut = begun.group()
    elif last is not None and last.group().startswith(rest):
        cut = last.group()
    else:
        cut = b""
    return lines + b"\n", cut


def number_of(text: bytes | str) -> float:
    """A value as it stands on a metrics page; NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def count_of(values: list[float] | None) -> int | None:
    """The sum over labels; unknown when one part of it is: -1, NaN, infinite, or a sentinel."""
    if not values or not all(0 <= value <= COUNT_MAX for value in values):
        return None
    return int(sum(values))


def _share(values: list[float] | None) -> float | None:
    """The largest over labels; unknown when one is no share."""
    return max(values) if values and all(0 <= value <= 1 for value in values) else None


def _instant(values: list[float] | None) -> float | None:
    return max(values) if values and all(0 < value <= COUNT_MAX for value in values) else None


class EngineTotals:
    """Tokens that a server has counted since the agent watches it, across its restarts."""

    def __init__(self) -> None:
        self.restarts = 0
        self.counted: dict[str, int | None] = dict.fromkeys(COUNTED)
        """None until two readings told it."""
        self._before: dict[str, int] = {}
        self._started_s: float | None = None

    def take(self, reading: EngineReading) -> None:
        """The next reading. A figure that is unknown in it goes on from the last known one."""
        anew = self._restarted(reading)
        for name in COUNTED:
            value: int | None = getattr(reading, name)
            if value is None:
                continue
            before = self._before.get(name)
            self._before[name] = value
            if before is not None:
                self.counted[name] = (self.counted[name] or 0) + increase((0 if anew else before, value))

    def _restarted(self, reading: EngineReading) -> bool:
        """A new start time says so; without one, a counter that went back does."""
        was, now = self._started_s, reading.started_s
        self._started_s = was if now is None else now
        back = any(
            value is not None and value < self._before.get(name, 0)
            for name in COUNTED
            for value in [getattr(reading, name)]
        )
        anew = back if was is None or now is None else now > was
        self.restarts += anew
        return anew
