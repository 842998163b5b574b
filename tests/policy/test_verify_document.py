"""The few lines of docs/policy.md that check a bundle with nothing of ours, run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

from controlplane.wire.signing import to_text
from tests.wire.test_verification import ONE, TWO, bundle, public

DOCUMENT = Path(__file__).parents[2] / "docs/policy.md"


def run(tmp_path: Path, raw: bytes, key: str) -> subprocess.CompletedProcess[str]:
    [script] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.S)
    (tmp_path / "check.py").write_text(script)
    (tmp_path / "bundle.json").write_bytes(raw)
    command = [sys.executable, "-I", str(tmp_path / "check.py"), str(tmp_path / "bundle.json"), key]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_script_of_the_document_tells_a_genuine_bundle_from_a_changed_one(tmp_path):
    said = run(tmp_path, bundle(ONE), to_text(public(ONE)))
    assert said.returncode == 0, said.stderr
    assert "is genuine" in said.stdout
    for raw, key in ((bundle(ONE, revision=999), ONE), (bundle(ONE), TWO)):
        refused = run(tmp_path, raw, to_text(public(key)))
        assert refused.returncode != 0
        assert "InvalidSignature" in refused.stderr
