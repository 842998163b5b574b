"""Runbooks: one document per kind of alert under docs/runbooks, shown beside the alert and at an address of its own."""

from functools import cache

from django.conf import settings
from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt

FOLDER = settings.BASE_DIR / "docs" / "runbooks"


@cache
def runbook_html(kind: str) -> SafeString:
    """The runbook without its title, as HTML; empty for a kind that has none."""
    path = FOLDER / f"{kind}.md"
    if not path.is_file():
        return SafeString("")
    text = path.read_text(encoding="utf-8").split("\n", 1)[1]
    # `html` is off: the document can bring no markup of its own.
    return mark_safe(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))  # noqa: S308
