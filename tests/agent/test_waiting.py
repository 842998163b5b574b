"""What waits for a while ends with the event, with the time, and with a cancellation, whenever that comes."""

import asyncio
import time

import pytest

from controlplane.agent.waiting import wait_at_most


async def test_it_ends_with_the_event_or_with_the_time():
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    began_s = time.perf_counter()
    await wait_at_most(event, 0.1)
    assert time.perf_counter() - began_s > 0.05, "timers of a loop are a millisecond or two early"
    loop.call_later(0.01, event.set)
    await asyncio.wait_for(wait_at_most(event, 600), 60)


@pytest.mark.parametrize("first", ["set", "cancelled"])
async def test_a_cancellation_that_comes_as_the_wait_ends_is_kept(first):
    event = asyncio.Event()
    task = asyncio.create_task(wait_at_most(event, 60))
    await asyncio.sleep(0)
    for step in (event.set, task.cancel) if first == "set" else (task.cancel, event.set):
        step()
    with pytest.raises(asyncio.CancelledError):
        await task
