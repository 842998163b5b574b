"""The collector of the web process still finds cycles; it only looks less often. What arrays free is kept."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref

import pytest

from controlplane.exchange.collector import GENERATIONS, spare_reports


class Knot:
    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def usual_collector():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_cycles_are_still_freed(usual_collector):
    spare_reports()
    assert gc.get_threshold() == GENERATIONS
    assert gc.get_freeze_count() > 0
    freed = weakref.ref(Knot())
    assert freed() is not None
    gc.collect()
    assert freed() is None


def test_it_runs_by_itself_after_enough_objects(usual_collector):
    spare_reports()
    freed = weakref.ref(Knot())
    kept = [[number] for number in range(GENERATIONS[0] * 2)]
    assert freed() is None, f"{len(kept)} objects did not start the collector"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the option is glibc's")
def test_an_array_of_megabytes_is_not_mapped_anew_each_time():
    mapped = (
        "import sys\n"
        "from controlplane.exchange.collector import keep_freed_memory\n"
        "keep = sys.argv[1] == 'keep' and keep_freed_memory()\n"
        "def maps():\n"
        "    with open('/proc/self/maps') as lines:\n"
        "        return len(list(lines))\n"
        "before = maps()\n"
        "arrays = [bytearray(number * 1_000_003) for number in (1, 3, 7)]\n"
        "print(keep, maps() - before)\n"
    )
    answers = [
        subprocess.run([sys.executable, "-c", mapped, how], capture_output=True, text=True, check=True).stdout.split()
        for how in ("as it is", "keep")
    ]
    assert answers[1][0] == "True"
    assert int(answers[1][1]) < int(answers[0][1])
