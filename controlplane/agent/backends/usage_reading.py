"""Usage as OpenAI-compatible servers write it, read with care: missing is not zero, and nonsense is not a count.

Of these servers `prompt_tokens` includes the cached ones, so that `cached_tokens` may never be more.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from controlplane.agent.backends.request import TokenUsage

TOKENS_MAX: Final = (1 << 31) - 1
CHARS_PER_TOKEN: Final = 4
"""For whole answers without usage; the usual rule of thumb for English text."""

_NULL: Final = b"null"
_NOTHING: Final = Raw(_NULL)
_TEXT: Final = re.compile(
    rb'"(?:content|reasoning_content|reasoning|refusal|text|arguments)"\s*:\s*"((?:[^"\\]|\\.)*)"', re.DOTALL
)

Count = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]


class _Details(Struct):
    cached_tokens: Count | None = None


class UsageObject(Struct):
    """`usage` of an answer or of a chunk; None is what the server did not say."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class _Error(Struct):
    code: int | str | float | None = None


class Envelope(Struct):
    """The parts of an answer, or of one chunk of a stream, that the agent looks at."""

    usage: Raw = _NOTHING
    choices: Raw = _NOTHING
    error: Raw = _NOTHING

    @property
    def has_usage(self) -> bool:
        return self.usage is not _NOTHING and bytes(self.usage) != _NULL

    @property
    def has_error(self) -> bool:
        return self.error is not _NOTHING and bytes(self.error) not in (_NULL, b"false", b'""', b"{}")

    @property
    def has_choices(self) -> bool:
        raw = bytes(self.choices)
        return raw != _NULL and raw[1:-1].strip() != b""

    @property
    def error_status(self) -> int:
        """The status that an error names for itself where it is the client's (4xx), else 502."""
        try:
            code = _error_decoder.decode(self.error).code
        except (msgspec.DecodeError, UnicodeDecodeError):
            return 502
        return code if isinstance(code, int) and 400 <= code < 500 else 502


class _Plain(Struct, gc=False):
    """A whole answer with its usage where it is as it should be."""

    usage: UsageObject | None = None
    error: Raw | None = None


_decoder = msgspec.json.Decoder(Envelope)
_plain_decoder = msgspec.json.Decoder(_Plain)
_usage_decoder = msgspec.json.Decoder(UsageObject)
_error_decoder = msgspec.json.Decoder(_Error)


def envelope_of(body: bytes) -> Envelope | None:
    """None for what is not a JSON object."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_usage(raw: Raw) -> UsageObject | None:
    """None where a count is negative, no whole number, or beyond any model."""
    try:
        return _usage_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def usage_of(body: bytes) -> UsageObject | None:
    """The usage of a whole answer; None where there is none or it cannot be read."""
    envelope = envelope_of(body)
    return None if envelope is None or not envelope.has_usage else read_usage(envelope.usage)


def plain_usage(body: bytes) -> TokenUsage | None:
    """The usage of a whole answer that tells all of it and no error; None for any other, which needs a closer look."""
    try:
        answer = _plain_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    usage = answer.usage
    if answer.error is not None or usage is None:
        return None
    prompt, output, details = usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details
    if prompt is None or output is None:
        return None
    if details is None or not details.cached_tokens:
        return TokenUsage(prompt, 0, output)
    return TokenUsage(prompt, details.cached_tokens, output) if details.cached_tokens <= prompt else None


def token_usage(usage: UsageObject | None, *, prompt_tokens: int, output_tokens: int) -> TokenUsage:
    """What is recorded: the server's counts, and the agent's own where there are none, which flags it `estimated`."""
    if usage is None:
        return TokenUsage(prompt_tokens, 0, output_tokens, estimated=True)
    prompt = prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    output = output_tokens if usage.completion_tokens is None else usage.completion_tokens
    cached = 0 if usage.prompt_tokens_details is None else usage.cached_tokens
    unsure = usage.prompt_tokens is None or usage.completion_tokens is None or cached > prompt
    return TokenUsage(prompt, min(cached, prompt) if cached else 0, output, estimated=unsure)


def estimated_output(body: bytes, *, most: int) -> int:
    """Tokens of a whole answer by the length of its texts; at least one, at most what was allowed."""
    chars = sum(len(text) for text in _TEXT.findall(body))
    return max(1, min(most, chars // CHARS_PER_TOKEN))
