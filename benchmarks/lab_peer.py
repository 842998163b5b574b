"""The same arrivals in simpy, as its documentation models a counter with several clerks: one resource, one queue.

No admission, no tenants, no classes, no records: each request is a process that takes a place and holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import process_time

try:
    import simpy
except ImportError:
    simpy = None


def version() -> str | None:
    return None if simpy is None else simpy.__version__


def textbook(at_us: Sequence[int], service_us: Sequence[int], places: int) -> tuple[float, int]:
    """(CPU seconds, sum of the waits in microseconds)"""
    env, waited = simpy.Environment(), [0]
    counter = simpy.Resource(env, capacity=places)

    def request(arrival_us: int, time_us: int):
        with counter.request() as place:
            yield place
            waited[0] += env.now - arrival_us
            yield env.timeout(time_us)

    def source():
        for arrival_us, time_us in zip(at_us, service_us, strict=True):
            yield env.timeout(arrival_us - env.now)
            env.process(request(arrival_us, time_us))

    env.process(source())
    began = process_time()
    env.run()
    return process_time() - began, waited[0]
