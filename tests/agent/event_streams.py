"""Streams of events for property tests, and what is to be read from them, said the slow and plain way."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from hypothesis import strategies as st

BORDERS = (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n")
TEXTS = (
    "hello ",
    "a",
    'say "hi"',
    "[DONE]",
    "event: error",
    '"usage": {"completion_tokens": 9}',
    "naïve 漢字",
    "\\",
    "\n\n",
    "",
)
OUTPUT = re.compile(rb'"(?:content|reasoning_content|reasoning|refusal|text|arguments)"\s*:\s*"(?!")')


@dataclass
class Event:
    """One event as it is sent, and what it means."""

    data: bytes
    tokens: int = 0
    usage: int | None = None
    total: bool = False
    error: bool = False
    done: bool = False


def chunk_of(fields: dict[str, object], *, spaced: bool) -> bytes:
    body = {"id": "c1", "object": "chat.completion.chunk", **fields}
    return json.dumps(body, ensure_ascii=False, separators=None if spaced else (",", ":")).encode()


@st.composite
def events(draw: st.DrawFn) -> list[Event]:
    """Nearly always words, as servers send them; now and then all that servers send besides."""
    border, spaced = draw(st.sampled_from(BORDERS)), draw(st.booleans())
    extra = draw(st.sampled_from([{}, {"usage": None}]))
    key = draw(st.sampled_from(["content", "content", "reasoning_content"]))
    made: list[Event] = []
    for kind in draw(st.lists(st.sampled_from(["word"] * 12 + KINDS), max_size=24)) + draw(st.sampled_from(ENDS)):
        event = draw(_event(kind, key, extra, spaced=spaced))
        event.data += border
        made.append(event)
    return made


KINDS = ["role", "tool", "comment", "error", "named error", "counted", "usage", "other index", "stop"]
ENDS = [["stop", "usage", "done"], ["stop", "done"], ["stop"], ["usage", "done", "comment"], ["done", "word"], []]


@st.composite
def _event(draw: st.DrawFn, kind: str, key: str, extra: dict[str, object], *, spaced: bool) -> Event:
    if kind == "comment":
        return Event(b": ping")
    if kind == "done":
        return Event(b"data: [DONE]", done=True)
    if kind == "error":
        return Event(b'data: {"error":{"message":"out of memory","code":500}}', error=True)
    if kind == "named error":
        return Event(b'event: error\ndata: {"message":"out of memory"}', error=True)
    counted = draw(st.integers(0, 99))
    if kind == "usage":
        fields: dict[str, object] = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": counted}}
        return Event(b"data: " + chunk_of(fields, spaced=spaced), usage=counted, total=True)
    text = draw(st.sampled_from(TEXTS))
    delta: dict[str, object] = {key: text}
    finish = None
    if kind == "role":
        delta = {"role": "assistant", "content": ""}
    elif kind == "tool":
        call = {"index": 0, "function": {"name": "look_up", "arguments": ""}}
        delta = {"tool_calls": [call]}
    elif kind == "stop":
        delta, finish = {}, "stop"
    choice = {"index": int(kind == "other index"), "delta": delta, "finish_reason": finish}
    usage = {"prompt_tokens": 7, "completion_tokens": counted} if kind == "counted" else None
    fields = {"choices": [choice], **extra, **({"usage": usage} if usage else {})}
    data = b"data: " + chunk_of(fields, spaced=spaced)
    return Event(data, 1 if kind == "tool" else len(OUTPUT.findall(data)), usage=counted if usage else None)


@dataclass
class Meaning:
    """What is to come out of a stream."""

    visible: bytes = b""
    tokens: int = 0
    usage: int | None = None
    total: bool = False
    error: bool = False
    done: bool = False
    stopped: bool = False

    @property
    def whole(self) -> bool:
        return self.done or self.total or self.stopped


def meaning_of(sent: list[Event], *, hide_usage: bool) -> Meaning:
    """Event by event; what stands behind the end belongs to the end and means nothing."""
    told = Meaning()
    for event in sent:
        if not told.done:
            told.done = event.done
            told.tokens += event.tokens
            told.error |= event.error
            told.usage = told.usage if event.usage is None else event.usage
            told.total |= event.total
            told.stopped = b'"stop"' in event.data if b"data:" in event.data else told.stopped
            if event.total and hide_usage:
                continue
        told.visible += event.data
    return told
