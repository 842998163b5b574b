"""What an agent says of batch requests that clients sent themselves: all of them while they are here, no item."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from controlplane.agent.direct_work import ROWS_MAX, DirectBacklog
from tests.agent import worlds
from tests.agent.leased_items import item, lease, report
from tests.agent.wire_client import WireClient, chat_body, post
from tests.agent.worlds import class_policy

JOB = "01a227c5-9af1-7369-af9d-034add706e7c"
HOUR_US = 3_600_000_000


@dataclass
class Request:
    """As much of a call as counts here."""

    serial: int
    deadline_us: int | None
    gpu_us: int = 10
    job: str = ""
    item: object = None
    klass: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(policy=class_policy("bulk", kind="batch")))

    @property
    def exchange(self) -> SimpleNamespace:
        return SimpleNamespace(job=self.job)


@given(st.lists(st.tuples(st.integers(0, 2 * HOUR_US), st.integers(0, 10**9), st.booleans()), max_size=150))
def test_rows_say_the_work_that_is_here_and_none_of_it_due_later(rows):
    backlog = DirectBacklog()
    stays, goes = [], []
    for serial, (due, gpu_us, ends) in enumerate(sorted(rows)):
        call = Request(serial, due, gpu_us)
        backlog.add(call)
        (goes if ends else stays).append(call)
    for call in goes:
        backlog.remove(call)
        backlog.remove(call)
    told = backlog.of_class(2)
    assert len(told) <= ROWS_MAX and sum(row.gpu_us for row in told) == sum(call.gpu_us for call in stays)
    for call in stays:
        by_then = sum(other.gpu_us for other in stays if other.deadline_us <= call.deadline_us)
        assert sum(row.gpu_us for row in told if row.due_us <= call.deadline_us) >= by_then
    assert backlog.of_class(1) == []


def test_a_job_that_is_named_stands_in_a_row_of_its_own_and_what_is_no_job_in_none():
    backlog = DirectBacklog()
    for serial, job in enumerate((JOB, JOB.upper(), "", "nightly", JOB)):
        backlog.add(Request(serial, HOUR_US + serial * HOUR_US // 4, job=job))
    told = {row.job: (row.due_us, row.gpu_us) for row in backlog.of_class(2)}
    assert set(told) == {JOB, ""} and told[JOB] == (HOUR_US, 30)
    for serial in range(100, 200):
        backlog.add(Request(serial, HOUR_US, job=f"00000000-0000-4000-8000-{serial:012}"))
    assert len(backlog.of_class(2)) == 2 + ROWS_MAX, "more jobs than rows: those with the most work are told"


def test_interactive_requests_and_items_are_not_counted():
    backlog = DirectBacklog()
    backlog.add(Request(1, None))
    backlog.add(Request(2, HOUR_US, item=object()))
    assert backlog.of_class(2) == []


async def test_a_report_tells_direct_requests_until_they_end_and_no_items(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(2, "batch", places=1)]}), speed=1.0)
    clients = [await WireClient.connect(agent.port) for _ in range(3)]
    for client in clients:
        client.send(post(chat_body(max_tokens=8), headers=f"x-flexband-class: bulk\r\nx-flexband-job: {JOB}\r\n"))
    lease(agent, [item(1), item(2)])
    await agent.until(lambda: len(agent.engine.calls) == 5)
    direct = [call for call in agent.engine.calls.values() if call.item is None]
    (bulk,) = (row for row in report(agent).figures.classes if row.class_id == 2)
    (row,) = bulk.direct
    assert row.job == JOB and row.gpu_us == sum(call.gpu_us for call in direct) > 0
    assert row.due_us == min(call.arrived_us for call in direct) + HOUR_US
    await asyncio.gather(*(client.answer() for client in clients))
    await agent.until(lambda: not agent.engine.calls)
    assert all(not row.direct for row in report(agent).figures.classes)
