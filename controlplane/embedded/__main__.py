"""`python -m controlplane.embedded start|stop|status|remove FOLDER`: the embedded servers without the demo."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from controlplane.embedded.errors import EmbeddedError
from controlplane.embedded.postgres import find_running_postgres, remove_postgres, start_postgres, stop_postgres
from controlplane.embedded.valkey import find_running_valkey, remove_valkey, start_valkey, stop_valkey


def main(arguments: list[str]) -> int:
    """Run one command and print one line, or JSON with the addresses for `start` and `status`."""
    parser = argparse.ArgumentParser(prog="python -m controlplane.embedded", description=__doc__)
    parser.add_argument("command", choices=("start", "stop", "status", "remove"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        return _run(options.command, options.folder)
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 1


def _run(command: str, folder: Path) -> int:
    if command == "remove":
        remove_valkey(folder)
        remove_postgres(folder)
        return 0
    if command == "stop":
        stopped = [stop_valkey(folder), stop_postgres(folder)]
        print("stopped" if any(stopped) else "nothing was running")
        return 0
    start = command == "start"
    postgres = start_postgres(folder) if start else find_running_postgres(folder)
    valkey = start_valkey(folder) if start else find_running_valkey(folder)
    print(
        json.dumps(
            {
                "postgres": None
                if postgres is None
                else {"pid": postgres.pid, "version": postgres.version, "way": postgres.way, "app": postgres.app_dsn},
                "valkey": None if valkey is None else {"pid": valkey.pid, "url": valkey.url},
            },
            indent=1,
        )
    )
    return 0 if postgres and valkey else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
