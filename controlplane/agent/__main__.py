"""`python -m controlplane.agent`."""

import importlib
import sys

from controlplane.compiled.finder import use_compiled

if __name__ == "__main__":
    # What is imported before this is not compiled.
    use_compiled()
    sys.exit(importlib.import_module("controlplane.agent.cli").main(sys.argv[1:]))
