"""Embeddings as tensors of the HTTP v2 protocol: texts in a BYTES tensor, vectors in a float tensor, both as JSON."""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

FLOATS: Final = frozenset({"FP16", "BF16", "FP32", "FP64"})

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EmbeddingTensors:
    """Names of the input and the output tensor."""

    text: str
    embedding: str


class NotOffered(Exception):
    """What the client asks is not to be had from this model; `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class BadTensor(Exception):
    """The server's answer holds no usable embeddings; the message says why."""


class Asked(Struct):
    """An embeddings request as far as it matters here."""

    input: str | list[str | int | list[int]]
    encoding_format: str = "float"
    dimensions: int | None = None

    @property
    def texts(self) -> list[str]:
        """Raises NotOffered for token numbers."""
        given = [self.input] if isinstance(self.input, str) else self.input
        texts = [text for text in given if isinstance(text, str)]
        if len(texts) < len(given):
            raise NotOffered("This model takes texts, not token numbers.", "input")
        return texts


class _Nullable(Struct):
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None


_asked = msgspec.json.Decoder(_Nullable)


def asked_embeddings(body: bytes) -> Asked:
    """Read a checked body. Raises NotOffered when its inputs are not texts."""
    read = _asked.decode(body)
    asked = Asked(read.input, read.encoding_format or "float", read.dimensions)
    _ = asked.texts
    return asked


def text_tensors(asked: Asked, tensors: EmbeddingTensors, *, level: int, request_id: str) -> bytes:
    """The request: texts in a tensor of shape [n, 1]. `level` 0 leaves the priority to the model's default."""
    texts = asked.texts
    request: dict[str, object] = {
        "id": request_id,
        "inputs": [{"name": tensors.text, "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}],
        "outputs": [{"name": tensors.embedding}],
    }
    if level:
        request["parameters"] = {"priority": level}
    return _encode(request)


class _Tensor(Struct):
    name: str
    datatype: str = ""
    shape: list[int] = []
    data: list[float | list[float]] | None = None


class _Answer(Struct):
    outputs: list[_Tensor]


_answer = msgspec.json.Decoder(_Answer)


def embeddings_answer(
    body: bytes,
    tensors: EmbeddingTensors,
    *,
    inputs: int,
    model: str,
    encoding_format: str,
    dimensions: int | None,
    prompt_tokens: int,
) -> bytes:
    """OpenAI's answer with one embedding per input. Raises BadTensor, or NotOffered for another dimension."""
    rows = _rows(body, tensors.embedding, inputs)
    width = len(rows[0])
    if dimensions is not None and dimensions != width:
        raise NotOffered(f"This model's embeddings have {width} dimensions, not {dimensions}.", "dimensions")
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(row) if encoding_format == "base64" else row}
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _encode({"object": "list", "data": data, "model": model, "usage": usage})


def _rows(body: bytes, name: str, inputs: int) -> list[list[float]]:
    try:
        answer = _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadTensor(f"the Triton server's answer cannot be read: {error}") from None
    tensor = next((one for one in answer.outputs if one.name == name), None)
    if tensor is None or tensor.data is None:
        told = ", ".join(one.name for one in answer.outputs[:8]) or "none"
        raise BadTensor(f"the Triton server's answer has no tensor {name} with data (it has: {told})")
    if tensor.datatype not in FLOATS:
        raise BadTensor(f"the tensor {name} holds {tensor.datatype or 'nothing known'}, not floats")
    if not tensor.shape or tensor.shape[0] != inputs:
        got = tensor.shape[0] if tensor.shape else 0
        raise BadTensor(f"the batch had {inputs} inputs and came back with {got} outputs, so none can be given out")
    values = _flat(tensor.data)
    width = math.prod(tensor.shape[1:])
    if width < 1 or len(values) != inputs * width:
        raise BadTensor(f"the tensor {name} has shape {tensor.shape} and {len(values)} values")
    if not all(map(math.isfinite, values)):
        raise BadTensor(f"the tensor {name} holds numbers that are not finite")
    return [values[at : at + width] for at in range(0, len(values), width)]


def _flat(data: list[float | list[float]]) -> list[float]:
    """Values in row-major order; servers may nest the rows."""
    values: list[float] = []
    for part in data:
        if isinstance(part, list):
            values += part
        else:
            values.append(part)
    return values


def _packed(row: list[float]) -> str:
    try:
        return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()
    except OverflowError:
        raise BadTensor("an embedding holds numbers that 32-bit floats cannot") from None
