"""A small reader of the protobuf text format, strict about the few messages of Triton's ModelConfig that are written.

Field names, their types and whether they repeat are those of model_config.proto; anything else is an error, and so is
a field that does not repeat and comes twice.
"""

import re
from typing import Any

QUEUE_POLICY = {
    "timeout_action": ("REJECT", "DELAY"),
    "default_timeout_microseconds": int,
    "allow_timeout_override": bool,
    "max_queue_size": int,
}
RESOURCE = {"name": str, "global": bool, "count": int}
GROUP = {
    "name": str,
    "count": int,
    "kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
    "gpus": [int],
    "rate_limiter": {"resources": [RESOURCE], "priority": int},
}
BATCHING = {
    "preferred_batch_size": [int],
    "max_queue_delay_microseconds": int,
    "preserve_ordering": bool,
    "priority_levels": int,
    "default_priority_level": int,
    "default_queue_policy": QUEUE_POLICY,
    "priority_queue_policy": [{"key": int, "value": QUEUE_POLICY}],
}
MODEL_CONFIG = {"name": str, "max_batch_size": int, "instance_group": [GROUP], "dynamic_batching": BATCHING}

_TOKEN = re.compile(r"""\s*(?:\#[^\n]*\n\s*)*([A-Za-z_][\w]*|-?\d+|"(?:[^"\\\n]|\\.)*"|[{}\[\],:;])?""")
_ESCAPE = re.compile(rb"""\\([0-7]{1,3}|.)""")


def parse(text: str) -> dict[str, Any]:
    """The message. Raises ValueError."""
    reader = _Reader(text)
    found = reader.fields(MODEL_CONFIG, end=None)
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            assert match is not None
            if match[1] is None:
                if text[match.end() :].strip():
                    raise ValueError(f"cannot be read: {text[match.end() :][:40]!r}")
                break
            self.tokens.append(match[1])
            at = match.end()
        self.tokens.reverse()

    @property
    def next(self) -> str | None:
        return self.tokens[-1] if self.tokens else None

    def take(self, wanted: str | None = None) -> str:
        if not self.tokens or (wanted is not None and self.tokens[-1] != wanted):
            raise ValueError(f"{wanted or 'more'} is missing before {self.next!r}")
        return self.tokens.pop()

    def fields(self, schema: dict[str, Any], end: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.next != end:
            name = self.take()
            if name not in schema:
                raise ValueError(f"there is no field {name}")
            kind = schema[name]
            repeated = isinstance(kind, list)
            values = self.values(kind[0] if repeated else kind, repeated)
            if repeated:
                found.setdefault(name, []).extend(values)
            elif name in found:
                raise ValueError(f"{name} does not repeat")
            else:
                found[name] = values[0]
            if self.next in (",", ";"):
                self.take()
        return found

    def values(self, kind: Any, repeated: bool) -> list[Any]:
        message = isinstance(kind, dict)
        if self.next == ":":
            self.take()
        elif not message and not (repeated and self.next == "["):
            raise ValueError(f": is missing before {self.next!r}")
        if self.next != "[":
            return [self.value(kind)]
        if not repeated:
            raise ValueError("a list where one value belongs")
        self.take("[")
        values = []
        while self.next != "]":
            values.append(self.value(kind))
            if self.next != "]":
                self.take(",")
        self.take("]")
        return values

    def value(self, kind: Any) -> Any:
        if isinstance(kind, dict):
            self.take("{")
            found = self.fields(kind, "}")
            self.take("}")
            return found
        token = self.take()
        if kind is str:
            if token[0] != '"':
                raise ValueError(f"{token} is no string")
            return _ESCAPE.sub(_unescaped, token[1:-1].encode()).decode()
        if kind is bool:
            return {"true": True, "false": False}[token]
        if kind is int:
            return int(token)
        if token not in kind:
            raise ValueError(f"{token} is none of {kind}")
        return token


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes([int(code, 8)]) if code.isdigit() else code
