"""YAML with line numbers, read strictly: plain values only, no anchors, no tags, no key twice, times stay text."""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

BYTES_MOST = 4 * 1024 * 1024
DEPTH_MOST = 12
NODES_MOST = 400_000
# The one in C takes a fifteenth of the time, and refuses halves of characters; where it was not built, the other.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Path = tuple[str | int, ...]

_INT = re.compile(r"-?(0|[1-9][0-9]{0,18})\Z")
# As the writer writes them: text such as 0E0 or 1e5 it leaves bare, so that is text.
_FLOAT = re.compile(r"-?[0-9]+\.[0-9]*([eE][-+][0-9]+)?\Z")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


@dataclass(frozen=True)
class Problem:
    """What is wrong with a line of a file, and what to do about it. `line` counts from 1; 0 is the file as a whole."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}" if self.line else self.message


class Unreadable(ValueError):
    """The file cannot be used; `problems` has every line that is wrong."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True)
class Lines:
    """A document's plain value, and the line of every path in it."""

    value: Any
    at: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """Of the path, or of the nearest part above it that has a line."""
        while path not in self.at and path:
            path = path[:-1]
        return self.at.get(path, 0)


def read_lines(text: str | bytes) -> Lines:
    """Raises Unreadable."""
    raw = text.encode() if isinstance(text, str) else text
    if len(raw) > BYTES_MOST:
        raise Unreadable([Problem(0, f"The file is larger than {BYTES_MOST // 1024**2} MiB.")])
    try:
        decoded = raw.decode("utf-8-sig")
        if any(isinstance(event, yaml.AliasEvent) for event in _bounded(yaml.parse(decoded, Loader=LOADER))):
            raise Unreadable([Problem(0, "Anchors and aliases are not used here: write the values out.")])
        node = yaml.compose(decoded, Loader=LOADER)
    except UnicodeDecodeError as error:
        raise Unreadable([Problem(0, "The file is not UTF-8 text.")]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or "this is not YAML"
        raise Unreadable([Problem(mark.line + 1 if mark else 0, f"{said}.")]) from error
    except (RecursionError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable([Problem(0, "This is not YAML that can be read here.")]) from error
    found = Lines(None)
    problems: list[Problem] = []
    value = _value(node, (), found.at, problems) if node is not None else None
    if problems:
        raise Unreadable(problems)
    return Lines(value, found.at)


def _bounded(events: Any) -> Any:
    depth = 0
    for count, event in enumerate(events):
        depth += isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent))
        depth -= isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent))
        if depth > DEPTH_MOST or count > NODES_MOST:
            raise Unreadable([Problem(event.start_mark.line + 1, "The file is nested too deeply or holds too much.")])
        yield event


def _value(node: yaml.Node, path: Path, at: dict[Path, int], problems: list[Problem]) -> Any:
    line = node.start_mark.line + 1
    at.setdefault(path, line)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, number), at, problems) for number, child in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    values: dict[str, Any] = {}
    for key_node, child in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem(key_line, "A name has to be text."))
            continue
        name = str(key_node.value)
        if name in values:
            problems.append(Problem(key_line, f"{name} is written twice: keep one."))
        at[(*path, name)] = key_line
        values[name] = _value(child, (*path, name), at, problems)
    return values


def _scalar(node: yaml.ScalarNode) -> Any:
    text = str(node.value)
    if node.style:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    return text
