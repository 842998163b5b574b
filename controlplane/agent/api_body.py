"""The few fields of an OpenAI request that the agent reads; everything else passes through unread."""

import msgspec
from msgspec import Raw, Struct, field


class StreamOptions(Struct):
    include_usage: bool | None = None


class ApiBody(Struct):
    """Fields that admission and forwarding need. `ignore_eos` is the extension that inference servers share."""

    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    messages: Raw = field(default_factory=lambda: Raw(b""))
    prompt: Raw = field(default_factory=lambda: Raw(b""))
    ignore_eos: bool | None = None


CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
N_MAX = 128
OUTPUT_TOKENS_MAX = 1 << 31

_decoder = msgspec.json.Decoder(ApiBody)
_fields = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode


class BadBody(Exception):
    """The client's mistake, in words for its developer; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def read_body(body: bytes, path: str) -> ApiBody:
    """Raises BadBody when the request cannot be understood."""
    try:
        parsed = _decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        raise BadBody(f"The request body is not valid: {text}.", _field_of(text)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"The request body is not valid JSON: {error}.") from None
    asked = parsed.max_completion_tokens if parsed.max_completion_tokens is not None else parsed.max_tokens
    if asked is not None and not 1 <= asked < OUTPUT_TOKENS_MAX:
        raise BadBody(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if parsed.n is not None and not 1 <= parsed.n <= N_MAX:
        raise BadBody(f"n must be between 1 and {N_MAX}, got {parsed.n}.", "n")
    if path == CHAT_PATH and bytes(parsed.messages)[:1] != b"[":
        raise BadBody("messages must be a list of messages.", "messages")
    if path == TEXT_PATH and not bytes(parsed.prompt):
        raise BadBody("prompt is missing.", "prompt")
    return parsed


def _field_of(text: str) -> str | None:
    if "`$." in text:
        return text.split("`$.", 1)[1].split("`", 1)[0]
    return text.split("`")[1] if "missing required field" in text else None


def body_for_upstream(
    body: bytes, path: str, *, max_output_tokens: int, stream: bool, usage_wanted: bool, priority: int | None
) -> bytes:
    """The client's body with an explicit output limit, usage in the stream and, for servers that know it, a priority.

    All other values keep their bytes.
    """
    fields = _fields.decode(body)
    limit = Raw(str(max_output_tokens).encode())
    if path == CHAT_PATH and "max_completion_tokens" in fields:
        fields.pop("max_tokens", None)
        fields["max_completion_tokens"] = limit
    else:
        fields["max_tokens"] = limit
    if stream and not usage_wanted:
        options = _fields.decode(fields["stream_options"]) if _is_object(fields.get("stream_options")) else {}
        options["include_usage"] = Raw(b"true")
        fields["stream_options"] = Raw(_encode(options))
    if priority is not None:
        fields["priority"] = Raw(str(priority).encode())
    return _encode(fields)


def _is_object(raw: Raw | None) -> bool:
    return raw is not None and bytes(raw)[:1] == b"{"
