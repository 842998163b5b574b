"""docker-compose.yml as the engine reads it: anchors merged, variables filled in."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
INNERMOST = re.compile(r"\$\{([A-Z_]+)(?::-([^${}]*))?\}")


def filled(text: str, values: dict[str, str]) -> str:
    """`${NAME:-default}` from `values`, innermost first, as compose does it."""
    while found := INNERMOST.search(text):
        name, default = found.groups()
        text = text[: found.start()] + (values.get(name) or default or "") + text[found.end() :]
    return text


def compose(values: dict[str, str]) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return filled(node, values) if isinstance(node, str) else node

    return walk(document)
