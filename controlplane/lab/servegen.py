"""Traffic of many clients from their windows, as ServeGen publishes them, expanded with a seed.

A row is one client in one window of ten minutes: its rate, and the shape of a gamma or Weibull distribution of the gaps
between its requests (Xiang et al., "ServeGen: Workload Characterization and Generation of LLM Serving in Production").
A window has as many requests as its rate says; their gaps are drawn with its shape and stretched to fill it. Draws are
by seed, client and window, so a cut of the windows holds the same requests. Token counts are no part of the windows:
they come from quantile tables of other public traces.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Final

from controlplane.lab.synthetic import (
    CODE_OUTPUT,
    CODE_PROMPT,
    CONVERSATION_OUTPUT,
    CONVERSATION_PROMPT,
    Quantiles,
    draw,
)
from controlplane.lab.traces import BadLine, Trace, TraceError, TraceRequest

FORMAT: Final = "servegen"
COLUMN: Final = "param_shape"
WINDOW_US: Final = 600_000_000
REQUESTS_MAX: Final = 2_000_000
RATE_MAX: Final = 100_000.0
TOKENS: Final[dict[str, tuple[Quantiles, Quantiles]]] = {
    "code": (CODE_PROMPT, CODE_OUTPUT), "conversation": (CONVERSATION_PROMPT, CONVERSATION_OUTPUT),
}  # fmt: skip


def has_windows(path: Path) -> bool:
    """Whether a file's first line is the header of client windows."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return COLUMN in file.readline(1 << 16)


def expand(
    path: Path, *, seed: int, from_us: int = 0, until_us: int | None = None, tokens: str = "conversation"
) -> Trace:
    """The requests of [from_us, until_us), counted from the file's first window; the first request is at 0.

    Tenants are the clients. Raises TraceError for an unusable file or too many requests, OSError for an unreadable one.
    """
    if tokens not in TOKENS:
        raise ValueError(f"tokens={tokens}: known are {', '.join(sorted(TOKENS))}")
    rows, refused = _rows(path)
    if not rows:
        why = f"; line {refused[0].line}: {refused[0].reason}" if refused else ""
        raise TraceError(f"{path.name} has no usable line{why}")
    origin_us = min(start_us for _, start_us, *_ in rows)
    wanted = [
        row
        for row in rows
        if row[1] - origin_us + WINDOW_US > from_us and (until_us is None or row[1] - origin_us < until_us)
    ]
    if sum(count for _, _, count, *_ in wanted) > REQUESTS_MAX:
        raise TraceError(f"{path.name} has over {REQUESTS_MAX:,} requests there: cut it with :from_h= and :for_h=")
    found: list[TraceRequest] = []
    for client, start_us, count, kind, shape in wanted:
        rng = Random(f"{seed}:{client}:{start_us}")  # noqa: S311  a simulation
        for passed_us in _instants(count, kind, shape, rng):
            prompt, output = (draw(table, rng) for table in TOKENS[tokens])
            at_us = start_us - origin_us + passed_us
            if at_us >= from_us and (until_us is None or at_us < until_us):
                found.append(TraceRequest(at_us, prompt, max(1, output), tenant=f"client-{client}"))
    if not found:
        raise TraceError(f"{path.name} has no request in that time")
    found.sort(key=lambda request: (request.at_us, request.tenant))
    first_us = found[0].at_us
    return Trace(FORMAT, tuple(_moved(request, first_us) for request in found), tuple(refused))


def _moved(request: TraceRequest, by_us: int) -> TraceRequest:
    return TraceRequest(request.at_us - by_us, request.prompt_tokens, request.output_tokens, tenant=request.tenant)


def _rows(path: Path) -> tuple[list[tuple[int, int, int, str, float]], list[BadLine]]:
    """(client, start in us, requests, distribution, shape) of the good lines, and the others."""
    rows, refused = [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                try:
                    rows.append(_row(row))
                except (KeyError, TypeError, ValueError) as error:
                    why = f"no column {error}" if isinstance(error, KeyError) else str(error)
                    refused.append(BadLine(reader.line_num, why))
        except (UnicodeDecodeError, csv.Error) as error:
            raise TraceError(f"{path.name} is no CSV: {error}") from None
    return rows, refused


def _row(row: dict[str, str]) -> tuple[int, int, int, str, float]:
    client, start_s, rate = int(row["client_id"]), float(row["window_start_s"]), float(row["rate_rps"])
    kind, shape = row["distribution"].strip().lower(), float(row[COLUMN])
    if kind not in ("gamma", "weibull"):
        raise ValueError(f"the distribution is Gamma or Weibull, not {row['distribution'][:40]!r}")
    if not 0 < rate <= RATE_MAX or not 0 < shape <= 1_000 or start_s < 0:
        raise ValueError("a window has a rate and a shape above 0, and does not start before 0")
    return client, round(start_s * 1e6), round(rate * WINDOW_US / 1e6), kind, shape


def _instants(count: int, kind: str, shape: float, rng: Random) -> Iterator[int]:
    """So many instants in a window, whose gaps, the last one to its end with them, have that shape."""
    gaps = [
        rng.gammavariate(shape, 1.0) if kind == "gamma" else rng.weibullvariate(1.0, shape) for _ in range(count + 1)
    ]
    total = sum(gaps)
    for passed in list(accumulate(gaps))[:-1]:
        yield min(WINDOW_US - 1, int(passed / total * WINDOW_US)) if total else 0
