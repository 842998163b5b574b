"""The package's own source for rules that no type checker asks: parsed files, SQL texts and where they stand."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "controlplane"


@cache
def parsed() -> dict[str, ast.Module]:
    """Path under the package -> its tree; migrations are left out, they run once and alone."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if "migrations" not in path.parts
    }


@dataclass(frozen=True)
class Text:
    """A string of the source on one line; what an f-string fills in is `{}`."""

    file: str
    line: int
    text: str


def texts_of(file: str, tree: ast.Module) -> Iterator[Text]:
    """Every string of a file once: an f-string whole, not in its parts."""
    parts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
            whole = "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
            yield Text(file, node.lineno, re.sub(r"\s+", " ", whole))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield Text(file, node.lineno, re.sub(r"\s+", " ", node.value))


@cache
def texts() -> tuple[Text, ...]:
    """Every string of the package."""
    return tuple(one for file, tree in parsed().items() for one in texts_of(file, tree))


def calls_in(file: str, function: str) -> set[str]:
    """Names that a function of a file calls. Raises LookupError when the function is not there any more."""
    for node in ast.walk(parsed()[file]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
            return {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in calls}
    raise LookupError(f"{file} has no function {function}")
