"""A panel is a landmark: a table that scrolls inside it is a group with a name, not a second landmark beside it."""

import re

import pytest

from tests.architecture.compose_file import ROOT

TEMPLATES = sorted((ROOT / "templates").rglob("*.html"))
SCROLLING = re.compile(r'<div class="scroll[ "][^>]*>')


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_scrolls_in_a_panel_is_a_group_with_a_name(path):
    for tag in SCROLLING.findall(path.read_text()):
        assert 'role="group"' in tag and 'tabindex="0"' in tag and "aria-label" in tag, tag


def test_there_are_tables_to_look_at():
    assert sum(len(SCROLLING.findall(path.read_text())) for path in TEMPLATES) > 50
