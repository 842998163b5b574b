"""Streams in the forms that inference servers send, each with what must be read from it.

The files are whole response bodies, byte for byte; they were made for these tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from controlplane.core.reasons import Outcome

FOLDER = Path(__file__).parent
COMPLETED, FAILED = Outcome.COMPLETED, Outcome.UPSTREAM_ERROR


@dataclass(frozen=True)
class Transcript:
    """A stream. `prompt` None is what the agent knew before; `hidden` the index of the event that only the agent asked
    for; `output_events` how many events carry output."""

    name: str
    prompt: int | None
    cached: int
    output: int
    output_events: int
    estimated: bool = False
    outcome: Outcome = COMPLETED
    hidden: int | None = None
    path: str = "/v1/chat/completions"
    n: int = 1
    added: bytes = b""
    """What the agent itself tells behind a stream that broke."""

    @property
    def events(self) -> list[bytes]:
        data = (FOLDER / f"{self.name}.sse").read_bytes()
        return [event for event in re.findall(rb".*?(?:\r\n\r\n|\n\n|\r\r|$)", data, flags=re.DOTALL) if event]

    def visible(self, *, usage_asked: bool) -> list[bytes]:
        """The events that the client gets."""
        hidden = None if usage_asked else self.hidden
        return [event for index, event in enumerate(self.events) if index != hidden]

    @property
    def body(self) -> dict[str, object]:
        asked: dict[str, object] = {"stream": True, "n": self.n}
        return asked if self.path == "/v1/chat/completions" else {**asked, "prompt": "ahoy"}


BROKEN = b'"code":"upstream_error"'
ALL = [
    Transcript("usage_chunk", 31, 16, 4, 4, hidden=6),
    Transcript("last_line_unended", 31, 16, 4, 4, hidden=6),
    Transcript("usage_unended", 31, 16, 4, 4, hidden=6),
    Transcript("usage_with_every_chunk", 31, 0, 5, 4, hidden=6),
    Transcript("usage_in_last_content_chunk", 31, 0, 5, 5),
    Transcript("usage_missing", None, 0, 4, 4, estimated=True),
    Transcript("tool_call", 88, 0, 15, 4, hidden=6),
    Transcript("tool_call_without_arguments", 40, 0, 9, 1),
    Transcript("tool_calls_with_content", 90, 0, 41, 7, hidden=9),
    Transcript("two_choices", 12, 0, 4, 4, hidden=8, n=2),
    Transcript("error_inside", None, 0, 2, 2, estimated=True, outcome=FAILED),
    Transcript("error_event", None, 0, 2, 2, estimated=True, outcome=FAILED),
    Transcript("unfinished", None, 0, 4, 4, estimated=True, outcome=FAILED, added=BROKEN),
    Transcript("no_done", None, 0, 4, 4, estimated=True),
    Transcript("comments_and_line_ends", 31, 0, 4, 4, hidden=8),
    Transcript("carriage_returns", 31, 0, 4, 4, hidden=6),
    Transcript("reasoning", 20, 0, 3, 3, hidden=5),
    Transcript("spaced_json", 31, 0, 4, 4, hidden=6),
    Transcript("usage_negative", None, 0, 4, 4, estimated=True, hidden=6),
    Transcript("usage_caches_more_than_the_prompt", 5, 5, 4, 4, estimated=True, hidden=6),
    Transcript("usage_zero", 31, 0, 0, 0, hidden=2),
    Transcript("text_completion", 6, 0, 4, 4, hidden=5, path="/v1/completions"),
    Transcript("content_that_looks_like_events", 31, 0, 30, 2, hidden=4),
]
