"""`python -m controlplane.compiled`: compile what a request passes in an agent, unless that was done already."""

import argparse
import importlib.util
import shutil
import sys
import time

from controlplane.compiled.build import BuildError, build
from controlplane.compiled.finder import build_of_these_sources

COMPILERS = ("cc", "gcc", "clang")


def missing() -> str:
    """What is needed to compile and is not there; empty when all is."""
    if not any(shutil.which(name) for name in COMPILERS):
        return "a C compiler (Debian and Ubuntu: apt install gcc)"
    for name in ("mypyc", "setuptools"):
        if importlib.util.find_spec(name) is None:
            return f"{name} (python -m pip install {'mypy' if name == 'mypyc' else name})"
    return ""


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m controlplane.compiled", description=__doc__).parse_args(arguments)
    if build_of_these_sources() is not None:
        sys.stdout.write("compiled already\n")
        return 0
    lacking = missing()
    if lacking:
        sys.stderr.write(f"error: compiling needs {lacking}; everything runs without it, interpreted\n")
        return 1
    began_s = time.monotonic()
    sys.stdout.write("compiling what a request passes in an agent ...\n")
    sys.stdout.flush()
    try:
        folder = build()
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"compiled in {time.monotonic() - began_s:.0f} s: {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
