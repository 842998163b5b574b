"""`python -m controlplane.lab KIND ARGUMENT...`: one question in a process of its own, compiled where it can be."""

import importlib
import sys

from controlplane.compiled.finder import use_compiled

if __name__ == "__main__":
    # What is imported before this is not compiled.
    use_compiled()
    sys.exit(importlib.import_module("controlplane.lab.asking").main(*sys.argv[1:]))
