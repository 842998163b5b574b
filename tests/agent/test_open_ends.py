"""Clients that send no more and wait, clients that are gone, and more connections than there is room for."""

import pytest

from controlplane.agent.open_ends import LOOK_PAUSE_S, IdleShedder
from controlplane.core.reasons import Outcome
from tests.agent.wire_client import WireClient, chat_body, post

CANCELLED = Outcome.CANCELLED_BY_CLIENT.code
GET = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer fb_live_acme_secret\r\n\r\n"


async def final_answer(client: WireClient):
    """The answer behind any number of interim ones, and how many those were."""
    interim = 0
    while (answer := await client.answer()).status == 100:
        interim += 1
    return answer, interim


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closed_its_sending_half_gets_its_answer(make_agent, stream):
    agent = await make_agent(speed=1.0)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=60, ignore_eos=True, stream=stream)))
    client.writer.write_eof()
    answer, interim = await final_answer(client)
    assert answer.status == 200 and interim >= 1
    assert b"usage" in answer.body or b"[DONE]" in answer.body
    assert await client.closed_by_server(), "nothing can come on it any more"
    assert [row.outcome for row in agent.closed_rows()] == [Outcome.COMPLETED.code]
    agent.assert_nothing_held()


async def test_all_requests_before_the_end_are_answered(make_agent):
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    client.send(GET * 3)
    client.writer.write_eof()
    assert [(await final_answer(client))[0].status for _ in range(3)] == [200] * 3
    assert await client.closed_by_server()


async def test_a_client_that_closed_both_halves_cancels_within_a_second(make_agent):
    """The end of what it sends looks the same: its host says that nobody is there, to the second look at the latest."""
    agent = await make_agent(speed=0.5)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=200, ignore_eos=True)))
    await agent.until(lambda: any(call.slot for call in agent.engine.calls.values()))
    client.writer.close()
    await agent.until(lambda: not agent.engine.calls, within_s=1.0)
    assert [row.outcome for row in agent.closed_rows()] == [CANCELLED]
    agent.assert_nothing_held()


async def test_an_old_client_gets_no_interim_answer_and_counts_as_gone(make_agent):
    agent = await make_agent(speed=0.5)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=200, ignore_eos=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
    await agent.until(lambda: agent.engine.calls)
    client.writer.write_eof()
    assert await client.closed_by_server()
    assert [row.outcome for row in agent.closed_rows()] == [CANCELLED]


async def test_half_a_request_and_its_end_close_the_connection(make_agent):
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body())[:-5])
    client.writer.write_eof()
    assert await client.closed_by_server()
    agent.assert_nothing_held()


async def test_a_full_table_sheds_the_connection_that_was_idle_longest(make_agent):
    agent = await make_agent(speed=0.5)
    agent.front._connections_max = 3
    idle = await WireClient.connect(agent.port)
    assert (await idle.ask(GET)).status == 200
    later = await WireClient.connect(agent.port)
    assert (await later.ask(GET)).status == 200
    busy = await WireClient.connect(agent.port)
    busy.send(post(chat_body(max_tokens=200, ignore_eos=True)))
    await agent.until(lambda: agent.engine.calls)
    newcomer = await WireClient.connect(agent.port)
    assert (await newcomer.ask(GET)).status == 200
    assert await idle.closed_by_server()
    assert (await later.ask(GET)).status == 200
    assert agent.engine.calls, "who is being answered stays"


async def test_with_nobody_idle_a_full_table_refuses(make_agent):
    agent = await make_agent(speed=0.5)
    agent.front._connections_max = 1
    busy = await WireClient.connect(agent.port)
    busy.send(post(chat_body(max_tokens=200, ignore_eos=True)))
    await agent.until(lambda: agent.engine.calls)
    newcomer = await WireClient.connect(agent.port)
    refused = await newcomer.answer()
    assert refused.status == 503 and "too many connections" in refused.json["error"]["message"]
    assert agent.engine.calls


class One:
    def __init__(self, since_s: float, *, busy: bool = False) -> None:
        self.since_s = since_s
        self.busy = busy
        self.closed = False

    def idle(self) -> bool:
        return not self.busy and not self.closed

    def shut(self) -> None:
        self.closed = True


def test_one_look_serves_many_and_what_became_busy_is_left():
    table = {One(float(at)) for at in range(100)}
    oldest = sorted(table, key=lambda one: one.since_s)
    shedder, newest = IdleShedder(table), One(200.0)
    assert shedder.shed(newest, 0.0) and oldest[0].closed
    oldest[1].busy = True
    assert shedder.shed(newest, 0.0) and oldest[2].closed and not oldest[1].closed
    for _ in range(61):
        assert shedder.shed(newest, 0.0)
    assert not shedder.shed(newest, LOOK_PAUSE_S / 2), "the next look waits"
    assert shedder.shed(newest, LOOK_PAUSE_S) and oldest[64].closed


def test_the_newest_is_never_shed_for_itself():
    newest = One(0.0)
    assert not IdleShedder({newest}).shed(newest, 0.0)
    assert not newest.closed
