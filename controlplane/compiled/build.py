"""Making a build: mypyc writes the modules of `modules.MODULES` as C, the C compiler makes them machine code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from controlplane.compiled.modules import BUILDS, MODULES, ROOT, SOURCES, digest, path_of

COMPILE_TIMEOUT_S = 7_200
MAKING = "making-"
SETUP = """
import sys
from setuptools import setup
from mypyc.build import mypycify

folder, work, *paths = sys.argv[1:]
options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--cache-dir=" + work + "/types"]
extensions = mypycify([*options, *paths], target_dir=work, opt_level="2", debug_level="0")
for extension in extensions:
    # What nobody outside may call is called directly, and may be put into its caller.
    extension.extra_compile_args.append("-fvisibility=hidden")
setup(
    name="compiled",
    packages=[],
    ext_modules=extensions,
    script_args=["--quiet", "build_ext", "--build-lib", folder, "--build-temp", work],
)
"""
TRIAL = """
import sys
from controlplane.compiled import finder
from pathlib import Path

folder = Path(sys.argv[1])
sys.path.append(str(folder))
sys.meta_path.insert(0, finder.CompiledFinder(folder))
import controlplane.agent.cli
import controlplane.lab.asking
"""


class BuildError(Exception):
    """There is no build; the message says in a line why."""


def build() -> Path:
    """Make the build of these sources and remove older ones; its folder. Raises BuildError.

    It is made from a copy, so that edits meanwhile do not get into it, and appears under its name when it is whole and
    has been imported once.
    """
    BUILDS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILDS, prefix=MAKING) as making:
        folder, work, root = Path(making) / "build", Path(making) / "work", Path(making) / "sources"
        work.mkdir()
        for package in (*SOURCES, "compiled"):
            shutil.copytree(ROOT / "controlplane" / package, root / "controlplane" / package)
        shutil.copy(ROOT / "controlplane" / "__init__.py", root / "controlplane")
        name = digest(root)
        paths = [str(path_of(module, root).relative_to(root)) for module in MODULES]
        _run(["-c", SETUP, str(folder), str(work), *paths], root, "compiling")
        _run(["-c", TRIAL, str(folder)], root, "loading what was compiled")
        with contextlib.suppress(FileExistsError, OSError):
            folder.rename(BUILDS / name)
    for old in BUILDS.iterdir():
        if old.name != name and not old.name.startswith(MAKING):
            shutil.rmtree(old, ignore_errors=True)
    return BUILDS / name


def _run(arguments: list[str], root: Path, doing: str) -> None:
    command = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "CFLAGS": os.environ.get("CFLAGS", "-g0")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = command.communicate(timeout=COMPILE_TIMEOUT_S)
    except BaseException as error:
        # The compiler is a child of the child: it would go on for nobody.
        os.killpg(command.pid, signal.SIGKILL)
        command.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BuildError(f"{doing} took over {COMPILE_TIMEOUT_S} s") from None
        raise
    if command.returncode:
        said = output.decode(errors="replace").strip()
        raise BuildError(f"{doing} failed:\n{said[-3_000:]}")
