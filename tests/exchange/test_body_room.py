"""Bodies that nobody has looked at yet, over real sockets: bounded in bytes, with an answer that says to come again."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.exchange import body_room
from controlplane.exchange.body_room import BODY_BYTES_LEAST, BodyRoom
from controlplane.exchange.group_commit import Groups
from controlplane.exchange.problems import Refusal
from controlplane.exchange.reports import OF_EPOCH_MAX
from controlplane.wire import report as wire
from tests.exchange.one_group import HELD_S, held_until, sent_in_turn
from tests.exchange.test_protocol import Socket, over_socket, request, rows, stored

__all__ = ["over_socket"]
KIB = 1024


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["more", "whole", "release"]), st.integers(0, 40 * KIB))))
def test_what_is_held_is_what_is_not_let_go_and_never_more_than_the_room(steps):
    room = BodyRoom(64 * KIB, 32 * KIB)
    bodies = [room.hold() for _ in range(6)]
    for at, step, size in steps:
        try:
            if step == "more":
                bodies[at].arriving(size)
            elif step == "whole":
                bodies[at].whole(size)
            else:
                bodies[at].release()
        except Refusal as refusal:
            assert (refusal.problem.code, refusal.problem.status) == ("busy", 503)
        assert 0 <= room.arriving <= room.arriving_max
        assert room.arriving <= room.held <= room.bytes_max + room.arriving_max
    for body in bodies:
        body.release()
    assert room.held == room.arriving == 0


async def sent_by(agent, report) -> bytes:
    """The bytes of a signed request."""
    found: list[bytes] = []

    async def keep(scope, receive, send):
        found.append(request(scope["method"], scope["path"], scope["headers"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await agent.send(report, app=keep)
    return found[0]


def declared(size: int, more: bytes = b"", path: str = "report") -> bytes:
    """The head of a body that nobody has signed, and some of it."""
    head = f"POST /agent/v1/{path} HTTP/1.1\r\nhost: a\r\nx-flexband-agent: nobody\r\ncontent-length: {size}\r\n"
    return head.encode() + more + b"\r\n"


@pytest.mark.parametrize("more", [b"", b"content-encoding: gzip\r\n"], ids=["short way", "long way"])
async def test_bodies_that_only_begin_are_bounded_and_let_whole_ones_through(over_socket, world, app, more):
    """Strangers send all but the end of large bodies: the first ones wait, the others are told to come again."""
    agent = over_socket
    app.room = BodyRoom(400 * KIB, 200 * KIB)
    port = agent.app._port
    strangers = [Socket(port) for _ in range(8)]
    for stranger in strangers:
        await stranger.connect()
        stranger._streams[1].write(declared(60 * KIB, more) + b"x" * (50 * KIB))
    answered: list[Socket] = []
    for _ in range(3_000):
        answered = [one for one in strangers if one._streams[0]._buffer]
        if len(answered) >= 4:
            break
        await asyncio.sleep(0.02)
    assert len(answered) >= 4, "more would be held than there is room for"
    for one in answered:
        status, headers, body = await one.read()
        assert (status, dict(headers)[b"retry-after"]) == (503, b"1")
        assert b"busy" in body
    assert app.room.arriving <= 200 * KIB
    assert (await agent.report(records=rows(world))).accepted_through == 1, "who sends at once is taken"
    for stranger in strangers:
        stranger._streams[1].close()
    for _ in range(3_000):
        if not app.room.held:
            break
        await asyncio.sleep(0.02)
    assert app.room.held == app.room.arriving == 0


async def test_whole_bodies_that_wait_are_bounded_and_sent_again(over_socket, world, app, monkeypatch):
    agent = over_socket
    report = await sent_by(agent, agent.build(records=rows(world)))
    app.room = BodyRoom(3 * BODY_BYTES_LEAST, BODY_BYTES_LEAST)
    groups = app.handlers._report_groups
    monkeypatch.setattr(groups, "_window_s", HELD_S)
    connections = [Socket(agent.app._port) for _ in range(6)]
    sending = [asyncio.ensure_future(one.exchange(report)) for one in connections]
    async with asyncio.timeout(HELD_S):
        while sum(one.done() for one in sending) + len(groups._waiting) < len(sending):
            await asyncio.sleep(0.005)
    monkeypatch.setattr(groups, "_window_s", 0.0)
    groups._flush()
    answers = await asyncio.gather(*sending)
    statuses = sorted(status for status, _, _ in answers)
    assert statuses[0] == 200 and statuses.count(503) >= 3
    assert all(dict(headers)[b"retry-after"] == b"1" for status, headers, _ in answers if status == 503)
    refused = connections[[status for status, _, _ in answers].index(503)]
    assert (await refused.exchange(report))[0] == 200, "on the same connection, a moment later"
    assert app.room.held == 0
    assert await stored() == (3, 3)


async def test_copies_of_a_report_are_one_look_at_the_database(over_socket, world, app, monkeypatch):
    agent = over_socket
    report = agent.build(records=rows(world))
    held_until(monkeypatch, app.handlers._report_groups, 30)
    looks = count_transactions(monkeypatch)
    ways = [Socket(agent.app._port) for _ in range(30)]
    answers = await asyncio.gather(*(agent.send(report, app=way) for way in ways))
    found = [answer.read(wire.Answer) for answer in answers]
    assert sorted(answer.repeat for answer in found) == [False] + [True] * 29
    assert {answer.accepted_through for answer in found} == {1}
    assert len(looks) == 1
    assert await stored() == (3, 3)


async def test_an_epoch_has_so_many_reports_in_a_group(over_socket, world, app, monkeypatch):
    agent = over_socket
    groups = app.handlers._report_groups
    built = [agent.build(seq=seq, records=rows(world, 1)) for seq in range(1, OF_EPOCH_MAX + 4)]
    held_until(monkeypatch, groups, len(built))
    looks = count_transactions(monkeypatch)
    sending = await sent_in_turn(groups, [partial(agent.send, one, app=Socket(agent.app._port)) for one in built])
    answers = [await one for one in sending]
    assert [answer.status for answer in answers] == [200] * OF_EPOCH_MAX + [429] * 3
    assert {answer.headers["retry-after"] for answer in answers[OF_EPOCH_MAX:]} == {"1"}
    assert len(looks) == OF_EPOCH_MAX
    assert await stored() == (OF_EPOCH_MAX, OF_EPOCH_MAX)


def count_transactions(monkeypatch) -> list[int]:
    """Sizes of the groups that are committed from here on."""
    from controlplane.exchange import group_commit

    looks: list[int] = []
    commit = group_commit.commit_group

    def counting(connection, group, now):
        looks.append(len(group))
        return commit(connection, group, now)

    monkeypatch.setattr(group_commit, "commit_group", counting)
    return looks


async def test_a_group_is_bounded_by_what_is_in_it():
    sizes: list[int] = []

    def work(group, now):
        sizes.append(len(group))
        return list(group)

    groups = Groups(work, key=id, weight=lambda item: 1, failed=lambda error: None, items_max=7, flushers=1)
    left = asyncio.Event()
    answers: list[float] = []

    def done(answer) -> None:
        answers.append(answer)
        if len(answers) == 40:
            left.set()

    for number in range(40):
        groups.offer(float(number), done)
    await asyncio.wait_for(left.wait(), 60)
    groups.close()
    assert sorted(answers) == [float(number) for number in range(40)]
    assert max(sizes) == 7 and sum(sizes) == 40


def test_the_bounds_leave_room_for_the_largest_report():
    assert body_room.ARRIVING_BYTES_MAX >= 8 * 8 * 1024 * 1024
