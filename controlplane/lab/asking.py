"""One question in a process of its own, in its folder, as `python -m controlplane.lab` starts it.

Lines of JSON go to the standard output: `{"share": 0.4, "runs": 3}` while it works, at last `{"error": text}` or
`{"done": seconds}` with the answer in `answer.json`: keys in order, so that equal answers are equal bytes.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, Final

from controlplane.lab.kinds import KINDS, parse
from controlplane.lab.watching import Watch

ANSWER: Final = "answer.json"
MEMORY_BYTES: Final = 4 << 30
TELL_EVERY_S: Final = 0.25
NICE: Final = 10


def canonical(answer: Any) -> bytes:
    """Equal answers are equal bytes."""
    return json.dumps(answer, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def answer_bytes(kind: str, arguments: list[str], watch: Watch | None = None) -> bytes:
    """The answer to a question whose files lie in the working folder. Raises ValueError and OSError."""
    return canonical(KINDS[kind].ask({**parse(kind, arguments), "watch": watch}))


def _say(**said: Any) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


class _Teller:
    """At most four lines a second."""

    def __init__(self, runs: int) -> None:
        self._runs, self._due_s = runs, 0.0

    def __call__(self, share: float, over: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + TELL_EVERY_S
            _say(share=min(0.99, (over + share) / max(self._runs, over + 1)), runs=over)


def main(kind: str, *arguments: str) -> int:
    os.nice(NICE)
    # A run makes millions of short-lived objects and no cycles of them: looking for some is wasted.
    gc.freeze()
    gc.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    began_s = time.monotonic()
    try:
        content = answer_bytes(kind, list(arguments), Watch(_Teller(KINDS[kind].runs)))
    except MemoryError:
        _say(error=f"It needs more than {MEMORY_BYTES >> 30} GB of memory: choose a shorter window.")
        return 1
    except OSError as error:
        _say(error=f"{error.filename}: {error.strerror}")
        return 1
    except ValueError as error:
        _say(error=str(error))
        return 1
    Path(ANSWER).write_bytes(content)
    _say(done=round(time.monotonic() - began_s, 3))
    return 0
