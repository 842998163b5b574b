"""Public request traces, read line by line: bad lines are named by number, good ones kept.

Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; 100 ns, no zone, read as UTC) and Mooncake
traces (JSON lines: timestamp in ms, input_length, output_length). Times are microseconds from the first request.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

TOKENS_MAX = 2_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_us: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class BadLine:
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """`requests` in order of arrival, the first at 0."""

    format: str
    requests: tuple[TraceRequest, ...]
    refused: tuple[BadLine, ...]

    @property
    def length_us(self) -> int:
        return self.requests[-1].at_us if self.requests else 0


class TraceError(ValueError):
    """The file is none of the known formats, or holds no usable line."""


Row = tuple[int, TraceRequest | str]


def read_trace(path: Path, format: str = "auto") -> Trace:
    """Reads a trace file. Raises TraceError with what to do, OSError when the file cannot be read."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        name = detect(first) if format == "auto" else format
        if name not in READERS:
            raise TraceError(f"{path.name}: unknown format {name}; known are {', '.join(sorted(READERS))}")
        file.seek(0)
        rows = list(READERS[name](file))
    good = [row for _, row in rows if isinstance(row, TraceRequest)]
    refused = tuple(BadLine(line, row) for line, row in rows if isinstance(row, str))
    if not good:
        why = f"; line {refused[0].line}: {refused[0].reason}" if refused else ""
        raise TraceError(f"{path.name} has no usable line{why}")
    start = min(request.at_us for request in good)
    moved = (TraceRequest(r.at_us - start, r.prompt_tokens, r.output_tokens) for r in good)
    return Trace(name, tuple(sorted(moved, key=lambda request: request.at_us)), refused)


def detect(first_line: str) -> str:
    """The format by its first line."""
    if first_line.lstrip().startswith("{"):
        return "mooncake"
    if "ContextTokens" in first_line:
        return "azure"
    raise TraceError("the first line is neither an Azure LLM trace's header nor a Mooncake JSON line: name --format")


def _azure(lines: Iterable[str]) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            at = _instant_us(row["TIMESTAMP"])
            yield reader.line_num, _request(at, row["ContextTokens"], row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            yield reader.line_num, _reason(error)


def _mooncake(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at = round(float(row["timestamp"]) * 1_000)
            yield number, _request(at, row["input_length"], row["output_length"])
        except (KeyError, TypeError, ValueError) as error:
            yield number, _reason(error)


READERS: dict[str, Callable[[Iterable[str]], Iterator[Row]]] = {"azure": _azure, "mooncake": _mooncake}


def _instant_us(text: str) -> int:
    """Microseconds since 1970; the seventh digit of a fraction (100 ns) is cut off."""
    whole, _, fraction = text.strip().partition(".")
    instant = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    return (instant - EPOCH) // MICROSECOND + int(fraction[:6].ljust(6, "0") or 0)


def _request(at_us: int, prompt: object, output: object) -> TraceRequest:
    tokens = [int(str(value)) for value in (prompt, output)]
    if not all(0 <= value <= TOKENS_MAX for value in tokens):
        raise ValueError(f"tokens must lie in 0..{TOKENS_MAX}, not {tokens[0]} and {tokens[1]}")
    return TraceRequest(at_us, tokens[0], tokens[1])


def _reason(error: Exception) -> str:
    return f"no column {error}" if isinstance(error, KeyError) else str(error)
