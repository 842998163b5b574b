"""Several embeddings requests as one, and its answer as several: rows keep their bytes, each client sees its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw, Struct

from controlplane.agent.backends.request import TokenUsage
from controlplane.agent.backends.usage_reading import read_usage
from controlplane.core.batching import Member, OutputCountError, length_bucket, share_tokens, split

_OWN_FIELDS: Final = frozenset({"input", "user", "priority"})
"""Fields that differ from client to client without changing what is computed; `user` of one is nobody else's."""
BYTES_PER_TOKEN: Final = 4

_fields = msgspec.json.Decoder(dict[str, Raw])
_pieces = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EmbeddingInputs:
    """The inputs of a request, each with its own bytes, and the shape that they share.

    `token_counts` are exact for inputs that are token numbers, None for texts.
    """

    shape: str
    pieces: tuple[bytes, ...]
    token_counts: tuple[int, ...] | None
    fields: dict[str, Raw]


def embedding_inputs(body: bytes) -> EmbeddingInputs:
    """Take a checked body apart. Requests of one shape differ in their inputs only and pad to one length."""
    fields = _fields.decode(body)
    raw = bytes(fields["input"])
    if raw[:1] == b'"':
        pieces: tuple[bytes, ...] = (raw,)
    else:
        pieces = tuple(bytes(piece) for piece in _pieces.decode(raw))
        if pieces[0][:1] not in b'"[':
            pieces = (raw,)
    tokens = None if pieces[0][:1] == b'"' else tuple(piece.count(b",") + 1 for piece in pieces)
    lengths = tokens or [len(piece) // BYTES_PER_TOKEN for piece in pieces]
    kept = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    settings = " ".join(f"{name}={bytes(kept[name]).decode()}" for name in sorted(kept))
    kind = "text" if tokens is None else "tokens"
    return EmbeddingInputs(f"{kind} {length_bucket(max(lengths))} {settings}", pieces, tokens, kept)


def merged_body(parts: Sequence[EmbeddingInputs]) -> bytes:
    """One request with the inputs of all, in their order."""
    fields = dict(parts[0].fields)
    fields["input"] = Raw(b"[" + b",".join(piece for part in parts for piece in part.pieces) + b"]")
    return _encode(fields)


class _Answer(Struct):
    data: list[dict[str, Raw]]
    model: Raw = Raw(b'""')
    usage: Raw = Raw(b"null")


_answer = msgspec.json.Decoder(_Answer)
_index = msgspec.json.Decoder(int)


class BadAnswer(Exception):
    """The server's answer cannot be shared out; the message says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one member gets."""

    usage: TokenUsage
    body: bytes


@dataclass(frozen=True, slots=True)
class Waiting:
    """A member of a batch that has come back: its inputs, and the prompt tokens expected of it."""

    member: Member
    inputs: EmbeddingInputs
    prompt_tokens: int


def split_answer(body: bytes, waiting: Sequence[Waiting]) -> list[Part]:
    """The answer to a merged request as one for each member. Raises BadAnswer.

    A member alone gets the server's own bytes. The server counts tokens for the whole batch only: each is told its
    share, which is exact where the inputs were token numbers and marked as estimated where they were texts.
    """
    answer = _read(body)
    try:
        rows = split([one.member for one in waiting], _in_order(answer.data))
    except OutputCountError as error:
        raise BadAnswer(str(error)) from None
    tokens, estimated = _tokens(answer.usage, waiting)
    if len(waiting) == 1:
        return [Part(TokenUsage(tokens[0], 0, 0, estimated), body)]
    return [
        Part(TokenUsage(share, 0, 0, estimated), _body(row.outputs, answer.model, share))
        for row, share in zip(rows, tokens, strict=True)
    ]


def _read(body: bytes) -> _Answer:
    try:
        return _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"the inference server's answer is not a list of embeddings: {error}") from None


def _in_order(data: list[dict[str, Raw]]) -> list[dict[str, Raw]]:
    """Rows by the index of their input. Raises BadAnswer when one is named twice."""
    try:
        by_index = {_index.decode(row["index"]): row for row in data}
    except (KeyError, msgspec.DecodeError):
        raise BadAnswer("the inference server's embeddings do not name their inputs") from None
    if sorted(by_index) != list(range(len(data))):
        raise BadAnswer(f"the inference server's {len(data)} embeddings do not name each input once")
    return [by_index[index] for index in range(len(data))]


def _tokens(told: Raw, waiting: Sequence[Waiting]) -> tuple[list[int], bool]:
    """Prompt tokens of each member, and whether they are estimated; a count that cannot be is none."""
    usage = read_usage(told)
    exact = all(one.inputs.token_counts is not None for one in waiting)
    expected = [sum(one.inputs.token_counts or ()) or one.prompt_tokens for one in waiting]
    total = None if usage is None else usage.prompt_tokens
    if total is None:
        return expected, not exact
    return share_tokens(total, expected), len(waiting) > 1 and not (exact and total == sum(expected))


def _body(rows: Sequence[dict[str, Raw]], model: Raw, prompt_tokens: int) -> bytes:
    data = [{**row, "index": index} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _encode({"object": "list", "data": data, "model": model, "usage": usage})
