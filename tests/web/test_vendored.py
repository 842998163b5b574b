"""What stands in static/vendor is what VENDORED.json says, unchanged, with its licence."""

import hashlib
import json
from pathlib import Path

import pytest

VENDOR = Path(__file__).resolve().parents[2] / "static" / "vendor"
ENTRIES = json.loads((VENDOR / "VENDORED.json").read_text())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
def test_file_is_the_one_that_was_vendored(entry):
    content = (VENDOR / entry["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    assert entry["version"].encode() in content
    assert (VENDOR / entry["licence_file"]).read_text().strip()
    assert entry["licence"] in {"MIT", "0BSD", "BSD-3-Clause", "Apache-2.0"}


def test_nothing_else_is_vendored():
    listed = {entry["file"] for entry in ENTRIES} | {entry["licence_file"] for entry in ENTRIES} | {"VENDORED.json"}
    assert {str(path.relative_to(VENDOR)) for path in VENDOR.rglob("*") if path.is_file()} == listed
