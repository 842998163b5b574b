"""A panel is a landmark: a table that scrolls inside it is a group, not a second landmark of the same name."""

import re

import pytest

from tests.architecture.compose_file import ROOT

TEMPLATES = sorted(path for app in ("ledger", "budgets", "usage") for path in (ROOT / "templates" / app).glob("*.html"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_scrolls_in_a_panel_is_no_landmark_with_the_panels_name(path):
    doubled = re.findall(r'role="region" aria-labelledby="[^"]*-title"', path.read_text())
    assert not doubled and (ROOT / "templates" / "tenants" / "_standings.html").read_text().count('role="region"') == 0
