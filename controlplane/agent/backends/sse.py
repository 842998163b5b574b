"""Server-sent events of OpenAI-compatible servers: bytes pass unchanged, usage is read, an injected usage is hidden."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from controlplane.agent.backends.usage_reading import UsageObject, envelope_of, read_usage

EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
_OUTPUT: Final = re.compile(rb'"(?:content|reasoning_content|reasoning|refusal|text|arguments)"\s*:\s*"(?!")')
_TOOL_NAME: Final = re.compile(rb'"name"\s*:\s*"(?!")')
_USAGE: Final = re.compile(rb'"usage"\s*:\s*[^n\s]')
_FINISH: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_EVENT_END: Final = re.compile(rb"\r?\n\r?\n|\r\r")


class Passed(Struct, gc=False):
    """Bytes for the client and how many events among them carry output."""

    data: bytes
    tokens: int


class EventStream:
    """Cuts a byte stream at event borders and looks into the few events that matter."""

    __slots__ = ("_hide_usage", "_last", "_rest", "_total", "done", "error", "tail", "usage")

    def __init__(self, *, hide_usage: bool) -> None:
        self._hide_usage = hide_usage
        self._rest = b""
        self._last = b""
        self._total = False
        self.usage: UsageObject | None = None
        """The usage that was told last; servers that tell it with every chunk count up."""
        self.error = False
        """The server told an error inside the stream, which passes like everything else."""
        self.done = False
        self.tail = b""
        """Bytes from `[DONE]` on: they are handed out when the record is written."""

    @property
    def is_total(self) -> bool:
        """Whether `usage` is that of the whole request: it came alone, in the chunk that ends a stream."""
        return self._total

    @property
    def complete(self) -> bool:
        """Whether the stream came to its end, not merely stopped: `[DONE]`, the usage chunk or a finish reason."""
        return self.done or self._total or _FINISH.search(self._last + self._rest) is not None

    def feed(self, data: bytes) -> Passed:
        """Whole events that can be passed on now. Raises ValueError for an event without end."""
        data = self._rest + data if self._rest else data
        if data.endswith(b"\n\n") and not self.tail:
            # Nearly every read ends with an event.
            block, self._rest = data, b""
        else:
            end = _last_border(data)
            block, self._rest = data[:end], data[end:]
            if len(self._rest) + len(self.tail) > EVENT_BYTES_MAX:
                raise ValueError(f"an event of the stream is larger than {EVENT_BYTES_MAX} bytes")
            if not end:
                return Passed(b"", 0)
        self._last = block
        if self.done or b"[DONE]" in block or b'"error"' in block or b"event:" in block or _USAGE.search(block):
            block = b"".join(self._kept(event) for event in _events(block))
        # Events with content, reasoning or a tool call; a role alone is none, the name of a tool is one.
        tokens = len(_OUTPUT.findall(block))
        return Passed(block, tokens + len(_TOOL_NAME.findall(block)) if b"_call" in block else tokens)

    def finish(self) -> bytes:
        """What is left when the stream ended: the tail, and bytes after the last border, which are the last event."""
        rest, self._rest = self._rest, b""
        self._last += rest
        kept = self._kept(rest) if rest else b""
        return self.tail + kept

    def _kept(self, event: bytes) -> bytes:
        if self.done:
            self.tail += event
            if len(self.tail) > EVENT_BYTES_MAX:
                raise ValueError(f"more than {EVENT_BYTES_MAX} bytes stand behind the end of the stream")
            return b""
        kind, data = _fields(event)
        if data.strip() == b"[DONE]":
            self.done = True
            self.tail = event
            return b""
        chunk = envelope_of(data)
        if kind == b"error" or (chunk is not None and chunk.has_error):
            self.error = True
        elif chunk is not None and chunk.has_usage:
            usage = read_usage(chunk.usage)
            self.usage = self.usage if usage is None else usage
            if not chunk.has_choices:
                self._total = True
                return b"" if self._hide_usage else event
        return event


def _last_border(data: bytes) -> int:
    """Position after the last event border; 0 without one."""
    plain, carriage = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    if plain < 0 and carriage < 0:
        return data.rfind(b"\r\r") + 2 if b"\r\r" in data else 0
    return max(plain + 2 if plain >= 0 else 0, carriage + 4 if carriage >= 0 else 0)


def _events(block: bytes) -> list[bytes]:
    events, at = [], 0
    for border in _EVENT_END.finditer(block):
        events.append(block[at : border.end()])
        at = border.end()
    return events


def _fields(event: bytes) -> tuple[bytes, bytes]:
    """Name and data of an event; comments, ids and retry times are nobody's business here."""
    kind, data = b"", []
    for line in event.splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        elif name == b"event":
            kind = value.strip()
    return kind, b"\n".join(data)
