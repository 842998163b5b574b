"""Public request traces, read line by line: bad lines are named by number, good ones kept.

Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; 100 ns, no zone, read as UTC), BurstGPT
(CSV: Timestamp in s from a start of its own), Mooncake (JSON lines: timestamp in ms from a start of its own), FOCUS
lines of tokens, and our own JSON lines: `at`, `prompt_tokens`, `output_tokens`, and where known `cached_tokens`,
`model`, `tenant`, `id`.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TextIO

TOKENS_MAX = 2_000_000
FOCUS_TOKENS_MAX = 10**15
NAME_CHARS_MAX = 200
LINE_CHARS_MAX = 1 << 20
SPAN_MAX_US = 10 * 366 * 86_400_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
OWN_FIELDS = frozenset({"at", "prompt_tokens", "output_tokens", "cached_tokens", "model", "tenant", "id"})
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as a trace has it; `tenant` and `id` only where the trace names them.

    `at_us` counts from 1970, or from the trace's own start where it has no dates (`FROM_OWN_START`); `read_trace`
    moves it to the first request.
    """

    at_us: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    model: str = ""
    tenant: str = ""
    id: str = ""
    tail_100ns: int = 0
    """What the trace's own resolution has beyond the microsecond."""

    @property
    def at_100ns(self) -> int:
        return 10 * self.at_us + self.tail_100ns


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
        name, lines = open_rows(file, format)
        rows = list(lines)
    good = [row for _, row in rows if isinstance(row, TraceRequest)]
    refused = tuple(BadLine(line, row) for line, row in rows if isinstance(row, str))
    if not good:
        why = f"; line {refused[0].line}: {refused[0].reason}" if refused else ""
        raise TraceError(f"{path.name} has no usable line{why}")
    start = min(request.at_100ns for request in good)
    moved = (_at(request, request.at_100ns - start) for request in good)
    return Trace(name, tuple(sorted(moved, key=lambda request: request.at_100ns)), refused)


def cut(trace: Trace, from_us: int, until_us: int | None) -> Trace:
    """The requests of [from_us, until_us), the first at 0. Raises TraceError where there are none."""
    end_us = SPAN_MAX_US if until_us is None else until_us
    kept = [request for request in trace.requests if from_us <= request.at_us < end_us]
    if not kept:
        raise TraceError("the trace has no request in the hours that are named")
    start = kept[0].at_100ns
    return Trace(trace.format, tuple(_at(request, request.at_100ns - start) for request in kept), trace.refused)


