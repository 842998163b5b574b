"""A build is used for exactly the sources it was made of, and behaves as they do."""

import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controlplane.compiled import build, finder, modules
from controlplane.compiled.__main__ import missing
from controlplane.lab.asking import ANSWER
from tests.lab.nights import azure_file, mooncake_file

HELD_TO = ("tests/core/test_scheduling.py", "tests/core/test_admission.py", "tests/agent/test_engine.py")
ASK = """
import importlib, runpy, sys
if "{0}" == "controlplane.lab":
    runpy.run_module("controlplane.lab", run_name="__main__", alter_sys=True)
else:
    sys.exit(importlib.import_module("{0}").main(*sys.argv[1:]))
"""
WITHOUT = """
from controlplane.compiled import finder
print(finder.use_compiled())
from controlplane.core import slots
print(slots.__file__)
"""


@pytest.fixture
def sources(tmp_path) -> Path:
    for package in modules.SOURCES:
        shutil.copytree(modules.ROOT / "controlplane" / package, tmp_path / "controlplane" / package)
    return tmp_path


def test_every_module_is_there_and_is_named_once():
    assert all(modules.path_of(module).is_file() for module in modules.MODULES)
    assert len(set(modules.MODULES)) == len(modules.MODULES)


def test_no_module_defines_a_struct():
    """Compiled classes lose the options that a Struct is defined with."""
    for module in modules.MODULES:
        assert "(Struct" not in modules.path_of(module).read_text(), module


def test_no_class_of_the_interpreter_derives_from_one_that_is_compiled():
    """Making one is a TypeError, which only a process with a build would see."""
    trees = {path: ast.parse(path.read_text()) for path in (modules.ROOT / "controlplane").rglob("*.py")}
    compiled = {modules.path_of(module) for module in modules.MODULES}
    classes = {
        path: [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] for path, tree in trees.items()
    }
    native = {node.name for path in compiled for node in classes[path]}
    agents = [path for path in trees if path.parts[-2] in ("agent", "backends", "lab") and path not in compiled]
    found = [
        f"{path.name}: {node.name}"
        for path in agents
        for node in classes[path]
        if native & {base.id for base in node.bases if isinstance(base, ast.Name)}
    ]
    assert "OpenAIBackend" in native and not found


def test_a_build_is_found_until_a_source_changes(sources, tmp_path):
    builds = tmp_path / "builds"
    assert finder.build_of_these_sources(sources, builds) is None
    (builds / modules.digest(sources)).mkdir(parents=True)
    assert finder.build_of_these_sources(sources, builds) == builds / modules.digest(sources)
    # Also one that is not compiled itself: constants of it may be in the build.
    other = sources / "controlplane/agent/objectives.py"
    text = other.read_text()
    other.write_text(text.replace("60_000_000", "61_000_000"))
    assert finder.build_of_these_sources(sources, builds) is None
    other.write_text(text)
    assert finder.build_of_these_sources(sources, builds) is not None
    (sources / "controlplane/core/new.py").write_text("")
    assert finder.build_of_these_sources(sources, builds) is None


def test_a_build_of_another_librt_is_not_found(sources, tmp_path, monkeypatch):
    """Compiled code asks the library for what it was compiled with, and the process would not start."""
    builds = tmp_path / "builds"
    (builds / modules.digest(sources)).mkdir(parents=True)
    other = tmp_path / "elsewhere" / "librt-99.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: librt\nVersion: 99\n")
    monkeypatch.syspath_prepend(str(other.parent))
    assert finder.build_of_these_sources(sources, builds) is None
    monkeypatch.setattr(sys, "path", [str(other.parent.parent)])
    assert finder.build_of_these_sources(sources, builds) is None


def test_the_same_tests_pass_on_the_build_where_there_is_one():
    if finder.build_of_these_sources() is None:
        command = [sys.executable, "-c", WITHOUT]
        said = subprocess.run(command, cwd=modules.ROOT, capture_output=True, text=True, check=True)
        assert said.stdout.split() == ["False", str(modules.path_of("core.slots"))]
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.compiled.load", "-p", "no:cacheprovider", *HELD_TO]
    done = subprocess.run(command, cwd=modules.ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-3_000:]
    assert f"compiled: True {modules.BUILDS}" in done.stdout


def test_the_lab_answers_the_same_bytes_on_a_build_where_there_is_one(tmp_path):
    """A stored answer is computed again to the byte, also where one of the two was interpreted."""
    azure, night = azure_file(tmp_path, 200), mooncake_file(tmp_path, 40)
    question = ["replay", f"--trace={azure}", f"--job={night}:deadline_h=0.2", "--policy=reserved", "--slots=4",
                "--per-slot=4", "--safe-rate=2=20,4=40", "--curve=h100"]  # fmt: skip
    answers = []
    for module in ("controlplane.lab", "controlplane.lab.asking"):
        folder = tmp_path / module
        folder.mkdir()
        command = [sys.executable, "-c", ASK.format(module), *question]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(modules.ROOT)}, check=True)
        answers.append((folder / ANSWER).read_bytes())
    assert answers[0] == answers[1] and b"interactive" in answers[0]


def test_what_takes_too_long_is_ended_with_all_it_started(tmp_path, monkeypatch):
    late = tmp_path / "late"
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.5)
    sleeper = "import time, pathlib, sys; time.sleep(2); pathlib.Path(sys.argv[1]).touch()"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', *sys.argv[1:]])"
    with pytest.raises(build.BuildError, match="trying took over"):
        build._run(["-S", "-c", child, sleeper, str(late)], tmp_path, "trying")
    time.sleep(3)
    assert not late.exists()


def test_without_a_compiler_it_says_what_is_needed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "C compiler" in missing()
