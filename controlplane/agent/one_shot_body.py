"""Requests with one answer and no output tokens: embeddings in OpenAI's form, tensors in the HTTP v2 form."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal
from urllib.parse import unquote

import msgspec
from msgspec import Meta, Raw, Struct, field

from controlplane.agent.api_body import MODEL_CHARS, BadBody
from controlplane.agent.api_fields import ApiBody

EMBEDDINGS_PATH: Final = "/v1/embeddings"
INPUTS_MAX: Final = 2048
DIMENSIONS_MAX: Final = 65_536
TENSORS_MAX: Final = 64
SHAPE_MAX: Final = 16
STACK_MARGIN: Final = 100
_INFER: Final = re.compile(r"/v2/models/([^/]{1,768})/infer")
_FOREIGN_MEMORY: Final = ("shared_memory", "binary_data")

_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_inputs = msgspec.json.Decoder(str | list[str | _Token | list[_Token]])
_fields = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode


class EmbeddingsBody(Struct):
    """Fields of an embeddings request that are checked here; all others pass through unread."""

    model: str
    input: Raw
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None


class Tensor(Struct):
    """An input or output tensor as a request names it."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=SHAPE_MAX)] = []
    datatype: Annotated[str, Meta(max_length=16)] = ""
    data: Raw = field(default_factory=lambda: Raw(b""))
    parameters: dict[str, Raw] = {}


class InferBody(Struct):
    """Fields of an inference request (HTTP v2) that are checked here."""

    inputs: Annotated[list[Tensor], Meta(min_length=1, max_length=TENSORS_MAX)]
    outputs: Annotated[list[Tensor], Meta(max_length=TENSORS_MAX)] = []
    parameters: dict[str, Raw] = {}


_embeddings = msgspec.json.Decoder(EmbeddingsBody)
_infer = msgspec.json.Decoder(InferBody)


def is_one_shot(path: str) -> bool:
    """Whether requests to that path have one answer and no output tokens."""
    return path == EMBEDDINGS_PATH or _INFER.fullmatch(path) is not None


def is_infer(path: str) -> bool:
    """Whether requests to that path carry tensors (HTTP v2)."""
    return path != EMBEDDINGS_PATH and _INFER.fullmatch(path) is not None


def read_one_shot(body: bytes, path: str) -> ApiBody:
    """What admission needs: `n` inputs and, for embeddings, them as the prompt. Raises BadBody."""
    try:
        body.decode()
        return _read(body, path, STACK_MARGIN)
    except msgspec.ValidationError as error:
        text = str(error)
        raise BadBody(f"The request body is not valid: {text}.", _field_of(text)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = " Send tensors as JSON: binary data is not taken here." if path != EMBEDDINGS_PATH else ""
        raise BadBody(f"The request body is not valid JSON: {error}.{hint}") from None
    except RecursionError:
        raise BadBody("The request body is nested too deeply.") from None


def _read(body: bytes, path: str, margin: int) -> ApiBody:
    """Read from `margin` calls further down, so that whoever reads the body again has room for its nesting."""
    if margin:
        return _read(body, path, margin - 1)
    return _read_embeddings(body) if path == EMBEDDINGS_PATH else _read_infer(body, path)


def _read_embeddings(body: bytes) -> ApiBody:
    parsed = _embeddings.decode(body)
    _check_model(parsed.model)
    return ApiBody(model=parsed.model, n=count_inputs(parsed.input), prompt=parsed.input)


def count_inputs(raw: Raw) -> int:
    """How many inputs the field holds: a text or a list of token numbers is one. Raises BadBody."""
    try:
        inputs = _inputs.decode(raw)
    except msgspec.DecodeError:
        raise BadBody("input must be a text, a list of texts, or token numbers.", "input") from None
    if not inputs or (isinstance(inputs, list) and any(part == "" or part == [] for part in inputs)):
        raise BadBody("input must not be empty.", "input")
    if isinstance(inputs, str):
        return 1
    kinds = {type(part) for part in inputs}
    if len(kinds) > 1:
        raise BadBody("input must not mix texts and token numbers.", "input")
    if int in kinds:
        return 1
    if len(inputs) > INPUTS_MAX:
        raise BadBody(
            f"input must hold at most {INPUTS_MAX} inputs, got {len(inputs)}: send several requests.", "input"
        )
    return len(inputs)


def _read_infer(body: bytes, path: str) -> ApiBody:
    match = _INFER.fullmatch(path)
    assert match is not None
    model = unquote(match[1])
    _check_model(model)
    parsed = _infer.decode(body)
    for place, tensors in (("inputs", parsed.inputs), ("outputs", parsed.outputs)):
        for tensor in tensors:
            foreign = _foreign(tensor.parameters)
            if foreign is not None:
                raise BadBody(f"{tensor.name}: {foreign} is not taken here. Send tensors as JSON data.", place)
    if _foreign(parsed.parameters) is not None:
        raise BadBody("Binary outputs are not offered here. Leave binary_data_output out.", "parameters")
    return ApiBody(model=model, n=1)


def _foreign(parameters: dict[str, Raw]) -> str | None:
    """The parameter that says that data stands elsewhere; clients also say that it does not."""
    said = (name for name, value in parameters.items() if bytes(value) != b"false")
    return next((name for name in said if name.startswith(_FOREIGN_MEMORY)), None)


def _check_model(model: str) -> None:
    if not 1 <= len(model) <= MODEL_CHARS:
        raise BadBody(f"model must have 1 to {MODEL_CHARS} characters, got {len(model)}.", "model")


def _field_of(text: str) -> str | None:
    if "`$." in text:
        return re.split(r"[`.\[]", text.split("`$.", 1)[1], maxsplit=1)[0]
    return text.split("`")[1] if "missing required field" in text else None


class _OpenAIError(Struct):
    message: str


class _OpenAIErrorBody(Struct):
    error: _OpenAIError


_openai_error = msgspec.json.Decoder(_OpenAIErrorBody)


def tensor_error(body: bytes) -> bytes:
    """An error in the form of HTTP v2, `{"error": "..."}`; what is in it already, or in none, stays as it is."""
    try:
        return _encode({"error": _openai_error.decode(body).error.message})
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body


def one_shot_for_upstream(body: bytes, path: str, priority: int | None) -> bytes:
    """The client's body; a priority of its own does not pass, the agent's stands in its place where there is one."""
    if priority is None and b"priority" not in body:
        return body
    fields = _fields.decode(body)
    if is_infer(path):
        parameters = _fields.decode(fields.get("parameters", b"{}"))
        _put_priority(parameters, priority)
        if parameters:
            fields["parameters"] = Raw(_encode(parameters))
        else:
            fields.pop("parameters", None)
    else:
        _put_priority(fields, priority)
    return _encode(fields)


def _put_priority(fields: dict[str, Raw], priority: int | None) -> None:
    fields.pop("priority", None)
    if priority is not None:
        fields["priority"] = Raw(str(priority).encode())