def _at(request: TraceRequest, at_100ns: int) -> TraceRequest:
    return replace(request, at_us=at_100ns // 10, tail_100ns=at_100ns % 10)


def open_rows(file: TextIO, format: str = "auto") -> tuple[str, Iterator[Row]]:
    """The format of an open file, and its lines one by one: (line number, request or why not).

    Raises TraceError for an unknown format.
    """
    try:
        first = file.readline(LINE_CHARS_MAX)
    except UnicodeDecodeError as error:
        raise TraceError(f"the file is not UTF-8 text (byte {error.start})") from None
    name = detect(first) if format == "auto" else format
    if name not in READERS:
        raise TraceError(f"unknown format {name}; known are {', '.join(sorted(READERS))}")
    file.seek(0)
    return name, READERS[name](file)


def detect(first_line: str) -> str:
    """The format by its first line."""
    line = first_line.lstrip()
    if line.startswith("{"):
        return "mooncake" if '"input_length"' in line else "jsonl"
    for name, column in HEADER_COLUMNS.items():
        if column in line:
            return name
    raise TraceError("the first line is the header or the first line of no known trace: name --format")


def _azure(lines: Iterable[str]) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            at = _instant_us(row["TIMESTAMP"])
            request = _request(at, row["ContextTokens"], row["GeneratedTokens"])
            tail = _tail_100ns(row["TIMESTAMP"])
            yield reader.line_num, replace(request, tail_100ns=tail) if tail else request
        except (KeyError, TypeError, ValueError) as error:
            yield reader.line_num, _reason(error)


def _mooncake(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at = _decimal_us(row["timestamp"], 1_000)
            yield number, _request(at, row["input_length"], row["output_length"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            yield number, _reason(error)


def _burstgpt(lines: Iterable[str]) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            at = _decimal_us(row["Timestamp"], 1_000_000)
            yield reader.line_num, _request(at, row["Request tokens"], row["Response tokens"], model=row.get("Model"))
        except (KeyError, TypeError, ValueError) as error:
            yield reader.line_num, _reason(error)


def _focus(lines: Iterable[str]) -> Iterator[Row]:
    """FOCUS lines whose unit is tokens; which kind says the SKU's meter or the description."""
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            if "token" not in (row.get("ConsumedUnit") or "").lower():
                raise ValueError("is no usage of tokens: its ConsumedUnit is not Tokens")
            kind = _kind_of(f"{row.get('SkuMeter') or ''} {row.get('ChargeDescription') or ''}".lower())
            tokens = _whole(row["ConsumedQuantity"])
            counts = {"prompt": 0, "cached": 0, "output": 0, kind: tokens}
            yield (
                reader.line_num,
                _request(
                    _instant_us(row["ChargePeriodStart"]), counts["prompt"] + counts["cached"], counts["output"],
                    cached=counts["cached"], model=row.get("SkuId"), most=FOCUS_TOKENS_MAX,
                ),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            yield reader.line_num, _reason(error)


def _jsonl(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, request_of(json.loads(line))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            yield number, _reason(error)


def request_of(row: object) -> TraceRequest:
    """A request in our own form: `at` in ISO 8601, token counts, and what else is known.

    Raises KeyError for a missing field and ValueError for one that cannot be used.
    """
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    unknown = sorted(set(row) - OWN_FIELDS)
    if unknown:
        raise ValueError(f"has unknown fields: {', '.join(unknown)[:NAME_CHARS_MAX]}")
    return _request(
        _instant_us(row["at"]), row["prompt_tokens"], row["output_tokens"], cached=row.get("cached_tokens", 0),
        model=row.get("model"), tenant=row.get("tenant"), id=row.get("id"),
    )  # fmt: skip


READERS: dict[str, Callable[[Iterable[str]], Iterator[Row]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "focus": _focus,
    "jsonl": _jsonl,
    "mooncake": _mooncake,
}
HEADER_COLUMNS = {"azure": "ContextTokens", "burstgpt": "Request tokens", "focus": "ChargePeriodStart"}
FROM_OWN_START = frozenset({"burstgpt", "mooncake"})
"""Formats without dates: their times count from the start of the trace."""


def _instant_us(text: object) -> int:
    """Microseconds since 1970; without a zone UTC; the seventh digit of a fraction (100 ns) is cut off."""
    if not isinstance(text, str):
        raise ValueError("a time is text such as 2026-10-31T22:00:00Z")
    match = _INSTANT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:NAME_CHARS_MAX]!r} is not a time such as 2026-10-31T22:00:00Z")
    day, clock, fraction, zone = match.groups()
    instant = datetime.fromisoformat(f"{day}T{clock}{(zone or '+00:00').replace('Z', '+00:00')}")
    return (instant.astimezone(UTC) - EPOCH) // MICROSECOND + int((fraction or "")[:6].ljust(6, "0"))


def _tail_100ns(text: str) -> int:
    """The seventh digit of a time's fraction, 0 where it has none."""
    match = _INSTANT.fullmatch(text.strip())
    fraction = "" if match is None else match[3] or ""
    return int(fraction[6]) if len(fraction) > 6 else 0


def _decimal_us(text: object, us_per_unit: int) -> int:
    value = float(str(text)) * us_per_unit
    if not 0 <= value < SPAN_MAX_US:
        raise ValueError(f"{str(text)[:NAME_CHARS_MAX]!r} is not a time from the start of the trace")
    return round(value)


def _whole(text: object) -> int:
    try:
        value = Decimal(str(text))
        is_whole = value == value.to_integral_value()
    except ArithmeticError:
        is_whole = False
    if not is_whole:
        raise ValueError(f"{str(text)[:NAME_CHARS_MAX]!r} is not a whole number of tokens")
    return int(value)


def _kind_of(words: str) -> str:
    if "cach" in words:
        return "cached"
    if any(word in words for word in ("output", "completion", "generat")):
        return "output"
    if any(word in words for word in ("input", "prompt")):
        return "prompt"
    raise ValueError("does not say whether its tokens are prompt or output")


def _request(
    at_us: int,
    prompt: object,
    output: object,
    *,
    cached: object = 0,
    model: object = None,
    tenant: object = None,
    id: object = None,
    most: int = TOKENS_MAX,
) -> TraceRequest:
    tokens = [int(str(value)) for value in (prompt, output, cached)]
    if not all(0 <= value <= most for value in tokens):
        raise ValueError(f"tokens must lie in 0..{most}, not {', '.join(map(str, tokens[:2]))}")
    if tokens[2] > tokens[0]:
        raise ValueError(f"{tokens[2]} cached prompt tokens are more than the {tokens[0]} prompt tokens")
    model_name, tenant_name, id_name = (_name(value) for value in (model, tenant, id))
    return TraceRequest(at_us, tokens[0], tokens[1], tokens[2], model_name, tenant_name, id_name)


def _name(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > NAME_CHARS_MAX or not value.isprintable():
        raise ValueError(f"names are text of at most {NAME_CHARS_MAX} printable characters")
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no column {error}"
    return str(error) or type(error).__name__
