"""Every benchmark starts: the suite runs none, so a name that moved would be missed until somebody measures."""

import subprocess
import sys

import pytest

from benchmarks.__main__ import BENCHMARKS


@pytest.mark.parametrize("name", [*BENCHMARKS, "night"])
def test_a_benchmark_says_how_it_is_called(name: str) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert asked.returncode == 0, asked.stderr
    assert f"benchmarks.{name}" in asked.stdout
