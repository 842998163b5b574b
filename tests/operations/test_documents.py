"""What the documents say of settings, commands and files is what the code has."""

import re

import pytest

from tests.architecture.compose_file import ROOT

VARIABLE = re.compile(r'env\.(?:str|bool|int|list|float)\("([A-Z_]+)"|environ\.get\("(FLEXBAND_[A-Z_]+)"')
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def test_every_setting_has_its_line_and_every_line_its_setting():
    sources = [ROOT / "controlplane/config/settings.py", *(ROOT / "controlplane/operations").rglob("*.py")]
    read = {name for file in sources for pair in VARIABLE.findall(file.read_text()) for name in pair if name}
    told = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/settings.md").read_text(), flags=re.M))
    assert told == read


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_documents_name_exist(document):
    commands = {path.stem for path in (ROOT / "controlplane").rglob("management/commands/*.py")} | {
        "check", "migrate", "help",
    }  # fmt: skip
    named = set(re.findall(r"manage\.py ([a-z_]+)", document.read_text()))
    assert named <= commands, named - commands


def test_every_decision_record_is_numbered_and_listed():
    records = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [record.name[:4] for record in records] == [f"{number:04d}" for number in range(1, len(records) + 1)]
    index = (ROOT / "docs/index.md").read_text()
    for record in records:
        assert f"decisions/{record.name}" in index, f"{record.name} is not in docs/index.md"
