"""Threads beside requests give way to them."""

import os
import sys
import threading

import pytest

from controlplane.agent.threads import NICER, THREADS, beside_requests


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the process's elsewhere")
def test_they_give_way_and_the_process_does_not():
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    gate = threading.Barrier(THREADS)

    def found() -> int:
        gate.wait(timeout=60)
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with beside_requests() as threads:
        told = [threads.submit(found) for _ in range(THREADS)]
        assert [one.result(timeout=60) for one in told] == [min(19, mine + NICER)] * THREADS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
