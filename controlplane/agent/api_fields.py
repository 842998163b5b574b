"""The fields of an OpenAI request that the agent reads, as they are decoded."""

from typing import Final

from msgspec import Raw, Struct, json

NOTHING = Raw(b"")


class StreamOptions(Struct):
    include_usage: bool | None = None


class ApiBody(Struct):
    """Fields that admission and forwarding need. `ignore_eos` is the extension that inference servers share."""

    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    """As sent; after `read_body` the outputs that the engine makes in all: those of each prompt times the prompts."""
    best_of: int | None = None
    stream_options: StreamOptions | None = None
    messages: Raw = NOTHING
    prompt: Raw = NOTHING
    ignore_eos: bool | None = None


decode: Final = json.Decoder(ApiBody).decode
"""Raises msgspec.DecodeError, UnicodeDecodeError, or RecursionError for what is nested too deeply."""


def decode_from_below(body: bytes, margin: int) -> ApiBody:
    """Decode from `margin` calls further down, so that whoever reads the body again has room for its nesting.

    Only calls of the interpreter count there: this must not be compiled.
    """
    return decode_from_below(body, margin - 1) if margin else decode(body)
