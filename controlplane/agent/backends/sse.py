"""Server-sent events of OpenAI-compatible servers: bytes pass unchanged, usage is read, an injected usage is hidden.

Nearly every read is one event like the one before it, but for its text: that takes three comparisons. Any other read is
scanned for the few marks of events that matter, and only those are cut out and looked into.
"""

from __future__ import annotations

import re
from typing import Final

from controlplane.agent.backends.usage_reading import UsageObject, envelope_of, read_usage

EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
QUOTE: Final = 34
LF: Final = 10
CR: Final = 13
"""As numbers: to look for bytes in bytes, Python first makes an exception of them not being one."""
LEARN_MAX: Final = 8
"""Events in a row that are taken as a pattern and then not repeated, before that is given up."""
_TEXT_KEY: Final = rb'"(?:content|reasoning_content|reasoning|refusal|text|arguments)"\s*:\s*"'
_OUTPUT: Final = re.compile(_TEXT_KEY + rb'(?!")')
_ONE_TEXT: Final = re.compile(rb"data: [^\r\n]*?" + _TEXT_KEY + rb'(?!")')
_OTHER_KEYS: Final = (b'"re', b'"text"', b'"arguments"', b"_call")
_TOOL_NAME: Final = re.compile(rb'"name"\s*:\s*"(?!")')
_USAGE: Final = re.compile(rb'"usage"\s*:\s*[^n\s]')
_FINISH: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_LINE_END: Final = rb"(?:\r\n|\n|\r(?!\n))"
_EVENT_END: Final = re.compile(_LINE_END + _LINE_END)


class EventStream:
    """Looks into the few events of a byte stream that matter; hands on whole events only."""

    __slots__ = (
        "_after", "_before", "_hide_usage", "_last", "_learnt", "_rest", "_total", "done", "error", "tail", "tokens",
        "usage",
    )  # fmt: skip

    def __init__(self, *, hide_usage: bool) -> None:
        self._hide_usage = hide_usage
        self._rest = b""
        self._last = b""
        self._total = False
        self._before = self._after = b""
        """What stands around the text in the events of this stream; empty while that is not known."""
        self._learnt = 0
        self.tokens = 0
        """Events so far that carry output: content, reasoning or a tool call. A role alone does not."""
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
        """Whether the stream came to its end, not merely stopped: `[DONE]`, the usage chunk or a finish reason last."""
        return self.done or self._total or _finishes(self._last + self._rest)

    def repeats(self, data: bytes, start: int, end: int) -> bool:
        """Whether these bytes are the event before again, with another text; that is then counted, and can be passed.

        A text without quotes and line ends cannot hold anything that would have to be looked at.
        """
        before, after = self._before, self._after
        if not before or self._rest:
            return False
        text, behind = start + len(before), end - len(after)
        # Slices and `in`: compiled code pays more for methods of bytes that are told where to look.
        if text >= behind or data[start:text] != before or data[behind:end] != after:
            return False
        said = data[text:behind]
        if QUOTE in said or LF in said or CR in said:
            return False
        self._last = b""
        self._learnt = 0
        self.tokens += 1
        return True

    def feed(self, data: bytes) -> bytes:
        """Whole events that can be passed on now. Raises ValueError for an event without end."""
        if self.done:
            self._behind(data)
            return b""
        if self._rest or not data.endswith(b"\n\n"):
            data = self._cut(data)
            if not data:
                return b""
        if data.find(b"data:") >= 0:
            self._last = data
        if (
            data.find(b"[DONE]") >= 0
            or data.find(b'"error"') >= 0
            or data.find(b"event:") >= 0
            or (data.find(b'"usage"') >= 0 and _USAGE.search(data) is not None)
        ):
            data = self._read(data)
            self.tokens += _outputs(data)
            if self.done:
                self._behind(self._rest)
                self._rest = b""
        else:
            found = _outputs(data)
            self.tokens += found
            if found == 1 and self._learnt < LEARN_MAX:
                self._learn(data)
        return data

    def finish(self) -> bytes:
        """What is left when the stream ended: the tail, and bytes after the last border, which are the last event."""
        rest, self._rest = self._rest, b""
        self._last += rest
        kept = self._kept(rest) if rest else b""
        return self.tail + kept

    def _cut(self, data: bytes) -> bytes:
        """Everything up to the last border; the rest is kept until more of it comes."""
        held = len(self._rest)
        data = self._rest + data if held else data
        end = _last_border(data, max(0, held - 3), len(data))
        self._rest = data[end:]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ValueError(f"an event of the stream is larger than {EVENT_BYTES_MAX} bytes")
        return data[:end]

    def _learn(self, event: bytes) -> None:
        """Take one event with one text, no mark and no end of a choice as the pattern of those that follow."""
        self._learnt += 1
        text = _ONE_TEXT.match(event)
        if text is None or _FINISH.search(event) is not None or _TOOL_NAME.search(event) is not None:
            return
        after = event[event.find(b'"', text.end()) :]
        if after.find(b"\n") == len(after) - 2 and after.find(b"\r") < 0:
            self._before, self._after = event[: text.end()], after

    def _read(self, block: bytes) -> bytes:
        """What of some events may pass: those with a mark are looked into, the others pass as they are."""
        parts: list[bytes] = []
        at = 0
        for mark in _marks(block):
            if mark < at:
                continue
            begin = _last_border(block, at, mark) or at
            border = _EVENT_END.search(block, mark)
            end = len(block) if border is None else border.end()
            parts.append(block[at:begin])
            parts.append(self._kept(block[begin:end]))
            at = end
            if self.done:
                self._behind(block[at:])
                return b"".join(parts)
        parts.append(block[at:])
        return b"".join(parts)

    def _behind(self, data: bytes) -> None:
        self.tail += data
        if len(self.tail) > EVENT_BYTES_MAX:
            raise ValueError(f"more than {EVENT_BYTES_MAX} bytes stand behind the end of the stream")

    def _kept(self, event: bytes) -> bytes:
        """Look into one event; what of it may pass."""
        kind, data = _fields(event)
        if data.strip() == b"[DONE]":
            self.done = True
            self._before = b""
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
                if self._hide_usage:
                    # Line ends before it belong to the event before it.
                    return event[: len(event) - len(event.lstrip(b"\r\n"))]
        return event


