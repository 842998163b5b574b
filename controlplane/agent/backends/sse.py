"""Server-sent events of OpenAI-compatible servers: bytes pass unchanged, usage is read, an injected usage is hidden."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
_OUTPUT: Final = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)"\s*:\s*"(?!")')
_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")


class _Details(Struct):
    cached_tokens: int | None = None


class UsageObject(Struct):
    """`usage` of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return 0 if details is None or details.cached_tokens is None else details.cached_tokens


class _Answer(Struct):
    usage: UsageObject | None = None
    choices: list[msgspec.Raw] = []


_decoder = msgspec.json.Decoder(_Answer)


def usage_of(body: bytes) -> UsageObject | None:
    """The usage of a whole answer or one event's data; None where there is none or it cannot be read."""
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@dataclass(slots=True)
class Passed:
    """Bytes for the client and how many events among them carry output."""

    data: bytes
    tokens: int


class EventStream:
    """Cuts a byte stream at event borders and looks into the few events that matter."""

    __slots__ = ("_hide_usage", "_rest", "done", "tail", "usage")

    def __init__(self, *, hide_usage: bool) -> None:
        self._hide_usage = hide_usage
        self._rest = b""
        self.usage: UsageObject | None = None
        self.done = False
        self.tail = b""
        """Bytes from `[DONE]` on: they are handed out when the record is written."""

    def feed(self, data: bytes) -> Passed:
        """Whole events that can be passed on now. Raises ValueError for an event without end."""
        data = self._rest + data if self._rest else data
        end = _last_border(data)
        self._rest = data[end:]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ValueError(f"an event of the stream is larger than {EVENT_BYTES_MAX} bytes")
        block = data[:end]
        if self.done or b'"usage"' in block or b"[DONE]" in block:
            block = b"".join(self._kept(event) for event in _events(block))
        return Passed(block, len(_OUTPUT.findall(block)))

    def finish(self) -> bytes:
        """What is left when the stream ended: the tail, and bytes after the last border."""
        rest, self._rest = self.tail + self._rest, b""
        return rest

    def _kept(self, event: bytes) -> bytes:
        if self.done:
            self.tail += event
            return b""
        data = event.strip()
        if data.startswith(b"data:"):
            data = data[5:].strip()
        if data == b"[DONE]":
            self.done = True
            self.tail = event
            return b""
        if b'"usage"' in event:
            try:
                answer = _decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return event
            if answer.usage is not None:
                self.usage = answer.usage
                if self._hide_usage and not answer.choices:
                    return b""
        return event


def _last_border(data: bytes) -> int:
    """Position after the last event border; 0 without one."""
    plain, carriage = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, carriage + 4 if carriage >= 0 else 0)


def _events(block: bytes) -> list[bytes]:
    events, at = [], 0
    for border in _EVENT_END.finditer(block):
        events.append(block[at : border.end()])
        at = border.end()
    return events
