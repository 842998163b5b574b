"""What runs ends in order, whoever leaves before."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from controlplane.lab.calls import Call, Rows
from controlplane.lab.ends import Ends
from controlplane.lab.policies import bands, document_of
from controlplane.lab.service import Constants
from controlplane.lab.simulator import Simulator
from controlplane.lab.workload import Workload

LAB = Simulator(document_of(bands(1, 0, 0), ["t0"]), Workload(("interactive",), ("t0",)), Constants(1, 1, 1))
KLASS, TENANT = LAB.registry.classes["interactive"], LAB.tenant("t0")


def made(run: int, ends_us: int) -> Call:
    call = Call(run, Rows(0), 0, KLASS, TENANT, 1, 1, 0)
    call.run, call.ends_us = run, ends_us
    return call


@given(seed=st.integers(0, 1 << 20), calls=st.integers(0, 90), instants=st.sampled_from([1, 5, 1_000]))
def test_the_first_one_ends_first_and_of_one_instant_the_one_that_began_first(seed, calls, instants):
    rng, ends, left = Random(seed), Ends(), []
    for run in range(1, calls + 1):
        call = made(run, rng.randrange(instants))
        ends.add(call)
        left.append(call)
        if rng.random() < 0.4:
            gone = left.pop(rng.randrange(len(left)))
            ends.remove(gone)
            if rng.random() < 0.3:
                gone.ends_us += rng.randrange(instants)
                ends.add(gone)
                left.append(gone)
        assert [call.place for call in ends.calls] == list(range(len(left)))
        if left:
            assert ends.calls[0] is min(left, key=lambda call: (call.ends_us, call.run))
    seen = []
    while ends.calls:
        seen.append(ends.calls[0])
        ends.remove(ends.calls[0])
    assert seen == sorted(left, key=lambda call: (call.ends_us, call.run))
