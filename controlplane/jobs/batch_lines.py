"""Lines of a batch file in the OpenAI form: one JSON object a line, checked with its number. Pure, and one pass."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

LINE_BYTES_MOST: Final = 1024 * 1024
CUSTOM_ID_MOST: Final = 256
BYTES_PER_TOKEN: Final = 4
OUTPUTS_MOST: Final = 1_024
"""As agents have it (`agent.api_body`): more is refused here, with the number of its line, before anything runs."""
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Some editors begin a file in UTF-8 with it; it is no part of the first line."""
DOUBLES_LINES_MOST: Final = 1_000_000
"""So many lines of a file with other faults are looked through for a custom_id that stands twice."""

CONTENT: Final = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}
"""Endpoint -> the field of its body that no request can do without."""


class _Line(Struct):
    custom_id: str
    method: str
    url: str
    body: Raw


class _Named(Struct):
    custom_id: str


class _Body(Struct):
    model: str
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


_lines = msgspec.json.Decoder(_Line)
_named = msgspec.json.Decoder(_Named)
_bodies = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Request:
    """A line that can be run. `output_tokens` is what it asks for at most, None where it does not say; `outputs` counts
    its answers.
    """

    line: int
    custom_id: str
    body: bytes
    model: str
    prompt_tokens: int
    output_tokens: int | None
    outputs: int = 1


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be run: what is wrong, and what to do about it."""

    line: int
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class LineRules:
    """What every line of a batch has to hold. `model` None takes any."""

    endpoint: str
    model: str | None
    max_output_tokens: int


def parse(number: int, text: bytes, rules: LineRules) -> Request | BadLine:
    """One line. Every fault names its field and its remedy; the first one found is told."""
    if len(text) > LINE_BYTES_MOST:
        return BadLine(number, "line_too_long", f"The line has {len(text):,} bytes; at most {LINE_BYTES_MOST:,} fit.")
    try:
        text.decode()
        line = _lines.decode(text)
    except UnicodeDecodeError:
        return BadLine(number, "invalid_encoding", "The line is not UTF-8. Save the file as UTF-8.")
    except RecursionError:
        return BadLine(number, "invalid_json_line", "The line is nested too deeply.")
    except msgspec.ValidationError as error:
        return BadLine(number, "invalid_request", f"{error}. A line has custom_id, method, url and body.")
    except msgspec.DecodeError as error:
        return BadLine(number, "invalid_json_line", f"The line is not a JSON object: {error}.")
    if not 0 < len(line.custom_id) <= CUSTOM_ID_MOST or "\x00" in line.custom_id:
        return BadLine(
            number, "invalid_custom_id", f"Give a custom_id of 1 to {CUSTOM_ID_MOST} characters.", "custom_id"
        )
    if line.method != "POST":
        return BadLine(number, "invalid_method", "The method of every line is POST.", "method")
    if line.url != rules.endpoint:
        return BadLine(number, "invalid_url", f"This batch is for {rules.endpoint}: write that as the url.", "url")
    return _body(number, line, rules)


def _body(number: int, line: _Line, rules: LineRules) -> Request | BadLine:
    raw = bytes(line.body)
    try:
        body = _bodies.decode(raw)
    except RecursionError:
        return BadLine(number, "invalid_json_line", "The body is nested too deeply.", "body")
    except (msgspec.DecodeError, ValueError) as error:
        return BadLine(number, "invalid_request", f"The body cannot be used: {error}.", "body")
    if rules.model is not None and body.model != rules.model:
        message = (
            f"A batch has one model, and this one began with {rules.model!r}. Use another batch for {body.model!r}."
        )
        return BadLine(number, "mismatched_model", message, "body.model")
    field = CONTENT[rules.endpoint]
    if getattr(body, field) is UNSET:
        return BadLine(number, "invalid_request", f"The body needs {field}.", f"body.{field}")
    if body.stream:
        return BadLine(number, "invalid_request", "A batch cannot stream: leave stream out.", "body.stream")
    if body.n is not None and body.n < 1:
        return BadLine(number, "invalid_request", "n is at least 1.", "body.n")
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if asked is not None and not 0 < asked <= rules.max_output_tokens:
        message = f"The class allows 1 to {rules.max_output_tokens:,} output tokens; the line asks for {asked:,}."
        return BadLine(number, "output_too_long", message, "body.max_tokens")
    outputs = (body.n or 1) * _count_prompts(body.prompt)
    if outputs > OUTPUTS_MOST:
        message = (
            f"One request has at most {OUTPUTS_MOST:,} answers (n for each prompt); the line asks for {outputs:,}."
        )
        return BadLine(number, "too_many_outputs", message, "body.n")
    output = None if asked is None else asked * outputs
    return Request(number, line.custom_id, raw, body.model, max(1, len(raw) // BYTES_PER_TOKEN), output, outputs)


def _count_prompts(prompt: Raw | UnsetType) -> int:
    """How many answers a completion's prompt asks for: one for each of several, one for a list of tokens."""
    if prompt is UNSET or not bytes(prompt).lstrip().startswith(b"["):
        return 1
    found = msgspec.json.decode(prompt)
    return max(1, len(found)) if found and isinstance(found[0], str | list) else 1


@dataclass(frozen=True, slots=True)
class Numbered:
    """A line as it stands in its file, with its number from 1 and the offset of the byte after it."""

    number: int
    text: bytes
    end: int


def split(pieces: Iterable[bytes], *, number: int = 0, offset: int = 0) -> Iterator[Numbered]:
    """The lines of a file that have something in them, from pieces of any size; empty lines are counted and left out.

    `number` and `offset` are those of the last line that was taken before. A line without end is cut at one byte over
    LINE_BYTES_MOST, so that it is refused without being held.
    """
    rest, cut = b"", 0
    for piece in pieces:
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        for text in lines:
            number += 1
            offset += len(text) + 1 + cut
            cut = 0
            text = _unmarked(number, text)
            if text.strip():
                yield Numbered(number, text, offset)
        if len(rest) > LINE_BYTES_MOST + 1:
            cut += len(rest) - LINE_BYTES_MOST - 1
            rest = rest[: LINE_BYTES_MOST + 1]
    text = _unmarked(number + 1, rest)
    if text.strip():
        yield Numbered(number + 1, text, offset + len(rest) + cut)


def _unmarked(number: int, text: bytes) -> bytes:
    return text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text


def doubled(line: int, custom_id: str, first: int) -> BadLine:
    """A line whose custom_id was used before it."""
    message = f"The custom_id {custom_id!r} stands on line {first:,} already."
    return BadLine(line, "duplicate_custom_id", message, "custom_id")


def doubled_lines(lines: Callable[[], Iterable[Numbered]]) -> Iterator[BadLine]:
    """Every line of a file whose custom_id stands on a line before it; lines that cannot be read are passed over.

    The file is read twice, so that of its first DOUBLES_LINES_MOST lines no more than a number each is held.
    """
    hashes = sorted(array("q", (hash(custom_id) for _, custom_id in _custom_ids(lines()))))
    twice = {one for one, other in pairwise(hashes) if one == other}
    if not twice:
        return
    first: dict[str, int] = {}
    for number, custom_id in _custom_ids(lines()):
        if hash(custom_id) in twice and first.setdefault(custom_id, number) != number:
            yield doubled(number, custom_id, first[custom_id])


def _custom_ids(lines: Iterable[Numbered]) -> Iterator[tuple[int, str]]:
    for line in islice(lines, DOUBLES_LINES_MOST):
        try:
            yield line.number, _named.decode(line.text).custom_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
