"""An OTLP/HTTP collector on a real socket, and one that takes requests and never answers."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

POURED_MAX = 256 * 1024 * 1024


class Span:
    """One span as it came over the wire."""

    def __init__(self, raw, service: str) -> None:
        self.name = raw.name
        self.service = service
        self.trace_id = raw.trace_id.hex()
        self.span_id = raw.span_id.hex()
        self.parent_id = raw.parent_span_id.hex()
        self.kind = raw.kind
        self.failed = raw.status.code == 2
        self.start_us, self.end_us = raw.start_time_unix_nano // 1000, raw.end_time_unix_nano // 1000
        self.attributes = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in raw.attributes}

    @property
    def us(self) -> int:
        return self.end_us - self.start_us


class Collector:
    """Keeps what it is sent; `status` is what it answers."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.paths.append(path)
        self.bodies.append(body)
        for resource in request.resource_spans:
            named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Span(raw, named["service.name"]) for raw in scope.spans]

    def __enter__(self) -> Collector:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def until(self, spans: int, within_s: float = 60.0) -> list[Span]:
        """The spans, once there are so many."""
        end = time.monotonic() + within_s
        while len(self.spans) < spans:
            assert time.monotonic() < end, f"{len(self.spans)} spans in {within_s} s"
            time.sleep(0.02)
        return self.spans


class Hanging:
    """Accepts connections, reads nothing and says nothing."""

    def __enter__(self) -> Hanging:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        return self

    def __exit__(self, *_) -> None:
        self.listener.close()


WHOLE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\n\r\n"


class Pouring:
    """Answers 200 to whatever comes, and goes on with its answer for as long as somebody reads."""

    def __init__(self, part: bytes, every_s: float = 0.0, head: bytes = WHOLE_HEAD) -> None:
        self.poured = 0
        self._head = head
        self._part = part
        self._every_s = every_s

    def __enter__(self) -> Pouring:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._pour, args=(peer,), daemon=True).start()

    def _pour(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.recv(65_536)
            peer.sendall(self._head)
            while self.poured < POURED_MAX:
                peer.sendall(self._part)
                self.poured += len(self._part)
                time.sleep(self._every_s)
