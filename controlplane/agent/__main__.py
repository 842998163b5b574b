"""`python -m controlplane.agent`."""

import sys

from controlplane.agent.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
