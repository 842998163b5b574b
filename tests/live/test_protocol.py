"""Frames that are encoded once for all viewers: a real server, and clients that ask for compression in every way."""

import contextlib
import json
import socket
import time

import pytest
import websockets.extensions.permessage_deflate as deflate
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect as connect_socket

from controlplane.config.asgi import WebSocketProtocol
from controlplane.live.frames import Publisher
from controlplane.live.live_frame import WINDOW_BITS, LiveFrame
from tests.live.socket_people import sign_in, sweep
from tests.web_thread import WebThread

TOPIC = "pool:shared"
BULK = {f"figure-{number}": [number, "waits", "waits"] for number in range(300)}
ASKED = {
    "nothing": None,
    "as a browser does": [deflate.ClientPerMessageDeflateFactory(client_max_window_bits=True)],
    "a smaller window": [deflate.ClientPerMessageDeflateFactory(server_max_window_bits=10)],
    "no context": [deflate.ClientPerMessageDeflateFactory(server_no_context_takeover=True)],
}
SHARED = {"nothing": "plain", "as a browser does": "deflated", "a smaller window": "", "no context": "deflated"}

pytestmark = pytest.mark.django_db


class Counting(WebSocketProtocol):
    """Tells how many frames went straight to the transport."""

    straight: list[str] = []

    def write_frame(self, frame):
        written = super().write_frame(frame)
        if written:
            Counting.straight.append("deflated" if self._compressed else "plain")
        return written


@pytest.fixture(scope="module")
def key(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock():
        sweep()
        yield sign_in("shared", "viewer")
        sweep()


@contextlib.contextmanager
def serving(*, compression):
    Counting.straight.clear()
    with WebThread(ws=Counting, ws_per_message_deflate=compression) as web:
        yield web.port


@contextlib.contextmanager
def viewer(port, key, extensions=None, **options):
    with connect_socket(
        f"ws://localhost:{port}/ws/live/", origin=f"http://localhost:{port}", compression=None, extensions=extensions,
        additional_headers={"cookie": f"sessionid={key}"}, max_size=None, **options,
    ) as one:  # fmt: skip
        one.send(json.dumps({"subscribe": [TOPIC]}))
        yield Far(one)


class Far:
    """A client's end: the state by the protocol's rules."""

    def __init__(self, one):
        self.one, self.state, self.seq = one, {}, 0

    def until(self, number):
        while self.state.get("n", -1) < number:
            frame = json.loads(self.one.recv(timeout=60))
            if frame["type"] == "snapshot":
                self.state = frame["data"]
            else:
                assert frame["seq"] == self.seq + 1
                self.state |= frame["data"]
            self.seq = frame["seq"]
        return self.state


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("compression", [True, False])
def test_every_client_reads_the_same_whatever_it_asks_for(key, frames_redis, now, asked, compression):
    publisher = Publisher(frames_redis)
    publisher.publish([(TOPIC, {"n": 0, **BULK})], now, clock_s=0.0)
    with serving(compression=compression) as port, viewer(port, key, ASKED[asked]) as one:
        assert one.until(0) == {"n": 0, **BULK}
        for number in range(1, 6):
            publisher.publish([(TOPIC, {"n": number, **BULK, "text": "é" * number})], now, clock_s=float(number))
        assert one.until(5)["text"] == "ééééé"
        assert set(Counting.straight) <= {SHARED[asked] if compression else "plain"}
        assert bool(Counting.straight) is bool(SHARED[asked] or not compression)


def test_one_compression_serves_all_and_the_wire_is_a_fraction_of_the_text():
    frame = LiveFrame(json.dumps(BULK).encode())
    assert frame.deflated is frame.deflated
    assert frame.plain is frame.plain
    assert len(frame.deflated) < len(frame.plain) / 3
    ours = deflate.PerMessageDeflate(True, False, WINDOW_BITS, 12)
    assert frame.deflated[0] == 0b11000001, "whole, compressed, text"
    payload = frame.deflated[4:]  # two bytes of header, two of length
    assert json.loads(bytes(ours.decode(Frame(Opcode.TEXT, payload, rsv1=True)).data)) == BULK


def test_a_reader_that_is_behind_is_not_written_past(key, frames_redis, now):
    """Its transport is full: nothing goes around what waits there, and it ends with the newest state."""
    publisher = Publisher(frames_redis)
    publisher.publish([(TOPIC, {"n": 0})], now, clock_s=0.0)
    with serving(compression=True) as port, contextlib.closing(socket.socket()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        slow.connect(("127.0.0.1", port))
        with viewer(port, key, sock=slow, max_queue=1) as one:
            assert one.until(0) == {"n": 0}
            for number in range(1, 41):
                publisher.publish([(TOPIC, {"n": number, "bulk": f"{number} " + "x" * 200_000})], now, clock_s=number)
                time.sleep(0.02)
            assert one.until(40)["bulk"].startswith("40 ")
            assert 0 < len(Counting.straight) < 40