def _finishes(block: bytes) -> bool:
    """Whether the last of some events that holds any data ends a choice."""
    at, ends = 0, False
    for end in [border.end() for border in _EVENT_END.finditer(block)] + [len(block)]:
        data = _fields(block[at:end])[1]
        ends = _FINISH.search(data) is not None if data else ends
        at = end
    return ends


def _outputs(block: bytes) -> int:
    """How many texts and names of tools some events hold."""
    texts = block.count(b'"content":"')
    if texts == block.count(b'"content"') and _is_plain(block):
        # What the expression would find, in a third of the time.
        return texts - block.count(b'"content":""')
    found = len(_OUTPUT.findall(block))
    return found + len(_TOOL_NAME.findall(block)) if block.find(b"_call") >= 0 else found


def _is_plain(block: bytes) -> bool:
    """Whether all texts in some events have the key `content`, and no tool is called."""
    for key in _OTHER_KEYS:  # noqa: SIM110  a generator costs more than all of it
        if block.find(key) >= 0:
            return False
    return True


def _marks(block: bytes) -> list[int]:
    """Where something stands for which an event has to be looked into, in order."""
    found: list[int] = []
    for mark in (b'"usage"', b"[DONE]", b'"error"', b"event:"):
        at = block.find(mark)
        while at >= 0:
            if mark != b'"usage"' or _USAGE.match(block, at) is not None:
                found.append(at)
            at = block.find(mark, at + 1)
    found.sort()
    return found


def _last_border(data: bytes, start: int, end: int) -> int:
    """Position after the last event border between two places; 0 without one.

    A border is two line ends, each of them LF, CR LF or CR. A CR at the very end may be half of one: it counts only
    behind another CR, as servers write it that use no other line ends.
    """
    border = 0
    for ends in (b"\n\n", b"\n\r\n", b"\r\r\n", b"\r\r"):
        at = data.rfind(ends, start, end)
        if at >= 0:
            border = max(border, at + len(ends))
    at = data.rfind(b"\n\r", start, end)
    if at >= 0 and at + 2 < len(data) and data[at + 2] != 10:
        border = max(border, at + 2)
    return border


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
