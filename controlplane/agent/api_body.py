"""The few fields of an OpenAI request that the agent reads; everything else passes through unread."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from controlplane.agent.api_fields import ApiBody, decode_from_below
from controlplane.agent.api_fields import decode as _decode

CHAT_PATH: Final = "/v1/chat/completions"
TEXT_PATH: Final = "/v1/completions"
TOKEN_PATHS: Final = frozenset({CHAT_PATH, TEXT_PATH})
"""Where answers are made token by token; everything else has one answer (`one_shot_body`)."""
N_MAX: Final = 128
OUTPUTS_MAX: Final = 1024
MODEL_CHARS: Final = 256
STACK_MARGIN: Final = 100
BRACKETS_SAFE: Final = 200
"""Nothing with so few brackets is nested too deeply for anybody who reads it."""
OUTPUT_TOKENS_MAX: Final = 1 << 31

_messages: Final = msgspec.json.Decoder(list[Raw]).decode
_prompt: Final = msgspec.json.Decoder(str | list[str | int | list[int]]).decode
_fields: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_encode: Final = msgspec.json.Encoder().encode


class BadBody(Exception):
    """The client's mistake, in words for its developer; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def read_body(body: bytes, path: str) -> ApiBody:
    """Raises BadBody when the request cannot be understood."""
    try:
        if not body.isascii():
            # What passes through unread is not looked at by the decoder.
            body.decode()
        shallow = body.count(b"{") + body.count(b"[") <= BRACKETS_SAFE
        parsed = _decode(body) if shallow else decode_from_below(body, STACK_MARGIN)
    except msgspec.ValidationError as error:
        text = str(error)
        raise BadBody(f"The request body is not valid: {text}.", _field_of(text)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"The request body is not valid JSON: {error}.") from None
    except RecursionError:
        raise BadBody("The request body is nested too deeply.") from None
    if len(parsed.model) > MODEL_CHARS:
        raise BadBody(f"model must have at most {MODEL_CHARS} characters, got {len(parsed.model)}.", "model")
    asked = parsed.max_completion_tokens if parsed.max_completion_tokens is not None else parsed.max_tokens
    if asked is not None and not 1 <= asked < OUTPUT_TOKENS_MAX:
        raise BadBody(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if parsed.n is not None and not 1 <= parsed.n <= N_MAX:
        raise BadBody(f"n must be between 1 and {N_MAX}, got {parsed.n}.", "n")
    outputs = parsed.n or 1
    if parsed.best_of is not None and not 1 <= parsed.best_of <= outputs:
        raise BadBody(
            f"best_of must not be more than n ({outputs}), got {parsed.best_of}: outputs that are made and not "
            "returned are not offered here.",
            "best_of",
        )
    if path == CHAT_PATH:
        _check_messages(parsed.messages)
    if path == TEXT_PATH:
        outputs *= _count_prompts(parsed.prompt)
        if outputs > OUTPUTS_MAX:
            raise BadBody(
                f"n times the number of prompts must be at most {OUTPUTS_MAX}, got {outputs}: send several requests.",
                "prompt",
            )
    parsed.n = outputs
    return parsed


def _check_messages(raw: Raw) -> None:
    if bytes(raw)[:1] != b"[":
        raise BadBody("messages must be a list of messages.", "messages")
    if not _messages(raw):
        raise BadBody("messages must hold at least one message.", "messages")


def _count_prompts(raw: Raw) -> int:
    """How many prompts the field holds: a text or a list of token numbers is one, a list of those is several."""
    if not bytes(raw):
        raise BadBody("prompt is missing.", "prompt")
    try:
        prompt = _prompt(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadBody("prompt must be a text, a list of texts, or token numbers.", "prompt") from None
    if not prompt or (isinstance(prompt, list) and any(part == "" or part == [] for part in prompt)):
        raise BadBody("prompt must not be empty.", "prompt")
    if isinstance(prompt, str):
        return 1
    kinds = {type(part) for part in prompt}
    if len(kinds) > 1:
        raise BadBody("prompt must not mix texts and token numbers.", "prompt")
    return 1 if int in kinds else len(prompt)


def _field_of(text: str) -> str | None:
    if "`$." in text:
        return text.split("`$.", 1)[1].split("`", 1)[0]
    return text.split("`")[1] if "missing required field" in text else None


def body_for_upstream(
    body: bytes, path: str, *, max_output_tokens: int, stream: bool, usage_wanted: bool, priority: int | None
) -> bytes:
    """The client's body with an explicit output limit, usage in the stream and, for servers that know it, a priority.

    A priority of the client's own does not pass: it would be served before others. All other values keep their bytes.
    """
    fields = _fields(body)
    limit = Raw(str(max_output_tokens).encode())
    if path == CHAT_PATH and "max_completion_tokens" in fields:
        fields.pop("max_tokens", None)
        fields["max_completion_tokens"] = limit
    else:
        fields["max_tokens"] = limit
    if stream and not usage_wanted:
        options = _fields(fields["stream_options"]) if _is_object(fields.get("stream_options")) else {}
        options["include_usage"] = Raw(b"true")
        fields["stream_options"] = Raw(_encode(options))
    fields.pop("priority", None)
    if priority is not None:
        fields["priority"] = Raw(str(priority).encode())
    return _encode(fields)


def _is_object(raw: Raw | None) -> bool:
    return raw is not None and bytes(raw)[:1] == b"{"
