"""The collector of the web process still finds cycles; it only looks less often."""

from __future__ import annotations

import gc
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
