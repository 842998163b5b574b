"""The client for typed addresses: where it may go, and that it ends, whatever the other side does."""

import http.server
import socket
import threading
import time
from contextlib import contextmanager
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.web import outbound

LOOPBACK = outbound.networks(["127.0.0.0/8"])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://example.com/", "Write an address"),
        ("https://", "Write an address"),
        ("example.com/hook", "Write an address"),
        ("https://ada:pw@example.com/", "Leave user name and password"),
        ("https://example.com/a b", "holds a space, a control character"),
        ("https://example.com/\r\nx: y", "holds a space, a control character"),
        ("https://example.com/é", "written in per cent"),
        ("https://example.com:99999/", "cannot be read"),
        ("https://example.com:0/", "Port 0"),
        ("https://example.com/" + "x" * 500, "more than 500 characters"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(url, said):
    with pytest.raises(outbound.Refused, match=said):
        outbound.checked_url(url)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1",
        "::ffff:127.0.0.1", "64:ff9b::10.0.0.1", "2002:0a00:0001::", "2002:7f00:0001::1",
    ],
)  # fmt: skip
def test_addresses_of_a_machine_or_network_of_ones_own_are_refused(address):
    assert not outbound.is_allowed(ip_address(address), ())
    with pytest.raises(outbound.Refused, match="FLEXBAND_OUTBOUND_ALLOW"):
        outbound.refuse_address(address, ())


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34"])
def test_public_addresses_are_allowed(address):
    assert outbound.is_allowed(ip_address(address), ())


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_judged_like_itself(address):
    mapped = ip_address(f"::ffff:{address}")
    nat64 = ip_address(int(ip_address("64:ff9b::")) | int(address))
    assert outbound.is_allowed(mapped, ()) == outbound.is_allowed(address, ())
    if not outbound.is_allowed(address, ()):
        assert not outbound.is_allowed(nat64, ())


def test_an_allowed_range_opens_itself_only():
    allowed = outbound.networks(["10.20.0.0/16", " fd00::/8"])
    assert outbound.is_allowed(ip_address("10.20.3.4"), allowed)
    assert outbound.is_allowed(ip_address("::ffff:10.20.3.4"), allowed)
    assert outbound.is_allowed(ip_address("fd12::1"), allowed)
    assert not outbound.is_allowed(ip_address("10.21.0.1"), allowed)
    with pytest.raises(ValueError, match=r"10\.0\.0\.300"):
        outbound.networks(["10.0.0.300"])


def test_a_name_that_leads_inside_is_refused_before_anything_is_sent():
    with (
        answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as (port, heard),
        pytest.raises(outbound.Refused, match=r"localhost \(.*\) is not a public address"),
    ):
        outbound.post(f"http://localhost:{port}/", b"{}", {}, allowed=())
    assert not any(heard)


def _request(connection: socket.socket) -> bytes:
    """A request with its body; what came when the other side goes."""
    found = b""
    while piece := connection.recv(65_536):
        found += piece
        head, end, body = found.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0)
        if end and len(body) >= length:
            break
    return found


@contextmanager
def answering(answer: bytes, *, pause_s: float = 0.0):
    """A server that answers one connection with these bytes, one byte per pause; (port, what it heard)."""
    heard: list[bytes] = []
    stop = threading.Event()

    def serve() -> None:
        with server:
            server.settimeout(60)
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(60)
                heard.append(_request(connection))
                try:
                    for piece in [answer] if not pause_s else [answer[i : i + 1] for i in range(len(answer))]:
                        connection.sendall(piece)
                        if stop.wait(pause_s):
                            return
                except OSError:
                    return

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1], heard
    finally:
        stop.set()
        with socket.socket() as bell:
            bell.settimeout(1)
            bell.connect_ex(server.getsockname() if server.fileno() != -1 else ("127.0.0.1", 9))
        thread.join()


def test_posts_to_the_resolved_address_under_the_name():
    with answering(b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\nok") as (port, heard):
        answer = outbound.post(
            f"http://127.0.0.1:{port}/hook?a=b", b'{"a":1}', {"content-type": "application/json"}, allowed=LOOPBACK
        )
    assert (answer.status, answer.body) == (202, b"ok")
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /hook?a=b HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{port}".encode() in head
    assert body == b'{"a":1}'


def test_a_redirect_is_an_answer_and_leads_nowhere():
    with answering(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n") as (port, _):
        assert outbound.post(f"http://127.0.0.1:{port}/", b"", {}, allowed=LOOPBACK).status == 302


def test_an_endless_body_is_read_to_its_limit():
    class Endless(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(200):
                    self.wfile.write(b"x" * 65_536)
            except OSError:
                pass

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            answer = outbound.post(f"http://127.0.0.1:{server.server_port}/", b"", {}, allowed=LOOPBACK)
        finally:
            server.shutdown()
            thread.join()
    assert answer.body == b"x" * outbound.ANSWER_BYTES_MAX


@pytest.mark.parametrize("pause_s", [0.05, 5.0])
def test_a_server_that_drips_or_says_nothing_is_left_in_time(pause_s):
    answer = b"HTTP/1.1 200 OK\r\n" + b"x-filler: y\r\n" * 50
    with answering(answer, pause_s=pause_s) as (port, _):
        began_s = time.monotonic()
        with pytest.raises(outbound.Unreachable, match=r"no answer within 0\.5 s"):
            outbound.post(f"http://127.0.0.1:{port}/", b"", {}, allowed=LOOPBACK, timeout_s=0.5)
        assert time.monotonic() - began_s < 4.5  # of the promised 0.5 s; all else ends after 5 s


def test_what_is_not_http_or_not_there_says_so():
    with (
        answering(b"SSH-2.0-OpenSSH_9.2\r\n") as (port, _),
        pytest.raises(outbound.Unreachable, match="answer in HTTP"),
    ):
        outbound.post(f"http://127.0.0.1:{port}/", b"", {}, allowed=LOOPBACK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(outbound.Unreachable, match="refused"):
        outbound.post(f"http://127.0.0.1:{port}/", b"", {}, allowed=LOOPBACK)
    with pytest.raises(outbound.Unreachable, match="cannot be resolved"):
        outbound.post("https://no-such-name.invalid/", b"", {}, allowed=())


def test_tls_is_spoken_for_https_and_a_wrong_partner_is_named():
    with answering(b"HTTP/1.1 400 plain http\r\n\r\n") as (port, _), pytest.raises(outbound.Unreachable):
        outbound.post(f"https://127.0.0.1:{port}/", b"", {}, allowed=LOOPBACK, timeout_s=2)
