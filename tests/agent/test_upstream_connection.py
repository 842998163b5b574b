"""How a connection to an inference server treats the kernel's acknowledgements, on real sockets."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from controlplane.agent.backends.openai import OpenAIBackend, UpstreamRun
from controlplane.agent.backends.request import BackendRequest
from controlplane.agent.backends.upstream_connection import MANY_STREAMS, PUT_OFF_EVERY, UpstreamConnection
from tests.agent import upstreams as up
from tests.agent import worlds

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"%x\r\n%b\r\n" % (len(up.word("a")), up.word("a"))

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux only")


class Sink:
    def __init__(self) -> None:
        self.tokens = 0

    def prefill_began(self) -> None: ...

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        self.tokens += tokens


@asynccontextmanager
async def streaming(*, heard: int = 0):
    """A backend that has heard so much and its connection, with a stream whose events a test hands over itself."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    backend, sink = OpenAIBackend(f"http://127.0.0.1:{port}"), Sink()
    backend.heard = heard
    request = BackendRequest("r1", "/v1/chat/completions", b"{}", worlds.MODEL, 1, True, False, 7, 8, 1, 100)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: UpstreamConnection(backend), "127.0.0.1", port
    )
    connection.send(UpstreamRun(backend, request, sink))
    connection.data_received(HEAD + EVENT)
    connection.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    yield backend, connection, sink
    connection.transport.abort()
    server.close()


def at_once(connection: UpstreamConnection) -> bool:
    """Whether the kernel acknowledges what is read at once."""
    return bool(connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))


def events(backend: OpenAIBackend, connection: UpstreamConnection, count: int, *, streams: int) -> None:
    """Events of one stream, while so many others bring as many."""
    for _ in range(count):
        backend.heard += streams - 1
        connection.data_received(EVENT)


async def test_among_many_streams_acknowledgements_are_put_off_again_and_again():
    async with streaming() as (backend, connection, sink):
        events(backend, connection, PUT_OFF_EVERY - 1, streams=MANY_STREAMS)
        assert at_once(connection)
        for _ in range(2):
            events(backend, connection, 1, streams=MANY_STREAMS)
            assert not at_once(connection)
            # What the kernel does by itself once an event takes longer than usual.
            connection.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            events(backend, connection, PUT_OFF_EVERY - 1, streams=MANY_STREAMS)
            assert at_once(connection)
        assert sink.tokens == 1 + 3 * PUT_OFF_EVERY - 1


async def test_among_few_streams_every_event_is_acknowledged_at_once():
    """A server that waits for that before it sends the next one (Nagle's algorithm) would hold events back."""
    # What was heard before this stream does not count.
    async with streaming(heard=2 * MANY_STREAMS * PUT_OFF_EVERY) as (backend, connection, _):
        events(backend, connection, 10 * PUT_OFF_EVERY, streams=MANY_STREAMS // 2)
        assert at_once(connection)


async def test_a_connection_that_was_cancelled_meanwhile_is_left_alone():
    """Its descriptor may be another connection's by now."""
    async with streaming() as (backend, connection, sink):
        events(backend, connection, PUT_OFF_EVERY - 1, streams=MANY_STREAMS)
        sink.chunk = lambda *_, **__: connection.transport.abort()
        events(backend, connection, 1, streams=MANY_STREAMS)
        assert connection.transport.is_closing() and at_once(connection)
